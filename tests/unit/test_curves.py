"""Start times and memory over time as rows of plain values, from Python."""

from itertools import pairwise

import pytest

import chimera_ir
from chimera_ir import library
from chimera_ir.options import Options
from tests.pages import SMALL

MOVING = ("dapple_offload", "interleaved_offload")
"""The schemes that move activations: `recompute` is refused for them."""


@pytest.mark.parametrize(
    ("name", "recompute"), [(name, more) for name in library.names() for more in {False, name not in MOVING}]
)
def test_the_highest_point_of_a_curve_is_the_figure_of_the_report(name: str, recompute: bool) -> None:
    compilation = chimera_ir.compile(name, options=Options(recompute=recompute))
    report = compilation.report
    for worker in range(report.workers):
        rows = compilation.memory(worker)
        assert max(row["activations"] for row in rows) == report.activations[worker]  # type: ignore[type-var]
        assert max(row.get("stashed_inputs", 0) for row in rows) == report.stashed_inputs[worker]  # type: ignore[type-var]
        assert all(first["time"] <= second["time"] for first, second in pairwise(rows))  # type: ignore[operator]
        assert {value for name, value in rows[-1].items() if name not in ("time", "operation")} == {0}


def test_a_curve_counts_the_micro_batches_between_a_forward_and_the_end_of_its_backward() -> None:
    compilation = chimera_ir.compile("chimera", D=4, N=8, options=Options(costs={"F": "3/2"}))
    spans: dict[tuple[int, int, int], list[float]] = {}
    for row in compilation.timeline.rows:
        (micro,) = row["micro_batches"]  # type: ignore[misc, union-attr]
        key = row["worker"], micro, row["stage"]
        spans.setdefault(key, []).append(row["start"] if row["kind"] == "F" else row["end"])  # type: ignore[arg-type]
    for worker in range(4):
        rows = compilation.memory(worker)
        for row, after in pairwise(rows):
            if row["time"] == after["time"]:
                continue
            live = [key for key, (start, end) in spans.items() if key[0] == worker and start <= row["time"] < end]  # type: ignore[operator]
            assert len(live) == row["activations"]


@pytest.mark.parametrize("name", ["dualpipe", "pipedream", "zb_v"])
def test_each_operation_has_a_row_with_its_times(name: str) -> None:
    timeline = chimera_ir.compile(name).timeline
    rows = timeline.rows
    places = [
        (worker, part, timed)
        for worker, lane in enumerate(timeline.lanes)
        for timed in lane
        for part in timed.operation.parts
    ]
    assert len(rows) == len(places)
    for row, (worker, part, timed) in zip(rows, places, strict=True):
        assert (row["worker"], row["kind"], row["stage"]) == (worker, part.kind.letter, part.stage)
        assert (row["start"], row["end"]) == (timed.start * timeline.tick, timed.end * timeline.tick)
        assert row["pipe"] in {pipe.name for pipe in timeline.header.pipes}
    assert {tuple(row) for row in rows} == {tuple(rows[0])}


def test_with_a_profile_memory_is_in_bytes_too() -> None:
    """At the fullest moment it is what the prediction says, with whole backwards to the byte."""
    compilation = chimera_ir.compile("chimera", options=Options(**SMALL), D=4, N=8)
    assert compilation.prediction
    for worker, need in enumerate(compilation.prediction.memory):
        rows = compilation.memory(worker)
        assert max(row["bytes"] for row in rows) == need.total  # type: ignore[type-var]
        assert rows[0]["bytes"] == rows[-1]["bytes"] == need.total - need.activations


@pytest.mark.parametrize("worker", [4, -1, "0"])
def test_a_worker_that_there_is_not_is_named(worker: int) -> None:
    with pytest.raises(IndexError, match=r"^worker .*: there are the workers 0 to 3$"):
        chimera_ir.compile("chimera", D=4).memory(worker)
