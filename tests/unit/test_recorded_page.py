"""The page of a recorded run: measured lanes beside the schedule, and where every rank stopped."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from chimera_ir.commands.common import WRONG_TEXT
from tests.node import calls, needs_node
from tests.unit import traced
from tests.unit.command import Run
from tests.unit.test_page_tables import document_in

MEASURES = Path(__file__).with_name("measures.mjs")
GAPS = ("between operations", "flush")
TIMEOUT = "train.py: rank 0 (worker 0): wait recv m0 s1->s0: rank 1: no answer within 4 s (timeout)"


def document_of(directory: Path) -> dict[str, Any]:
    return document_in((directory / "view" / "trace.html").read_text(encoding="utf-8"))


def stopped_run(directory: Path, *operations: int, others: int = 0) -> Path:
    """A run in which each rank stopped behind so many operations, 4 s later, and ``others`` left no file."""
    files = [traced.lines(rank) for rank in range(len(operations))]
    for lines, count in zip(files, operations, strict=True):
        done = [operation for block in lines[1:-1] for operation in block["operations"]][:count]
        lines[1:] = [{"operations": done}, {"ended": TIMEOUT, "clock": None, "at": done[-1][3] + 4 * 10**9}]
    return traced.write_of(directory, traced.program(), files[: len(files) - others])


def test_every_update_has_all_spans_of_its_ranks_each_with_its_operation(tmp_path: Path, tracer: Run) -> None:
    directory = traced.write(tmp_path / "t")
    assert tracer(directory).status == 0
    document = document_of(directory)
    trace, (schedule,) = document["trace"], document["schedules"]
    assert [update["name"] for update in trace["updates"]] == [f"update {number}" for number in range(1, 5)]
    assert (trace["start"], trace["hang"]) == (0.0, None)
    for update in trace["updates"]:
        spans = update["spans"]
        assert update["seconds"] == pytest.approx(0.0072)
        rows = [dict(zip(spans, values, strict=True)) for values in zip(*spans.values(), strict=True)]
        for worker, lane in enumerate(traced.LANES):
            recorded = [row for row in rows if row["worker"] == worker and trace["lines"][row["line"]] not in GAPS]
            assert [(row["start"], row["end"]) for row in recorded] == [(1000 * s, 1000 * e) for _, s, e in lane]
            for row, (text, _, _) in zip(recorded, lane, strict=True):
                assert trace["lines"][row["line"]].startswith(text)
        for row in rows:
            words = trace["lines"][row["line"]]
            if row["operation"] >= 0:
                assert schedule["operations"]["words"][row["operation"]] == words
                assert schedule["operations"]["worker"][row["operation"]] == row["worker"]
            else:
                assert words[:2] not in ("F ", "B ")
        for worker in range(2):
            lane = [row for row in rows if row["worker"] == worker]
            assert all(earlier["end"] <= later["start"] for earlier, later in pairwise(lane))


def test_lines_of_residuals_lead_to_spans_of_their_worker(tmp_path: Path, tracer: Run) -> None:
    directory = traced.write(tmp_path / "t")
    assert tracer(directory).status == 0
    trace = document_of(directory)["trace"]
    spans = trace["updates"][trace["typical"]]["spans"]
    places = {*zip(spans["worker"], spans["activity"], strict=True)}
    for row in trace["residuals"]:
        if row["measured"] > 1e-5:
            assert (row["worker"], row["activity"]) in places
    total = sum(row["measured"] for row in trace["residuals"] if row["worker"] == 0)
    assert total == pytest.approx(0.0072)


@pytest.mark.parametrize(
    ("rehearse", "microseconds"), [(None, 1000 + 1010 + 2080 + 2040), ({"F": 0.001, "B": 0.002}, 6000)]
)
def test_the_schedule_takes_the_times_of_the_run(
    tmp_path: Path, tracer: Run, rehearse: dict[str, float] | None, microseconds: int
) -> None:
    """Medians of its operations, or the sleeps of a rehearsal."""
    directory = traced.write(tmp_path / "t", rehearse=rehearse)
    assert tracer(directory).status == 0
    (schedule,) = document_of(directory)["schedules"]
    assert schedule["unit"] == "s"
    assert schedule["facts"]["makespan"] == pytest.approx(microseconds / 1e6)
    assert [memory["name"] for memory in schedule["memory"]] == ["activations"]


def test_a_run_that_hung_shows_where_every_rank_stopped(tmp_path: Path, tracer: Run) -> None:
    """Rank 0 waits in the third update for what rank 1 did not send: that is in its forward."""
    directory = stopped_run(tmp_path / "t", 24, 23)
    ended = tracer(directory)
    assert ended.status == 0
    document = document_of(directory)
    (schedule,) = document["schedules"]
    events, hang = schedule["events"], document["trace"]["hang"]
    assert [(stop["rank"], stop["line"], stop["update"], stop["seconds"]) for stop in hang] == [
        (0, "wait recv m0 s1->s0", 2, 4.0),
        (1, "F m0 s1", 2, 4.0),
    ]
    assert [(stop["begun"], stop["awaited"]) for stop in hang] == [(True, 1), (True, -1)]
    waiting, computing = (stop["event"] for stop in hang)
    assert events["verbs"][events["verb"][waiting]] == "wait recv"
    assert schedule["messages"]["words"][events["subject"][waiting]] == "m0 s1->s0"
    assert schedule["operations"]["words"][events["subject"][computing]] == "F m0 s1"
    last = document["trace"]["updates"][-1]
    assert last["name"] == "update 3, in which the run ended"
    assert document["trace"]["typical"] == len(document["trace"]["updates"]) - 1
    assert len(last["spans"]["worker"]) >= 4 + 3


def test_a_run_that_hung_in_its_first_update_has_a_page_without_a_comparison(tmp_path: Path, tracer: Run) -> None:
    directory = stopped_run(tmp_path / "t", 4, 1)
    ended = tracer(directory)
    assert ended.status == 0
    assert TIMEOUT in ended.out
    assert "where every rank stopped" in ended.out
    assert {path.name for path in (directory / "view").iterdir()} == {".chimera-trace", "trace.html"}
    trace = document_of(directory)["trace"]
    assert [stop["line"] for stop in trace["hang"]] == ["wait recv m0 s1->s0", "wait recv m0 s0->s1"]
    assert trace["residuals"] == []


@pytest.mark.parametrize("behind", [0, 1, 5])
def test_every_update_that_all_ranks_finished_can_be_chosen(tmp_path: Path, tracer: Run, behind: int) -> None:
    """However little of the next one was recorded."""
    lengths = [
        sum(operation[0] == 0 for block in traced.lines(rank)[1:-1] for operation in block["operations"])
        for rank in range(2)
    ]
    directory = stopped_run(tmp_path / "t", *(2 * length + behind for length in lengths))
    assert tracer(directory).status == 0
    trace = document_of(directory)["trace"]
    assert [update["name"] for update in trace["updates"][:-1]] == ["update 1", "update 2"]
    assert trace["measured"]["updates"] == 1
    assert trace["measured"]["seconds"] == pytest.approx(0.0072)


def test_a_rank_that_had_not_begun_the_update_stopped_before_it(tmp_path: Path, tracer: Run) -> None:
    """A post has no event of its own: the rank stopped at the next one of its lane."""
    files = [traced.lines(rank) for rank in range(2)]
    for lines in files:
        lines[1:] = [{"operations": []}, {"ended": "train.py: the others have died", "clock": None, "at": 0}]
    directory = traced.write_of(tmp_path / "t", traced.program(), files)
    assert tracer(directory).status == 0
    document = document_of(directory)
    hang, events = document["trace"]["hang"], document["schedules"][0]["events"]
    assert [(stop["begun"], stop["awaited"], stop["seconds"]) for stop in hang] == [(False, -1, 0.0)] * 2
    assert hang[1]["line"].startswith("recv m0 s0->s1")
    assert events["lane_from"][1] < hang[1]["event"] < events["lane_from"][2]
    assert document["trace"]["measured"] is None


def test_a_rank_that_was_killed_left_no_record(tmp_path: Path, tracer: Run) -> None:
    directory = stopped_run(tmp_path / "t", 4, 1, others=1)
    assert tracer(directory).status == 0
    first, second = document_of(directory)["trace"]["hang"]
    assert (first["line"], second["line"], second["event"]) == ("wait recv m0 s1->s0", "", -1)
    assert second["message"] == "left no record: it was killed"


def test_a_rank_may_be_missing_only_of_a_run_that_ended_early(tmp_path: Path, tracer: Run) -> None:
    directory = traced.write(tmp_path / "t")
    (directory / "rank_1.jsonl").unlink()
    tracer(directory).assert_refused(WRONG_TEXT, "the file of rank 1 of 2 ranks is missing")


@needs_node
def test_a_recorded_lane_has_the_numbers_that_were_recorded(tmp_path: Path, tracer: Run) -> None:
    """In a stream the schedule shows other turns than those that were recorded."""
    directory = traced.write(tmp_path / "t")
    assert tracer(directory).status == 0
    document = document_of(directory)
    spans = document["trace"]["updates"][1]["spans"]
    shifted = [line.replace("F m0 s1", "F m12 s1") for line in document["trace"]["lines"]]
    later = {**document, "trace": {**document["trace"], "lines": shifted, "start": 0.5}}
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    plain, moved = calls(MEASURES, scripts, [[document, 1], [later, 1]])
    assert (plain["label"], moved["label"]) == (["0", "0", "0", "0"], ["0", "0", "12", "0"])
    assert plain["operation"] == [operation for operation in spans["operation"] if operation >= 0]
    assert plain["idle"] == spans["operation"].count(-1)
    assert moved["start"] == pytest.approx([0.5 + start for start in plain["start"]])
