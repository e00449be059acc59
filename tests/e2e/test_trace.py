"""``train.py --trace``: every rank's operations are those of its lane, in order, and causes come before effects."""

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from chimera_ir.commands.trace_command import main
from chimera_ir.ir.ops import AllReduce, Send, WaitAllReduce, WaitRecv
from chimera_ir.trace.event_files import recorded_trace
from chimera_ir.trace.match import lanes
from chimera_ir.trace.trace_files import Trace, read
from tests import forkserver
from tests.e2e.ranks import MODELS, SCRIPT, Job, Outcome, compiled, environment, interrupted, run_all, torchrun
from tests.patience import PATIENCE
from tests.programs import free_port
from tests.unit.test_page_tables import document_in
from tests.unit.trace_events import assert_valid
from tests.unit.traced import compared

FAILING = str(MODELS / "failing.py")
REHEARSE = ("--rehearse", "F=0.01,B=0.02", "--steps", "5")
TRAIN = ("--steps", "6", "--micro-batch-size", "2")
AHEAD = """
import ctypes, os, sys
assert ctypes.CDLL(None).unshare(0x80) == 0, "CLONE_NEWTIME"
with open("/proc/self/timens_offsets", "w") as offsets:
    offsets.write("monotonic 5000 0")
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""The beginning of a program that runs where the monotonic clock is 5000 s ahead."""

UPDATES = {"rehearsed": 5, "pipedream": 12}
"""Of runs that make other than 6: four workers without a flush take four updates to warm up, and four to drain."""


def jobs(folder: Path) -> Iterator[Job]:
    """Two directions rehearsed; loops; recomputation over several micro-batches; streams of updates; W=1 and W=2."""
    four = compiled(folder, "chimera", D=4, N=4)
    yield Job("rehearsed", four, (*REHEARSE, "--trace", str(folder / "rehearsed.trace")))
    yield Job("looped", compiled(folder, "dapple", D=4, N=16), (*TRAIN, "--trace", str(folder / "looped.trace")))
    for name, layout in (
        ("chimera_doubling", "pipeline"),
        ("chimera_halving", "replica"),
        ("pipedream_2bw", "replica"),
    ):
        arguments = (*TRAIN, "--layout", layout, "--trace", str(folder / f"{name}.trace"))
        yield Job(name, compiled(folder, name, D=2, N=4), arguments, "plain.py")
    arguments = ("--check", *TRAIN, "--steps", str(UPDATES["pipedream"]), "--trace", str(folder / "pipedream.trace"))
    yield Job("pipedream", compiled(folder, "pipedream", D=4), arguments)
    foreign = folder / "foreign"
    foreign.mkdir()
    (foreign / "diary").write_text("mine")
    yield Job("into-foreign", four, ("--trace", str(foreign)))
    yield Job("into-file", four, ("--trace", str(foreign / "diary")))
    yield Job("check-only", four, ("--check-only", "--trace", str(folder / "none.trace")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Outcome]:
    return run_all(folder, 4, list(jobs(folder)))


RUNS = ("rehearsed", "looped", "chimera_doubling", "chimera_halving", "pipedream_2bw", "pipedream")


@pytest.mark.parametrize("name", RUNS)
def test_what_was_recorded_is_the_lane_in_order_and_no_effect_precedes_its_cause(
    name: str, folder: Path, outcomes: dict[str, Outcome]
) -> None:
    outcomes[name].assert_passed()
    trace = read(folder / f"{name}.trace")
    assert (trace.about.updates, {rank.ended for rank in trace.ranks}) == (UPDATES.get(name, 6), {None})
    found = lanes(trace)
    starts: dict[Any, list[int]] = defaultdict(list)
    for rank, lane in zip(trace.ranks, found, strict=True):
        assert all(before.end <= after.start for before, after in pairwise(lane))
        for span in lane:
            if isinstance(span.operation, Send):
                starts[rank.copy, span.update, span.operation.message].append(span.start)
            if isinstance(span.operation, AllReduce):
                starts[span.update, span.operation.group].append(span.start)
    for rank, lane in zip(trace.ranks, found, strict=True):
        for span in lane:
            if isinstance(span.operation, WaitRecv):
                (sent,) = starts[rank.copy, span.update, span.operation.message]
                assert sent < span.end
            if isinstance(span.operation, WaitAllReduce):
                launched = starts[span.update, span.operation.group]
                holders = trace.program.header.members(span.operation.group)
                assert len(launched) == len(holders) * trace.about.copies
                assert max(launched) < span.end


@pytest.mark.parametrize("name", RUNS)
def test_the_kinds_account_for_all_of_the_time_of_every_worker(
    name: str, folder: Path, outcomes: dict[str, Outcome]
) -> None:
    """The step times from the files themselves, of the updates that were chosen."""
    outcomes[name].assert_passed()
    trace = read(folder / f"{name}.trace")
    found = compared(trace)
    for worker in range(trace.program.header.workers):
        expected = step_seconds(trace, worker, found.chosen)
        assert found.step(worker)[1] == pytest.approx(expected, rel=1e-9)
    assert_valid(json.loads(recorded_trace(trace, found)))


def step_seconds(trace: Trace, worker: int, updates: tuple[int, ...]) -> float:
    """Rehearsed, from anybody's first operation to anybody's last; else from a rank's end of one update to the next."""
    lengths: list[int] = []
    stream = trace.program.header.asynchronous
    for rank in trace.ranks:
        if rank.worker != worker:
            continue
        for update in updates:
            everybody = [each for r in trace.ranks for each in r.operations if each.update == update]
            ours = [each for each in rank.operations if not stream or each.text.startswith("step")]
            if trace.about.rehearse is not None:
                lengths.append(max(each.end for each in everybody) - min(each.start for each in everybody))
            else:
                end, before = (max(each.end for each in ours if each.update == u) for u in (update, update - 1))
                lengths.append(end - before)
    return sum(lengths) / len(lengths) / 1e9


def test_a_rehearsal_has_its_bubbles_where_they_were_predicted(folder: Path, outcomes: dict[str, Outcome]) -> None:
    """D = N = 4: makespan 16 of which 12 are busy (FACTS), so F = 10 ms gives 160 ms and a quarter; never less."""
    outcomes["rehearsed"].assert_passed()
    found = compared(read(folder / "rehearsed.trace"))
    assert found.steps[0] == pytest.approx(0.16)
    assert found.bubbles[0] == pytest.approx(0.25)
    assert found.steps[1] > 0.97 * 0.16
    for rows in found.rows:
        busy = sum(row.measured for row in rows if row.kind in ("forward", "backward"))
        assert busy > 0.97 * 0.12
        waited = sum(row.measured for row in rows if row.predicted and row.kind not in ("forward", "backward"))
        assert waited > 0


def test_clocks_of_one_machine_are_seen_as_one(folder: Path, outcomes: dict[str, Outcome]) -> None:
    """What is estimated between ranks that share a clock is 0 within the uncertainty that is stated."""
    outcomes["rehearsed"].assert_passed()
    clocks = [rank.clock for rank in read(folder / "rehearsed.trace").ranks]
    assert [len(clock) for clock in clocks] == [2] * 4
    assert all(abs(each.offset) <= each.uncertainty for clock in clocks for each in clock)
    assert all(each.uncertainty > 0 for clock in clocks[1:] for each in clock)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("into-foreign", "exists and was not written by --trace; choose another directory or remove it"),
        ("into-file", "diary: File exists"),
        ("check-only", "--trace records the training, of which --check-only does none"),
    ],
)
def test_what_cannot_be_traced_is_one_clear_message(
    name: str, expected: str, folder: Path, outcomes: dict[str, Outcome]
) -> None:
    said = "".join(outcomes[name].said)
    assert expected in said
    assert said.count("train.py:") == 1, said
    assert "2" in outcomes[name].statuses
    assert "0" not in outcomes[name].statuses
    assert (folder / "foreign" / "diary").read_text() == "mine"


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("ends"), "chimera", D=2, N=4)


def test_ctrl_c_keeps_what_there_is(two_stages: Path, tmp_path: Path) -> None:
    target = tmp_path / "t"
    arguments = ("--model", FAILING, "--steps", "100000", "--trace", str(target))
    status, _, _ = interrupted(two_stages, 2, *arguments, when=" 5/100000")
    assert status != 0
    found = compared(read(target))
    assert found.updates >= 4
    assert found.ended in ("train.py: interrupted", "train.py: rank 1: ended by torchrun: another rank has died")


def test_a_rank_that_is_killed_leaves_an_unfinished_file_and_the_page_shows_where_the_others_stopped(
    two_stages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "t"
    for _ in range(2):
        arguments = ("--model", FAILING, "--steps", "500", "--trace", str(target))
        torchrun(two_stages, 2, *arguments, FAIL="kill-in-forward:1:2")
        assert sorted(path.name for path in target.glob("rank*")) == ["rank_0.jsonl", "rank_1.jsonl.part"]
        assert "rank 1: the connection was closed" in (target / "rank_0.jsonl").read_text().splitlines()[-1]
    monkeypatch.setattr(sys, "argv", ["chimera-trace", str(target)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code is None
    assert "where every rank stopped" in capsys.readouterr().out
    stopped, killed = document_in((target / "view" / "trace.html").read_text())["trace"]["hang"]
    # In a wait for the killed rank or, if the connection has closed by then, where it posts the next message.
    assert stopped["line"].split()[0] in ("wait", "recv", "send"), stopped
    assert stopped["seconds"] >= 0
    assert (killed["line"], killed["message"]) == ("", "left no record: it was killed")


def test_clocks_of_two_machines_are_brought_together(two_stages: Path, tmp_path: Path) -> None:
    """A time namespace is as good as a machine: its monotonic clock is 5000 s ahead, and only we know that."""
    apart = ("unshare", "--time", "--monotonic", "5000", "--fork")
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no time namespaces here")
    arguments = ("--model", str(MODELS / "plain.py"), *REHEARSE, "--trace", str(tmp_path / "t"))
    common = environment() | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
    }
    words = [str(two_stages / "train.py"), *arguments]
    with ThreadPoolExecutor() as pool:
        here, there = (
            pool.submit(forkserver.run, ("-c", program, *words), common | {"RANK": rank}, tmp_path, PATIENCE)
            for program, rank in ((SCRIPT, "0"), (AHEAD + SCRIPT, "1"))
        )
    assert (here.result().returncode, there.result().returncode) == (0, 0), there.result().stderr
    trace = read(tmp_path / "t")
    for each in trace.ranks[1].clock:
        assert abs(each.offset + 5000 * 10**9) <= each.uncertainty
    found_lanes = lanes(trace)
    sent = {
        (span.update, span.operation.message): span.start
        for lane in found_lanes
        for span in lane
        if isinstance(span.operation, Send)
    }
    waits = [span for lane in found_lanes for span in lane if isinstance(span.operation, WaitRecv)]
    slack = max(each.uncertainty for each in trace.ranks[1].clock)
    assert waits
    assert all(sent[span.update, span.operation.message] <= span.end + slack for span in waits)
    assert compared(trace).steps[1] < 60
