"""What a run tells: held-out losses whatever the schedule, updates to the model file on every rank; under autocast."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.ranks import Job, Outcome, compiled, run_all

STEPS = 4


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Outcome]]:
    """The same training in two stages, as two copies of one stage, and without a flush; 8 items an update."""
    folder = tmp_path_factory.mktemp("watching")
    listed = []
    for name, scheme, parameters in (
        ("stages", "dapple", {"D": 2, "N": 4}),
        ("copies", "dapple", {"D": 1, "N": 2}),
        ("stream", "pipedream_2bw", {"D": 2, "N": 4}),
    ):
        (folder / name).mkdir()
        log = folder / f"{name}.jsonl"
        telling = ("--eval-every", "2", "--log-file", str(log), "--device-peak", "0.001", "--peak-memory")
        telling += ("--torch-profile", str(folder / f"{name}.profile"))
        training = ("--check", "--autocast", "bf16", "--steps", str(STEPS), "--micro-batch-size", "2")
        directory = compiled(folder, scheme, **parameters)
        listed.append(Job(name, directory, (*training, *telling), "watched.py", {"WATCHED": str(folder / name)}))
    return folder, run_all(folder, 2, listed)


def log_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["stages", "copies", "stream"])
def test_every_rank_hears_of_every_update_in_order_and_the_held_out_items_come_between(
    jobs: tuple[Path, dict[str, Outcome]], name: str
) -> None:
    folder, outcomes = jobs
    outcomes[name].assert_passed()
    facts = log_of(folder, name)
    assert [line["update"] for line in facts] == [1, 2, 2, 3, 4, 4]
    assert [line["update"] for line in facts if "held_out" in line] == [2, 4]
    losses = [line["loss"] for line in facts if "loss" in line]
    for rank in range(2):
        heard = [line.split() for line in (folder / name / f"{rank}.txt").read_text().splitlines()]
        assert [(int(update), float(loss)) for update, loss in heard] == [
            (update, pytest.approx(loss, rel=1e-8)) for update, loss in enumerate(losses)
        ]
    assert all(0 < line["share_of_peak"] < 1 for line in facts if "loss" in line)


def test_held_out_losses_under_autocast_are_the_same_in_stages_and_in_copies(
    jobs: tuple[Path, dict[str, Outcome]],
) -> None:
    folder, outcomes = jobs
    stages, copies = (
        [line["held_out"] for line in log_of(folder, n) if "held_out" in line] for n in ("stages", "copies")
    )
    assert stages == pytest.approx(copies, rel=1e-3)
    assert stages[1] < stages[0]
    for name in ("stages", "stream"):
        said = outcomes[name].said[0]
        assert "check: passed" in said
        assert "in bfloat16" in said
        rows = [line.split() for line in said[said.index("peak memory (") :].splitlines()[1:4]]
        assert [row[0] for row in rows] == ["rank", "0", "1"]


@pytest.mark.parametrize("rank", range(2))
def test_the_ranges_of_an_update_are_the_lines_of_the_lane_in_schedule_sir(
    jobs: tuple[Path, dict[str, Outcome]], rank: int
) -> None:
    folder, _ = jobs
    events = json.loads((folder / "stages.profile" / f"rank_{rank}.json").read_text())["traceEvents"]
    named = [event for event in events if event.get("cat") == "user_annotation" and "gloo:" not in event["name"]]
    updates = {event["name"]: event for event in named if event["name"].startswith("update")}
    assert {*updates} == {"update 1", "update 2", "update 3"}
    begin = updates["update 2"]["ts"]
    end = begin + updates["update 2"]["dur"]
    within = sorted((event["ts"], event["name"]) for event in named if begin < event["ts"] < end)
    lanes = (folder / "dapple-D2-N4" / "schedule.sir").read_text().split("worker ")
    assert [name for _, name in within] == [line.strip() for line in lanes[1 + rank].splitlines()[1:] if line.strip()]


def test_a_stream_is_profiled_with_versions(jobs: tuple[Path, dict[str, Outcome]]) -> None:
    folder, _ = jobs
    text = (folder / "stream.profile" / "rank_0.json").read_text()
    assert re.search(r'"F m\d+ s0 v\d+"', text)
