"""A run beside the prediction made before it: against numbers worked out by hand, the simulator and the replay."""

import json
from dataclasses import replace
from fractions import Fraction
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from random import Random
from re import sub

import pytest

from chimera_ir.commands.common import WRONG_COMMAND, WRONG_TEXT
from chimera_ir.ir.kinds import BACKWARD, FORWARD
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import Compute, Instruction, Pair
from chimera_ir.ir.streams import view_of
from chimera_ir.ir.text.printer import show
from chimera_ir.predict.events import Role
from chimera_ir.predict.replay import pace, replay
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.choose import Inputs, Unfit, read_both
from chimera_ir.profile.cluster import Cluster, Link
from chimera_ir.profile.costs import StageCosts
from chimera_ir.source import Source
from chimera_ir.trace.compare import TraceComparison
from chimera_ir.trace.forecast import play, predict_from_profile, profile_source
from chimera_ir.trace.trace_files import Activity, RunInfo, Trace, read, recorded
from tests.instructions import what
from tests.property.test_replay import random_setting
from tests.repeatable import also
from tests.simulator import Simulator
from tests.timings import stage_timing
from tests.unit import traced
from tests.unit.command import contents
from tests.unit.test_page_tables import document_in
from tests.unit.test_trace import SCHEMES, compiled
from tests.unit.trace_events import assert_valid

PROFILE = """
[model]
name = "two layers"
[[depth]]
stages = 2
stage = [
  { weights = "1 MB", step = "500 us", at = [
    { micro_batch_size = 1, forward = "1 ms", activations = "1 MB", output = "300 kB" },
    { micro_batch_size = 2, forward = "1.5 ms", activations = "1 MB", output = "600 kB" },
  ] },
  { weights = "1 MB", step = "200 us", at = [
    { micro_batch_size = 1, forward = "1 ms", activations = "1 MB" },
    { micro_batch_size = 2, forward = "1.5 ms", activations = "1 MB" },
  ] },
]
"""
CLUSTER = """
[cluster]
name = "a desk"
workers = 2
memory = "1 GB"
[links]
between = { latency = "100 us", bandwidth = "1 GB/s", overhead = "20 us" }
"""
SLOWER = PROFILE.replace("1 ms", "7 ms").replace("1.5 ms", "9 ms")
"""What a rehearsal must not take from a profile."""

COUNTED = sub(r'step = "\d+ us", ', "", PROFILE.replace("ms", "MFLOP"))
"""The same stages, their work counted."""

BARRIERED = (
    {Activity.POST: 40, "forward": 1000, Activity.RECV: 3820, "backward": 2000},
    {
        Activity.POST: 40,
        Activity.RECV: 1420,
        "forward": 1000,
        "backward": 2000,
        Activity.SEND: 300,
        Activity.FLUSH: 2100,
    },
)
"""Microseconds by hand: a post takes 20, a message 300 to leave and 100 more to arrive; nothing has to be summed.

    worker 0: recv 0-20, F 20-1020, send 1020-1040, wait recv 1040-4860, B 4860-6860
    worker 1: recv 0-20, wait recv 20-1440, F 1440-2440, B 2440-4440, send 4440-4460, wait send 4460-4760
"""


def inputs(profile: str = PROFILE, cluster: str = CLUSTER) -> Inputs:
    return read_both(Source("m.profile.toml", profile), Source("c.cluster.toml", cluster))


def compared(directory: Path, files: Inputs) -> TraceComparison:
    trace = read(directory)
    return traced.compared(trace, profile_source(trace, files))


def predicted(found: TraceComparison) -> list[dict[Activity, int]]:
    return [{row.kind: round(row.predicted * 1e6) for row in rows if row.predicted} for rows in found.rows]


@pytest.mark.parametrize("profile", [PROFILE, SLOWER, COUNTED])
def test_a_rehearsal_is_foretold_as_by_hand_whatever_times_the_profile_has(profile: str, tmp_path: Path) -> None:
    found = compared(traced.write(tmp_path / "t"), inputs(profile))
    assert predicted(found) == list(BARRIERED)
    assert found.steps[0] == pytest.approx(0.00686, abs=1e-12)
    backward = next(each for each in found.operations if what(each.predicted.operation) is BACKWARD)
    assert (backward.predicted.start, backward.predicted.end) == (4_860_000, 6_860_000)
    assert (backward.measured.start, backward.measured.end) == (5_110_000, 7_150_000)
    assert [row.cause for row in found.rows[1] if row.kind is Activity.SEND] == ["sends to worker 0"]


def test_what_is_measured_does_not_depend_on_what_was_predicted(tmp_path: Path) -> None:
    directory = traced.write(tmp_path / "t")
    told, own = compared(directory, inputs()), traced.compared(read(directory))
    assert told.measured == own.measured
    assert [[(r.kind, r.cause, r.measured) for r in rows if r.measured] for rows in told.rows] == [
        [(r.kind, r.cause, r.measured) for r in rows if r.measured] for rows in own.rows
    ]


def test_training_is_foretold_with_the_times_of_the_profile_and_its_steps(tmp_path: Path) -> None:
    """Worker 0 is never idle but for its messages, and what worker 1 does after its send is over long before."""
    found = compared(traced.write(tmp_path / "t", rehearse=None), inputs())
    first, second = predicted(found)
    assert first == BARRIERED[0] | {Activity.STEP: 500}
    assert second == {
        Activity.POST: 40,
        Activity.RECV: 7360 - 40 - 3000 - 300 - 200,
        "forward": 1000,
        "backward": 2000,
        Activity.SEND: 300,
        Activity.STEP: 200,
    }


@pytest.mark.full
@pytest.mark.parametrize(("name", "settings"), SCHEMES, ids=lambda value: str(value))
def test_lanes_are_those_of_the_replay_to_the_nanosecond(name: str, settings: dict[str, int]) -> None:
    """Computes also those of the simulator; instructions that are no events take no time where the lane is.

    A move is launched in the lane and runs beside it; that a lane waits for it the simulator shows in what follows.
    """
    _, level = compiled(name, **settings)
    program = view_of(level)
    header = program.header
    setting = random_setting(header, Random(name))
    predicted = predict_from_profile(level, setting, not header.asynchronous, header.updates // 2)
    events = [[each for each in lane if each.end > each.start] for lane in replay(program, setting).lanes]
    assert [[span.operation for span in lane] for lane in predicted.lanes] == [*map(list, program.lanes)]
    for lane, expected in zip(predicted.lanes, events, strict=True):
        assert all(before.end == after.start for before, after in pairwise(lane))
        timed = [(span.operation, span.start, span.end) for span in lane if span.end > span.start]
        known = [(each.instruction, round(each.start * 1e9), round(each.end * 1e9)) for each in expected]
        assert timed == known
    computes = {
        (worker, span.operation, span.start, span.end)
        for worker, lane in enumerate(predicted.lanes)
        for span in lane
        if isinstance(span.operation, Compute | Pair) and not span.operation.kind.moves
    }
    simulated = {(w, what, round(s * 1e9), round(e * 1e9)) for w, what, s, e in Simulator(program, setting).computes}
    assert computes == simulated


@pytest.mark.full
@pytest.mark.parametrize(("name", "settings"), SCHEMES, ids=lambda value: str(value))
def test_updates_take_what_the_replay_and_the_pace_say(name: str, settings: dict[str, int]) -> None:
    """Also where it is one in several updates that takes longer than the others: then several are counted."""
    _, level = compiled(name, **settings)
    program = view_of(level)
    header = program.header
    for seed in also([0], [1, 2]):
        setting = random_setting(header, Random(seed))
        predicted = predict_from_profile(level, setting, False, header.updates // 2)
        first, last = predicted.windows[predicted.counted[0]], predicted.windows[predicted.counted[-1]]
        for start, end in zip(first, last, strict=True):
            assert abs((end.end - start.start) / len(predicted.counted) - 1e9 * pace(program, setting)) <= 1
        assert predicted.shown in predicted.counted
        if not header.asynchronous:
            (window,) = predict_from_profile(level, setting, True, 0).windows
            assert {end - start for start, end in window} == {round(1e9 * replay(program, setting).seconds)}


def test_several_updates_are_counted_where_not_all_take_as_long() -> None:
    """A cycle of two updates and 27 seconds, as `random_setting` has them, is no 13 and no 14 seconds each."""
    _, program = compiled("pipedream", D=2)
    predicted = predict_from_profile(program, random_setting(program.header, Random(1)), False, 4)
    lasted = [(window.end - window.start) / 1e9 for window in (each[0] for each in predicted.windows[1:-1])]
    assert set(lasted) == {13.0, 14.0}
    assert len(predicted.counted) == 2


@pytest.mark.parametrize(("latency", "counted"), [(0.3, 4), (4.0, 1)])
def test_more_updates_are_replayed_where_the_beginning_is_slow_to_fade(latency: float, counted: int) -> None:
    """A stage that is a tenth slower than the others gets behind little by little."""
    _, program = compiled("pipedream", D=4)
    times = [stage_timing(f, 2 * f, 3 * f, 1, 1, 1, 1) for f in (1.0, 1.1, 1.0, 1.0)]
    link = Link(latency, 0.0)
    setting = Setting(
        tuple(StageCosts(1, 1, 0, {1: each}) for each in times), Cluster("c", 4, 1, 1, 0, link, link, link), 1, 1
    )
    predicted = predict_from_profile(program, setting, False, 0)
    assert len(predicted.windows) > view_of(program).header.updates
    first, last = predicted.windows[predicted.counted[0]], predicted.windows[predicted.counted[-1]]
    for start, end in zip(first, last, strict=True):
        assert (end.end - start.start) / 1e9 == pytest.approx(counted * pace(view_of(program), setting), abs=2e-9)
    assert len(predicted.counted) == counted


def stream(directory: Path, program: Program, **other: object) -> Path:
    """The trace of a run as slow as operations of 3 and 5 ms make it, whose messages take no time."""

    def cost(each: Instruction) -> int:
        return 3_000_000 if what(each) is FORWARD else 5_000_000 if what(each) is BACKWARD else 0

    directory.mkdir()
    text = show(program)
    (directory / "schedule.sir").write_text(text)
    updates = 16
    for rank, lane in enumerate(play(program, updates, cost)):
        rows = [[span.update, each, span.start, span.end] for span in lane for each in recorded(span.operation)]
        first, *_ = traced.lines(rank, updates, program=sha256(text.encode()).hexdigest(), **other)
        clock = {"at": 0, "offset": 0, "uncertainty": 0}
        content = [first | {"clock": clock}, {"operations": rows}, {"ended": None, "clock": clock}]
        (directory / f"rank_{rank}.jsonl").write_text(traced.text(content))
    return directory


@pytest.mark.parametrize("rehearse", [None, {"F": 0.003, "B": 0.005}])
def test_a_stream_of_updates_is_foretold_at_its_pace(rehearse: dict[str, float] | None, tmp_path: Path) -> None:
    _, program = compiled("pipedream", D=2)
    directory = stream(tmp_path / "t", program, rehearse=rehearse, scheme="pipedream(D=2)")
    found = compared(directory, inputs())
    expected = replay(view_of(program), found.source.setting).seconds
    for worker in range(2):
        assert found.step(worker) == pytest.approx((expected, 0.008), abs=2e-9)
        steps = sum(row.predicted for row in found.rows[worker] if row.kind is Activity.STEP)
        assert steps == pytest.approx(0 if rehearse else (0.0005, 0.0002)[worker], abs=1e-12)
    assert found.operations == ()


def about(**other: object) -> RunInfo:
    known = RunInfo("any", "", 1, "pipeline", "gloo", 4, 1, {"F": 0.001, "B": 0.003})
    return replace(known, **other)  # type: ignore[arg-type]


def test_a_rehearsal_sleeps_as_often_as_an_operation_has_micro_batches_recomputing_or_not() -> None:
    """The profile has two micro-batches at once, quicker than twice one; that is no matter of a sleep."""
    _, program = compiled("chimera_doubling", D=2, N=4)
    setting = profile_source(Trace(about(), "", program, ()), inputs()).setting
    taken = {
        (each.instruction.kind.letter, len(each.instruction.micros)): Fraction(each.end - each.start).limit_denominator(
            10_000
        )
        for lane in replay(view_of(program), setting).lanes
        for each in lane
        if each.role is Role.COMPUTE and isinstance(each.instruction, Compute)
    }
    assert taken == {
        (letter, count): Fraction(count * one, 1000)
        for letter, one in (("F", 1), ("B", 3), ("recompute", 0))
        for count in {
            len(e.micros) for lane in program.lanes for e in lane if isinstance(e, Compute) and e.kind.letter == letter
        }
    }
    assert {("F", 2), ("recompute", 1)} <= taken.keys()
    apart = about(rehearse={"F": 0.001, "B": 0.002, "recompute": 0.001})
    assert profile_source(Trace(apart, "", program, ()), inputs()).setting.timing(0).seconds("recompute") == 0.001


def test_copies_and_layout_are_those_of_the_run() -> None:
    _, program = compiled("dapple", D=2, N=2)
    big = inputs(cluster=CLUSTER.replace("workers = 2", "workers = 8"))
    setting = profile_source(Trace(about(copies=3, layout="replica"), "", program, ()), big).setting
    assert (setting.copies, setting.micro_batch_size, setting.replica_layout) == (3, 1, True)


@pytest.mark.parametrize(("rehearse", "shared"), [(None, True), ({"F": 0.001, "B": 0.003}, False)])
def test_replicas_share_the_state_where_those_of_the_run_did_and_it_made_steps(rehearse: object, shared: bool) -> None:
    _, program = compiled("dapple", D=2, N=2)
    trace = Trace(about(sharded_optimizer=True, rehearse=rehearse), "", program, ())
    assert profile_source(trace, inputs()).setting.sharded_optimizer == shared
    assert not profile_source(replace(trace, about=about(rehearse=rehearse)), inputs()).setting.sharded_optimizer


def test_training_needs_a_device_for_a_profile_that_counts_work() -> None:
    _, program = compiled("dapple", D=2, N=2)
    with pytest.raises(Unfit) as unfit:
        profile_source(Trace(about(rehearse=None), "", program, ()), inputs(COUNTED))
    assert [(source.name, [each.code for each in found]) for source, found in unfit.value.texts] == [
        ("c.cluster.toml", ["CH716"])
    ]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, str, str]:
    """The options that name both files."""
    profile, cluster = tmp_path / "m.profile.toml", tmp_path / "c.cluster.toml"
    profile.write_text(PROFILE)
    cluster.write_text(CLUSTER)
    return "--profile", str(profile), "--cluster", str(cluster)


def test_the_command_says_which_prediction_it_compares_with(tmp_path: Path, tracer, files) -> None:  # type: ignore[no-untyped-def]
    directory = traced.write(tmp_path / "t")
    ended = tracer(directory, *files)
    assert (ended.status, ended.err) == (0, "")
    ground = "predicted by a replay, from the profile 'two layers' and the cluster 'a desk'"
    assert "an update takes 6.860 ms predicted, 7.200 ms measured" in ended.out
    assert f"{ground}; F and B are those of the rehearsal" in ended.out
    notes = document_in((directory / "view" / "trace.html").read_text())["notes"]
    assert any(note.startswith(ground) for note in notes)
    assert {*contents(directory / "view")} == {".chimera-trace", "trace.html", "compare.svg", "trace.json"}
    told = json.loads(tracer(directory, *files, "--json").out)
    assert told["prediction"] == {"profile": "two layers", "cluster": "a desk"}
    assert told["step_seconds"]["predicted"] == pytest.approx(0.00686)


def test_what_the_files_warn_of_is_said(tmp_path: Path, tracer, files) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "m.profile.toml").write_text(f"{PROFILE}# warning: stage 0 is too noisy to use\n")
    ended = tracer(traced.write(tmp_path / "t"), *files)
    assert (ended.status, ended.err) == (0, f"warning: {files[1]}: stage 0 is too noisy to use\n")


def test_without_the_files_it_is_the_run_s_own(tmp_path: Path, tracer) -> None:  # type: ignore[no-untyped-def]
    ended = tracer(traced.write(tmp_path / "t"))
    assert "predicted from F and B of the rehearsal; messages, sums and posting take no time" in ended.out
    ended = tracer(traced.write(tmp_path / "u", rehearse=None))
    assert "predicted from the run's own medians; messages, sums and posting take no time" in ended.out
    assert json.loads(tracer(tmp_path / "t", "--json").out)["prediction"] is None


def test_the_thread_of_the_prediction_is_the_replay(tmp_path: Path, tracer, files) -> None:  # type: ignore[no-untyped-def]
    directory = traced.write(tmp_path / "t")
    assert tracer(directory, *files).status == 0
    content = json.loads((directory / "view" / "trace.json").read_text())
    assert_valid(content)
    lane = [e for e in content["traceEvents"] if e["ph"] == "X" and e["tid"] == 1 and e["pid"] == 1]
    origin = lane[0]["ts"]
    assert [(e["name"], round(e["ts"] - origin), round(e["dur"])) for e in lane] == [
        ("recv m0 s0->s1 from w0 into 0", 0, 20),
        ("wait recv m0 s0->s1", 20, 1420),
        ("F m0 s1", 1440, 1000),
        ("B m0 s1", 2440, 2000),
        ("send m0 s1->s0 to w0", 4440, 20),
        ("wait send m0 s1->s0", 4460, 300),
    ]


def _deeper(profile: str) -> str:
    """One more stage in front."""
    first = profile[profile.index("  { weights") : profile.rindex("  { weights")]
    return profile.replace("stages = 2", "stages = 3").replace("stage = [\n", f"stage = [\n{first}")


MISTAKES = {
    "no such depth": (
        _deeper(PROFILE),
        CLUSTER,
        ("error[CH717]: the schedule has 2 stages, and the profile has no such depth", "m.profile.toml", "depths: 3"),
    ),
    "no such micro-batch size": (
        PROFILE.replace("size = 1", "size = 4"),
        CLUSTER,
        ("error[CH718]: stage 0 of 2 has no costs for micro-batches of size 1 (and 1 more like it)", "2, 4"),
    ),
    "too few workers": (PROFILE, CLUSTER.replace("workers = 2", "workers = 1"), ("error[CH719]", "c.cluster.toml")),
    "both wrong": (PROFILE.replace('"1 ms"', "1", 1), CLUSTER.replace("= 2", "= -2"), ("CH707", "CH710")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_files_that_do_not_fit_the_run_are_one_clear_message(mistake: str, tmp_path: Path, tracer, files) -> None:  # type: ignore[no-untyped-def]
    profile, cluster, words = MISTAKES[mistake]
    (tmp_path / "m.profile.toml").write_text(profile)
    (tmp_path / "c.cluster.toml").write_text(cluster)
    directory = traced.write(tmp_path / "t")
    tracer(directory, *files).assert_refused(WRONG_TEXT, *words)
    assert not (directory / "view").exists()


def test_one_file_without_the_other_is_refused(tmp_path: Path, tracer, files) -> None:  # type: ignore[no-untyped-def]
    directory = traced.write(tmp_path / "t")
    for alone in (files[:2], files[2:]):
        words = f"{alone[0]}: a prediction needs --profile and --cluster together"
        tracer(directory, *alone).assert_refused(WRONG_COMMAND, words)
    missing = (*files[:3], str(tmp_path / "nowhere.toml"))
    tracer(directory, *missing).assert_refused(WRONG_COMMAND, "--cluster", "nowhere.toml: No such file or directory")
    tracer(directory, "--profile", str(tmp_path), *files[2:]).assert_refused(WRONG_COMMAND, "--profile")
