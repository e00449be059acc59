"""Cause of the end of a rank, as read by torchrun's own code."""

import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from chimera_runtime.tools.fail.faults import claim_to_speak, record


def failure(path: Path, rank: int) -> ProcessFailure:
    return ProcessFailure(local_rank=rank, pid=1, exitcode=1, error_file=str(path))


def test_torchrun_shows_the_message_and_finds_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds also if another rank ended within the same second, and has a lower number."""
    monkeypatch.setattr(time, "time", lambda: 1000.25)
    for rank, message, is_cause in ((0, "rank 0 ended", False), (1, "headline\nTraceback", True)):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}.json"))
        record(message, is_cause)
    failures = {rank: failure(tmp_path / f"{rank}.json", rank) for rank in (0, 1)}
    summary = ChildFailedError("train.py", failures)
    assert summary.get_first_failure()[0] == 1
    cause = str(summary).split("Root Cause")[1]
    assert "headline\n  Traceback" in cause
    assert "rank 0 ended" not in cause


def test_without_torchrun_or_a_place_to_write_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    record("message", True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "nowhere" / "error.json"))
    record("message", True)
    assert list(tmp_path.iterdir()) == []


def test_of_the_ranks_of_one_torchrun_one_is_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever asks first; an attempt that torchrun has started anew has a directory of its own."""
    for attempt, ranks in (("attempt_0", (1, 0, 2)), ("attempt_1", (0, 1, 2))):
        first = []
        for rank in ranks:
            folder = tmp_path / attempt / str(rank)
            folder.mkdir(parents=True)
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
            first.append(claim_to_speak())
        assert first == [True, False, False]


@pytest.mark.parametrize("file", [None, "nowhere/1/error.json", "plain.json"])
def test_without_such_directories_it_is_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str | None
) -> None:
    if file is None:
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    else:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / file))
    for rank in ("1", "0"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert claim_to_speak() == (rank == "0")
    assert list(tmp_path.iterdir()) == []
