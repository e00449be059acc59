"""A bug report is one file, whichever ranks are left to write it, without secrets."""

import json
import sys
import threading
import time
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from chimera_runtime.errors import Misuse, PeerLost, Unwritable
from chimera_runtime.program.job import Place
from chimera_runtime.tools.fail.faults import BugReport, claim_to_speak, record
from chimera_runtime.tools.open.stdio import write_line
from tests.unit.runtime.thread_ranks import together


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BugReport]:
    directory = tmp_path / "compiled"
    directory.mkdir()
    (directory / "schedule.sir").write_text("a program\n")
    (directory / "report.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["train.py", "--model", "m.py", "--", "--token", "hf_secret"])
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sesame")

    def bundle(rank: int = 0, file: str = "bundle.zip") -> BugReport:
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        return BugReport(Namespace(bundle=tmp_path / file, backend="gloo", device=None, timeout=9.0), directory, rank)

    return bundle


def read(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_every_rank_adds_its_part_and_the_first_the_program_and_the_versions(
    make: Callable[..., BugReport], tmp_path: Path
) -> None:
    """All at the same moment."""
    bundles = [make(rank) for rank in range(4)]
    together([lambda b=b, r=r: b.add(f"train.py: rank {r} failed\nTraceback") for r, b in enumerate(bundles)])  # type: ignore[misc]
    texts = read(tmp_path / "bundle.zip")
    assert {*texts} == {"about.json", "schedule.sir", "report.json", *(f"rank_{rank}.txt" for rank in range(4))}
    assert texts["schedule.sir"] == "a program\n"
    for rank in range(4):
        assert f"rank {rank} on " in texts[f"rank_{rank}.txt"]
        assert f"at its end:\ntrain.py: rank {rank} failed\nTraceback" in texts[f"rank_{rank}.txt"]
    about = json.loads(texts["about.json"])
    assert about["packages"]["torch"]
    assert about["environment"]["NCCL_DEBUG"] == "WARN"


def test_no_secret_is_in_it(make: Callable[..., BugReport], tmp_path: Path) -> None:
    make().add("train.py: failed")
    texts = read(tmp_path / "bundle.zip")
    assert json.loads(texts["about.json"])["command"] == ["train.py", "--model", "m.py", "--", "(2 left out)"]
    assert not any("hf_secret" in text or "sesame" in text for text in texts.values())


def test_the_last_lines_and_where_every_thread_is_are_in_it(make: Callable[..., BugReport], tmp_path: Path) -> None:
    bundle, woken = make(), threading.Event()

    def waiting_for_a_message() -> None:
        woken.wait(30)

    thread = threading.Thread(target=waiting_for_a_message, name="stuck")
    thread.start()
    write_line("step 3/10")
    bundle.add("train.py: failed")
    woken.set()
    thread.join()
    text = read(tmp_path / "bundle.zip")["rank_0.txt"]
    assert "step 3/10" in text.partition("the last lines that it wrote:")[2]
    assert "in waiting_for_a_message" in text.partition("thread stuck:")[2]


SCRIPT = """
INTERFACE, PROGRAM = 5, ""
def update(lane):
    for m in range(2, 4):
        lane.wait(m)
"""


def test_a_rank_that_is_ended_from_outside_records_where_its_script_is(
    make: Callable[..., BugReport], tmp_path: Path
) -> None:
    """As by a SIGTERM, in another thread than that of the script."""
    bundle, script = make(), dict[str, Any]()
    exec(SCRIPT, script)

    def wait(micro: int) -> None:
        if micro == 3:
            together([lambda: bundle.add("train.py: SIGTERM")])

    with bundle.noting(Place(1, 2, 1, "pipeline")):
        script["update"](SimpleNamespace(first=7, wait=wait))
    stop = json.loads(read(tmp_path / "bundle.zip")["rank_0.json"])
    assert (stop["rank"], stop["worker"], stop["update"], stop["line"], stop["counters"]) == (1, 1, 7, 5, {"m": 3})
    assert (stop["waits_for"], stop["seconds"], stop["message"]) == ([], None, "train.py: SIGTERM")


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (PeerLost("wait recv m0 s1->s0: rank 1: no answer within 9 s (timeout)", [1]), 9.0),
        (PeerLost("wait recv m0 s1->s0: rank 1: the connection was closed", [1]), None),
    ],
)
def test_a_rank_that_lost_another_records_for_whom_it_waited_and_how_long_if_it_knows(
    make: Callable[..., BugReport], tmp_path: Path, error: PeerLost, seconds: float | None
) -> None:
    bundle = make()
    with pytest.raises(PeerLost), bundle.noting(Place(0, 2, 1, "pipeline")):
        raise error
    bundle.add("train.py: what another rank said")
    stop = json.loads(read(tmp_path / "bundle.zip")["rank_0.json"])
    assert (stop["waits_for"], stop["seconds"], stop["message"], stop["line"]) == ([1], seconds, str(error), None)


def test_a_bundle_of_an_earlier_run_goes_and_a_file_of_yours_stays(
    make: Callable[..., BugReport], tmp_path: Path
) -> None:
    make(1).add("of the run before")
    make(0).add("of this run")
    assert "rank_1.txt" not in read(tmp_path / "bundle.zip")
    (tmp_path / "mine.zip").write_text("mine")
    with pytest.raises(Misuse, match=r"--bundle .*mine\.zip: exists and was not written by --bundle"):
        make(file="mine.zip")
    assert (tmp_path / "mine.zip").read_text() == "mine"
    with pytest.raises(Unwritable, match=r"--bundle .*: No such file or directory"):
        make(file="nowhere/b.zip")


def test_without_a_failure_there_is_no_file_and_one_that_cannot_be_written_stops_nothing(
    make: Callable[..., BugReport], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = make()
    assert not (tmp_path / "bundle.zip").exists()
    (tmp_path / "bundle.zip").mkdir()
    bundle.add("train.py: failed")
    assert capsys.readouterr().err.startswith("train.py: rank 0: --bundle ")


# Cause of the end of a rank, as read by torchrun's own code.


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
