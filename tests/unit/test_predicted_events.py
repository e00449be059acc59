"""``--emit trace``: the predicted timeline in the Trace Event Format, compared with the timeline and the report."""

import json
import runpy
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import chimera_ir
from chimera_ir import library
from chimera_ir.cost.report import activations
from chimera_ir.ir.ops import Recv
from chimera_ir.ir.streams import view_of
from chimera_ir.ir.text.printer import line
from chimera_ir.trace.event_files import FIRST_PROCESS
from tests.unit.command import Run
from tests.unit.trace_events import assert_valid

ROOT = Path(__file__).resolve().parent.parent.parent
PREDICTED = (
    "--profile",
    ROOT / "docs/examples/small.profile.toml",
    "--cluster",
    ROOT / "docs/examples/small.cluster.toml",
)


def events_of(text: str) -> list[dict[str, Any]]:
    content = json.loads(text)
    assert_valid(content)
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


def with_phase(events: Sequence[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == phase]


@pytest.mark.full
@pytest.mark.parametrize("scheme", library.names())
def test_boxes_are_those_of_the_timeline_and_every_message_has_an_arrow(scheme: str) -> None:
    """Moves of memory, which run beside the computations of a lane, are stretches of their process instead of boxes."""
    compilation = chimera_ir.compile(scheme)
    events, timeline = events_of(compilation.trace), compilation.timeline
    boxes = defaultdict(list)
    for event in with_phase(events, "X"):
        if not event["name"].startswith("wait"):
            boxes[event["pid"] - FIRST_PROCESS].append((event["name"], event["ts"], event["dur"]))
    moves = defaultdict(list)
    ends = {(event["pid"], event["id"]): event for event in with_phase(events, "e")}
    for event in with_phase(events, "b"):
        if event["cat"] == "move":
            end = ends[event["pid"], event["id"]]
            moves[event["pid"] - FIRST_PROCESS].append((event["name"], event["ts"], end["ts"] - event["ts"]))
    for worker, lane in enumerate(timeline.lanes):
        tick = 1000 * timeline.tick
        drawn: dict[bool, list[tuple[str, float, float]]] = {False: [], True: []}
        for timed in lane:
            name, length = line(timed.operation, timeline.header), float((timed.end - timed.start) * tick)
            drawn[timed.operation.kind.moves].append((name, float(timed.start * tick), length))
        assert boxes[worker] == drawn[False]
        assert sorted(moves[worker]) == sorted(drawn[True])
    receives = [recv for lane in view_of(compilation.program).lanes for recv in lane if isinstance(recv, Recv)]
    assert len(with_phase(events, "s")) == len(receives)


@pytest.mark.parametrize("scheme", ["chimera", "dapple", "v_half", "chimera_doubling"])
def test_the_largest_value_of_the_counter_is_what_the_report_says(scheme: str) -> None:
    compilation = chimera_ir.compile(scheme)
    most: dict[int, float] = defaultdict(float)
    last = {}
    for event in with_phase(events_of(compilation.trace), "C"):
        if event["name"] == "activations in M_a":
            (value,) = event["args"].values()
            most[event["pid"] - FIRST_PROCESS] = max(value, most[event["pid"] - FIRST_PROCESS])
            last[event["pid"]] = value
    schedule = compilation.schedule
    assert [most[worker] for worker in range(len(most))] == [float(peak) for peak in activations(schedule)]
    assert set(last.values()) == {0}


def test_with_a_profile_the_trace_has_the_predicted_seconds_messages_and_sums(run: Run) -> None:
    words = ("chimera", "D=4", "N=8", *PREDICTED, "--micro-batch-size", 8)
    events = events_of(run(*words, "--emit", "trace").out)
    prediction = json.loads(run(*words, "--emit", "report").out)["prediction"]
    ends = [event["ts"] + event["dur"] for event in with_phase(events, "X")]
    ends += [event["ts"] for event in with_phase(events, "e")]
    assert max(ends) == pytest.approx(1e6 * prediction["T_replay"], rel=1e-9)
    begun = [event["cat"] for event in with_phase(events, "b")]
    assert begun.count("message") == len(with_phase(events, "s")) == 2 * 3 * 8
    assert begun.count("sum") == 2 * 4, "two members for each stage"


def test_the_example_moves_a_prediction_to_the_first_operation_that_was_profiled(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "predicted.json").write_text(run("dapple", "D=2", "N=2", "--emit", "trace").out)
    recorded = [
        {"name": "F m0 s1", "ph": "X", "cat": "user_annotation", "pid": 77, "tid": 77, "ts": start, "dur": 250.5}
        for start in (90500.0, 70500.0)
    ]
    (tmp_path / "rank_1.json").write_text(json.dumps({"traceEvents": recorded}))
    monkeypatch.setattr(sys, "argv", ["beside.py", "predicted.json", "rank_1.json"])
    runpy.run_path(str(ROOT / "docs/examples/beside.py"), run_name="__main__")
    events = events_of(capsys.readouterr().out)
    assert [event["ts"] for event in with_phase(events, "X") if event["name"] == "F m0 s1"] == [70500, 90500, 70500]
    assert min(event["ts"] for event in with_phase(events, "X")) == 69500, "F m0 s0, a millisecond before"
    assert len({event["pid"] for event in events}) == 3
