"""From recorded operations to residuals: against numbers added up by hand, the compiler's timelines and the formats."""

import json
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import pytest

import chimera_ir
from chimera_ir import library
from chimera_ir.commands.common import WRONG_COMMAND
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.simulate import simulate
from chimera_ir.ir.kinds import BACKWARD
from chimera_ir.ir.levels import Program, Schedule
from chimera_ir.ir.ops import Compute, Instruction, Pair
from chimera_ir.ir.streams import ProgramStream, view_of
from chimera_ir.trace import presentation
from chimera_ir.trace.compare import choose
from chimera_ir.trace.forecast import play, windows
from chimera_ir.trace.trace_files import Activity, ClockOffset, aligned, read
from tests.instructions import what
from tests.repeatable import also
from tests.sizes import on_workers
from tests.unit import traced
from tests.unit.command import contents
from tests.unit.trace_events import assert_valid

PREDICTED = (
    {"forward": 1000, Activity.RECV: 3000, "backward": 2000},
    {Activity.RECV: 1000, "forward": 1000, "backward": 2000, Activity.FLUSH: 2000},
)
MEASURED = (
    {
        "forward": 1000,
        "backward": 2040,
        Activity.RECV: 4060,
        Activity.SEND: 10,
        Activity.SUM: 10,
        Activity.STEP: 40,
        Activity.POST: 30,
        Activity.LOAD: 5,
        Activity.BETWEEN: 5,
    },
    {
        "forward": 1010,
        "backward": 2080,
        Activity.RECV: 1090,
        Activity.SEND: 40,
        Activity.STEP: 10,
        Activity.POST: 70,
        Activity.LOAD: 10,
        Activity.FLUSH: 2890,
    },
)
"""Microseconds of an update of `traced` on each worker, added up by hand; 6 ms are promised and 7.2 ms were taken."""


def test_the_residuals_are_what_adding_up_by_hand_gives(tmp_path: Path) -> None:
    found = traced.compared(read(traced.write(tmp_path / "t")))
    for worker, rows in enumerate(found.rows):
        assert {row.kind: round(row.predicted * 1e6) for row in rows if row.predicted} == PREDICTED[worker]
        assert {row.kind: round(row.measured * 1e6) for row in rows if row.measured} == MEASURED[worker]
        assert found.step(worker) == pytest.approx((0.006, 0.0072), abs=1e-12)
    assert found.bubbles == pytest.approx((0.5, 1 - 6130 / 14400))
    assert [row.cause for row in found.rows[0] if row.kind is Activity.RECV] == ["messages from worker 1"]
    assert [row.cause for row in found.rows[1] if row.kind is Activity.SEND] == ["sends to worker 0"]
    assert (found.updates, found.chosen) == (4, (1, 2, 3))


def test_every_operation_has_its_residual(tmp_path: Path) -> None:
    found = {(w, p.operation): (p, m) for w, p, m in traced.compared(read(traced.write(tmp_path / "t"))).operations}
    backward = next(pair for (w, each), pair in found.items() if w == 0 and what(each) is BACKWARD)
    assert [(span.start, span.end) for span in backward] == [(4_000_000, 6_000_000), (5_110_000, 7_150_000)]
    assert len(found) == sum(map(len, traced.LANES)) - 2, "all but what is loaded"


def test_without_a_barrier_an_update_lasts_from_the_end_of_the_one_before(tmp_path: Path) -> None:
    """The flush of one is waiting in the next: on worker 1 for its message, as on every worker in the steady state."""
    found = traced.compared(read(traced.write(tmp_path / "t", rehearse=None)))
    step = 40 + 10 + 1000 + 1010 + 2080 + 2040
    for worker, rows in enumerate(found.rows):
        predicted = {row.kind: round(row.predicted * 1e6) for row in rows if row.predicted}
        assert sum(predicted.values()) == step - 10, "the step of worker 1 is hidden behind worker 0"
        assert Activity.FLUSH not in predicted
        assert found.step(worker)[1] == pytest.approx(traced.EVERY / 1e6)
    assert round(found.rows[1][0].predicted * 1e6) == 1010


def test_a_run_that_ended_early_is_compared_as_far_as_it_came(tmp_path: Path, tracer) -> None:  # type: ignore[no-untyped-def]
    directory = traced.write(tmp_path / "t")
    for rank in range(2):
        first, early, _, last = traced.lines(rank)
        last |= {"ended": "train.py: interrupted", "clock": None}
        (directory / f"rank_{rank}.jsonl").write_text(traced.text([first, early, last]))
    ended = tracer(directory)
    assert ended.status == 0
    assert "the run ended early: train.py: interrupted" in ended.out


def test_memory_of_carries_and_of_the_host_is_that_of_the_copy_that_used_most(tmp_path: Path) -> None:
    directory = traced.write(tmp_path / "t")
    for rank, used in enumerate(({"host": 2048, "carries s0": 512}, {})):
        *others, last = traced.lines(rank)
        (directory / f"rank_{rank}.jsonl").write_text(traced.text([*others, last | ({"memory": used} if used else {})]))
    found = traced.compared(read(directory))
    assert found.memory == ((0, "carries s0", None, 512), (0, "host", None, 2048))
    measured = presentation.as_json(found)["workers"]
    assert [[row["measured"] for row in worker["memory"]] for worker in measured] == [[512, 2048], []]


COSTS = {"F": 3, "B": 5}


def computes(instruction: Instruction) -> bool:
    """Whether an instruction occupies its lane with work; a move is only launched there."""
    return isinstance(instruction, Compute | Pair) and not instruction.kind.moves


def compiled(name: str, **settings: int) -> tuple[Schedule, Program | ProgramStream]:
    compilation = chimera_ir.compile(name, **settings)
    return compilation.verified.schedule, compilation.program


SCHEMES = [
    (name, on_workers(name, workers, count))
    for name in library.names()
    for workers, count in also(((2, 2), (4, 8)), ((4, 4), (4, 12)))
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "settings"), SCHEMES, ids=lambda value: str(value))
def test_what_is_promised_is_the_timeline_of_the_compiler(name: str, settings: dict[str, int]) -> None:
    """Two simulators: one of schedules, exact; one of programs, with every wait in it."""
    schedule, program = compiled(name, **settings)
    header = view_of(program).header
    costs = Costs(F=Fraction(COSTS["F"]), B=Fraction(COSTS["B"]), recompute=Fraction(0))
    expected = simulate(schedule, costs)

    def cost(each: Instruction) -> int:
        return int(costs.duration(each, header) / expected.tick) if computes(each) else 0

    lanes = play(program, header.updates, cost)
    assert [[(s.operation, s.start, s.end) for s in lane if computes(s.operation)] for lane in lanes] == [
        [tuple(timed) for timed in lane if timed.in_lane] for lane in expected.lanes
    ]
    if header.asynchronous:
        middle = header.updates // 2
        lengths = {w.end - w.start for each in windows(header, lanes, False)[middle - 1 : middle + 1] for w in each}
        assert lengths == {expected.makespan / expected.tick}, "a step apart, in the steady state"
    else:
        assert {window.end - window.start for window in windows(header, lanes, True)[0]} == {expected.span}


def test_updates_like_most_are_the_middle_half_without_the_first() -> None:
    assert sorted(choose([9.0, 1.0, 5.0, 4.0, 3.0, 2.0, 6.0, 7.0, 8.0], 1)) == [2, 3, 4, 6]
    assert choose([9.0], 1) == [0]
    assert sorted(choose([1.0] * 8, 2)) == [3, 4]


def test_a_clock_that_runs_differently_is_set_right_from_its_two_offsets() -> None:
    clock = (ClockOffset(0, 1000, 10), ClockOffset(1_000_000, 3000, 10))
    assert [aligned(clock, time) for time in (0, 500_000, 1_000_000)] == [1000, 502_000, 1_003_000]


def test_an_offset_within_its_uncertainty_is_none() -> None:
    assert aligned((ClockOffset(0, -900, 1000), ClockOffset(10, 40, 50)), 7) == 7


def test_the_command_writes_a_page_a_picture_and_a_trace(tmp_path: Path, tracer) -> None:  # type: ignore[no-untyped-def]
    directory = traced.write(tmp_path / "t")
    ended = tracer(directory)
    assert (ended.status, ended.err) == (0, "")
    assert "an update takes 6.000 ms predicted, 7.200 ms measured" in ended.out
    assert ended.out.splitlines()[2] == "largest part of the difference, +1.200 ms: wait for a message, +0.575 ms"
    assert "worker 1: done; waits for the last worker" in ended.out
    view = directory / "view"
    assert contents(view).keys() == {".chimera-trace", "trace.html", "compare.svg", "trace.json"}
    assert tracer(directory).status == 0, "what the command wrote it replaces"


def test_no_word_of_its_tables_is_broken_on_a_narrow_terminal(  # type: ignore[no-untyped-def]
    tmp_path: Path, tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = traced.write(tmp_path / "t")
    monkeypatch.setenv("COLUMNS", "40")
    lines = tracer(directory).out.splitlines()
    assert max(len(line) for line in lines if str(directory) not in line) <= 40
    words = {word for line in lines for word in line.split()}
    assert {"predicted", "measured", "difference", "share", "update", "message", "messages"} <= words


def test_what_was_recorded_stays_where_the_command_writes_beside_it(tmp_path: Path, tracer) -> None:  # type: ignore[no-untyped-def]
    directory = traced.write(tmp_path / "t")
    (directory / ".chimera-trace").write_text("written by train.py --trace\n")
    before = contents(directory)
    assert tracer(directory, "--out", directory).status == 0
    assert {**contents(directory), ".chimera-trace": b""}.items() >= {**before, ".chimera-trace": b""}.items()
    assert tracer(directory).status == 0


def test_the_trace_is_in_the_trace_event_format(tmp_path: Path, tracer) -> None:  # type: ignore[no-untyped-def]
    directory = traced.write(tmp_path / "t")
    assert tracer(directory, "--out", tmp_path / "o").status == 0
    content = json.loads((tmp_path / "o" / "trace.json").read_text())
    assert_valid(content)
    events = content["traceEvents"]
    recorded = [each for each in events if each["ph"] == "X" and each["tid"] == 0]
    assert len(recorded) == 4 * 20
    forward = next(each for each in recorded if each["name"] == "F m0 s1" and each["args"]["update"] == 2)
    assert (forward["pid"], forward["ts"], forward["dur"]) == (1, 21110.0, 1010.0)
    assert sum(each["ph"] == "s" for each in events) == 4 * 2, "every message of every update"
    assert sum(each["ph"] == "b" for each in events) == 4 * 2


def test_the_figures_for_programs_are_those_of_the_tables(tmp_path: Path, tracer) -> None:  # type: ignore[no-untyped-def]
    told = json.loads(tracer(traced.write(tmp_path / "t"), "--json").out)
    assert told["step_seconds"] == {"predicted": pytest.approx(0.006), "measured": pytest.approx(0.0072)}
    for worker in told["workers"]:
        for side in ("predicted", "measured"):
            whole = sum(row[side] for row in worker["residuals"])
            assert whole == pytest.approx(worker["step_seconds"][side], abs=1e-12)
    assert {"worker": 0, "operation": "F m0 s0", "predicted": [0.0, 0.001], "measured": [0.00002, 0.00102]} in told[
        "operations"
    ]


def test_of_a_run_that_was_to_be_long_what_there_is_is_read(tmp_path: Path, tracer) -> None:  # type: ignore[no-untyped-def]
    directory = traced.write(tmp_path / "t")
    for rank in range(2):
        path = directory / f"rank_{rank}.jsonl"
        text = path.read_text().replace('"updates": 4', f'"updates": {10**9}')
        path.write_text(text.replace('"ended": null', '"ended": "train.py: interrupted"'))
    assert tracer(directory).status == 0


def test_what_a_run_says_of_itself_is_shown_and_not_acted_upon(tmp_path: Path, tracer) -> None:  # type: ignore[no-untyped-def]
    evil = "\x1b[2J\x07\x9b31m\u202e\ud800\0</title><script>"
    directory = traced.write(tmp_path / "t", scheme=evil, backend=evil)
    ended = tracer(directory)
    assert ended.status == 0
    assert "\\x1b[2J" in ended.out
    view = {name: data.decode() for name, data in contents(directory / "view").items()}
    for text in (ended.out, *view.values()):
        assert not {"\x1b", "\x07", "\x9b", "\u202e", "\0"} & {*text}
    assert "<script>" not in view["compare.svg"]
    assert "</title><script>" not in view["trace.html"]
    ElementTree.fromstring(view["compare.svg"])


def test_a_command_line_that_is_wrong_is_one_clear_message(tmp_path: Path, tracer) -> None:  # type: ignore[no-untyped-def]
    tracer(tmp_path / "nowhere").assert_refused(WRONG_COMMAND, "nowhere")
    directory = traced.write(tmp_path / "t")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary").write_text("mine")
    tracer(directory, "--out", tmp_path / "full").assert_refused(WRONG_COMMAND, "was not written by chimera-trace")
