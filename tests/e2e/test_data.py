"""Data as they are loaded: by data workers, from streams, on each rank what it uses; and what is left of a run."""

import re
from pathlib import Path

import pytest

from tests.e2e.ranks import Job, compiled, left_in, run_all

LOOP = Path(__file__).resolve().parent / "loops" / "loaders.py"
SIZE = ("--micro-batch-size", "2")


def test_loaders_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    """Where some ranks read nothing, where all read something, and with two copies."""
    four = [compiled(tmp_path, "dapple", D=4, N=3), compiled(tmp_path, "chimera", D=4, N=4)]
    schedules = [*four, compiled(tmp_path, "chimera_halving", D=2, N=2), compiled(tmp_path, "dapple", D=2, N=2)]
    job = Job("loaders", LOOP, tuple(map(str, schedules)), model=None)
    run_all(tmp_path, 4, [job])["loaders"].assert_passed()


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("feeding"), "chimera", D=2, N=2)


def losses(text: str) -> list[str]:
    return re.findall(r"loss (\S+)", text)


def test_train_py_has_the_same_losses_with_data_workers_from_a_stream_and_after_a_resume(
    schedule: Path, tmp_path: Path
) -> None:
    """And a message if an item fails or a worker is killed; no process is left."""
    saved = str(tmp_path / "saved")
    common, workers = (*SIZE, "--steps", "8"), ("--data-workers", "2")
    stream = {"FEED": "stream"}
    jobs = [
        Job("plain", schedule, (*common, "--check"), "feeding.py"),
        Job("workers", schedule, (*common, *workers, "--save", saved, "--save-every", "3"), "feeding.py"),
        Job("resumed", schedule, (*common, *workers, "--resume", f"{saved}/update-00000003"), "feeding.py"),
        Job("stream", schedule, (*common, "--check", "--save", f"{saved}-stream"), "feeding.py", stream),
        Job("begun", schedule, (*SIZE, "--steps", "3", *workers, "--save", f"{saved}-b"), "feeding.py", stream),
        Job("gone-on", schedule, (*common, *workers, "--resume", f"{saved}-b"), "feeding.py", stream),
        Job("raise", schedule, (*common, *workers), "feeding.py", {"FEED": "raise"}),
        Job("kill", schedule, (*common, *workers), "feeding.py", {"FEED": "kill"}),
    ]
    outcomes = run_all(tmp_path, 2, jobs)
    for job in jobs[:6]:
        outcomes[job.name].assert_passed()
    said = {name: "".join(outcome.said) for name, outcome in outcomes.items()}
    assert said["plain"].count("check: passed") == said["stream"].count("check: passed") == 1
    plain, flowed = losses(said["plain"])[-8:], losses(said["stream"])[-8:]
    assert plain == losses(said["workers"])
    assert plain[3:] == losses(said["resumed"])
    assert flowed != plain
    assert flowed[:3] == losses(said["begun"])
    assert flowed[3:] == losses(said["gone-on"])
    for name, status, words in (
        ("raise", "2", r"item 7 of the dataset: .*feeding\.py:\d+ in __getitem__: ValueError: no such file"),
        ("kill", "1", r"a data worker has ended: "),
    ):
        assert status in outcomes[name].statuses
        assert "0" not in outcomes[name].statuses
        (message,) = (line for line in said[name].splitlines() if line.startswith("train.py: "))
        assert re.match(rf"train\.py: rank \d \(worker \d\): {words}", message), message
    assert 'raise ValueError("no such file")' in said["raise"]
    assert left_in(tmp_path, seconds=2) == []
