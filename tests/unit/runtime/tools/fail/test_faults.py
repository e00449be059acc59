"""One message for the whole job: who speaks, what is saved meanwhile, and what a rank ends with."""

import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, HashStore, Store

from chimera_runtime.errors import PeerLost
from chimera_runtime.tools.fail import faults as ending
from chimera_runtime.tools.fail.faults import Faults
from tests import forkserver
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[5]


class Left(BaseException):
    """Stands in for the end of the process."""

    def __init__(self, status: int) -> None:
        self.status = status


@pytest.fixture(autouse=True)
def _end(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(status: int) -> None:
        raise Left(status)

    monkeypatch.setattr(ending, "leave", leave)
    monkeypatch.setattr(ending, "_MOMENT", 0.0)


def ended(faults: Faults, message: str, status: int) -> int:
    with pytest.raises(Left) as left:
        faults.end(message, status)
    return left.value.status


def test_the_first_rank_speaks_and_the_others_end_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    assert ended(Faults(store, 1), "rank 1: the first\nwith a second line", 70) == 70
    assert ended(Faults(store, 0), "rank 0: too late", 1) == 1
    assert capsys.readouterr().err == "train.py: rank 1: the first\nwith a second line\n"


def test_what_there_is_to_save_is_saved_with_the_message() -> None:
    faults, saved = Faults(HashStore(), 0), []
    faults.at_end += [saved.append, lambda message: saved.append(f"again {message}")]
    ended(faults, "the headline\nthe rest", 1)
    assert sorted(saved) == ["again train.py: the headline\nthe rest", "train.py: the headline\nthe rest"]


def test_whoever_speaks_gives_the_hint_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    for rank in (0, 1):
        faults = Faults(store, rank)
        faults.hint = f"rank {rank} knows more"
        ended(faults, f"rank {rank}: failed", 1)
    assert capsys.readouterr().err == "train.py: rank 0: failed\nrank 0 knows more\n"


class NoStore(Store):
    """Ends, as a store does."""

    def add(self, *_: object) -> int:
        raise RuntimeError("connection closed")

    def set(self, *_: object) -> None:
        raise RuntimeError("connection closed")


def test_neither_a_store_that_is_gone_nor_a_save_that_never_ends_holds_a_rank_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "_PATIENCE", 2.0)
    faults, release, saved = Faults(NoStore(), 0), threading.Event(), []
    faults.at_end.append(lambda line: saved.append(line) if release.wait() else None)
    assert ended(faults, "said all the same", 2) == 2
    assert saved == []
    release.set()
    assert capsys.readouterr().err == "train.py: said all the same\n"


def test_without_a_store_one_rank_of_a_torchrun_says_what_it_saw_and_each_what_it_did_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 spoke while there was a store."""
    for rank, store, is_cause in ((0, HashStore(), True), (1, NoStore(), False), (2, NoStore(), True)):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        with pytest.raises(Left):
            Faults(store, rank).end(f"rank {rank} ended", 1, is_cause)
    assert capsys.readouterr().err == "train.py: rank 0 ended\ntrain.py: rank 2 ended\n"


def lost(store: Store, rank: int, *peers: int) -> str:
    """Message of a rank that waited for others."""
    faults, said = Faults(store, rank), []
    faults.at_end.append(said.append)
    with pytest.raises(Left) as left:
        faults.lost(PeerLost(f"rank {rank} waited for {peers}", peers))
    assert left.value.status == (143 if ending.has_ended() else 1)
    (message,) = said
    return message.removeprefix("train.py: ")


def test_the_message_is_that_of_the_rank_at_the_end_of_the_waits() -> None:
    """Rank 0 waited for 1, that for 2, and 2 for one that said nothing: it is the one that died."""
    store = HashStore()
    assert lost(store, 2, 3) == "rank 2 waited for (3,)"
    assert lost(store, 1, 2) == "rank 2 waited for (3,)"
    assert lost(store, 0, 1) == "rank 2 waited for (3,)"


def test_waits_in_a_circle_end_somewhere() -> None:
    store = HashStore()
    lost(store, 1, 0)
    assert lost(store, 0, 1) in ("rank 0 waited for (1,)", "rank 1 waited for (0,)")


def test_who_waited_for_several_follows_the_first_that_waited_for_one() -> None:
    store = HashStore()
    lost(store, 1, 2)
    assert lost(store, 0, 1, 2) == "rank 1 waited for (2,)"
    assert lost(store, 3) == "rank 1 waited for (2,)"


def test_a_wait_for_several_is_not_blamed_by_those_that_it_left_behind() -> None:
    """Rank 0 waited in a sum and gave up, and only then rank 1, that waited for it."""
    store = HashStore()
    assert lost(store, 0, 1, 2) == "rank 0 waited for (1, 2)"
    assert lost(store, 1, 0) == "rank 0 waited for (1, 2)"
    assert lost(store, 3) == "rank 3 waited for ()"


def test_an_error_of_the_store_is_what_is_seen_of_torchruns_death(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = RuntimeError("went wrong\nin many lines")
    noted.add_note("in the model")
    for has_died, error, said in [
        (False, noted, "rank 0: RuntimeError: went wrong\nin the model\n"),
        (True, noted, "rank 0: RuntimeError: went wrong\nin the model\n"),
        (False, DistNetworkError("no connection"), "rank 0: DistNetworkError: no connection\n"),
        (True, DistNetworkError("no connection"), "torchrun has died, and its ranks end\n"),
    ]:
        monkeypatch.setattr(ending, "has_ended", lambda has_died=has_died: has_died)
        with pytest.raises(Left):
            Faults(HashStore(), 0).fail(error)
        assert capsys.readouterr().err == f"train.py: {said}"


class SilentStore(Store):
    """The machine that has it has stopped."""

    def set(self, *_: object) -> None:
        threading.Event().wait()

    def add(self, *_: object) -> int:
        threading.Event().wait()
        return 0


@pytest.mark.parametrize(
    ("store", "said"),
    [
        (NoStore(), "torchrun's store has ended: the output of the node that had it says why"),
        (SilentStore(), "torchrun's store does not answer"),
    ],
)
@pytest.mark.parametrize("rank_here", ["0", "1"])
def test_without_a_store_one_rank_of_each_torchrun_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: Store, said: str, rank_here: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank_here)
    monkeypatch.setattr(ending, "_PATIENCE", 0.3)
    message = f"rank 2 waited for (1,); {said}"
    assert lost(store, 2, 1) == message
    assert capsys.readouterr().err == (f"train.py: {message}\n" if rank_here == "0" else "")


def test_what_has_failed_here_is_said_where_the_store_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ending, "_PATIENCE", 0.3)
    assert ended(Faults(SilentStore(), 1), "rank 1: failed", 1) == 1
    assert capsys.readouterr().err == "train.py: rank 1: failed\n"


@pytest.mark.parametrize(("rank_here", "said"), [("0", "train.py: torchrun has died, and its ranks end\n"), ("1", "")])
def test_a_rank_that_lost_another_one_because_torchrun_died_says_that(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank_here: str, said: str
) -> None:
    """The other rank had its signal before this one: with the store, and without it."""
    monkeypatch.setattr(ending, "has_ended", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", rank_here)
    for store in (NoStore(), HashStore()):
        assert lost(store, 0, 1) == "torchrun has died, and its ranks end"
        assert capsys.readouterr().err == said


SIGNALLED = """
import json, os, signal, sys, threading, time, types
from torch.distributed import HashStore
from chimera_runtime.tools.fail import faults
faults._GRACE = 0.1
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
store = HashStore()
name, others = sys.argv[1], json.loads(sys.argv[2])
for rank, process in others:
    store.set(f"faults/process/{rank}", json.dumps([faults._machine(), process]))
if name == "after a word":
    store.add("faults/speakers", 1)
    store.set("faults/said", "rank 0: went wrong")
    name = "SIGTERM"
if name == "orphan":
    faults.has_ended = lambda: True
    name = "SIGTERM"
made = faults.Faults(store, 3)
asked = threading.Event()
if sys.argv[3:]:
    made.at_sigterm = lambda name: (print(name, "saves", flush=True), asked.set())
made.watch_signals(8)
if name == "no store":
    def check(_):
        raise RuntimeError
    made._store = types.SimpleNamespace(check=check)
    name = "SIGTERM"
os.kill(os.getpid(), getattr(signal, name))
asked.wait(30)
for again in sys.argv[4:]:  # a second Ctrl-C, of which torchrun makes a SIGTERM
    time.sleep(0.1)
    faults._SAME_CTRL_C, name = 0.05, again
os.kill(os.getpid(), getattr(signal, name))
time.sleep(1 if asked.is_set() else 30)
os._exit(0)
"""

NOBODY = 2**22 + 1
"""More than the number of any process on Linux."""
OUTSIDE = "train.py: terminated: SIGTERM came to torchrun or to rank 3, and no rank had failed\n"
NO_STORE = "train.py: rank 3: SIGTERM; torchrun's store has ended: the output of the node that had it says why\n"
DIED = "train.py: rank 3: ended by torchrun: rank 1 has died (torchrun's summary follows)\n"


def signalled(folder: Path, name: str, others: list[tuple[int, int]], *more: str) -> subprocess.CompletedProcess[str]:
    plain = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID")}
    variables = {"TORCHELASTIC_ERROR_FILE": str(folder / "error.json"), "OMP_NUM_THREADS": "1"}
    words = ("-c", SIGNALLED, name, json.dumps(others), *more)
    return forkserver.run(words, plain | variables, ROOT, PATIENCE)


@pytest.mark.parametrize(
    ("name", "others", "status", "message"),
    [
        ("SIGINT", [], 130, "train.py: interrupted\n"),
        ("SIGTERM", [], 143, OUTSIDE),
        ("SIGHUP", [], 143, OUTSIDE.replace("SIGTERM", "SIGHUP")),
        ("SIGTERM", [(0, os.getpid())], 143, OUTSIDE),
        ("SIGTERM", [(0, os.getpid()), (1, NOBODY)], 143, DIED),
        ("after a word", [(1, NOBODY)], 143, ""),
        ("orphan", [], 143, "train.py: torchrun has died, and its ranks end\n"),
        ("orphan", [(1, NOBODY)], 143, "train.py: torchrun has died, and its ranks end\n"),
    ],
)
def test_a_signal_ends_a_rank_with_one_line_while_its_main_thread_waits(
    tmp_path: Path, name: str, others: list[tuple[int, int]], status: int, message: str
) -> None:
    start = time.monotonic()
    done = signalled(tmp_path, name, others)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", message)
    assert time.monotonic() - start < 25
    if name == "after a word":
        told = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
        assert told == "rank 3 ended after another one had failed: rank 0: went wrong"


@pytest.mark.parametrize(
    ("name", "others", "saves", "message"),
    [
        ("SIGTERM", [(0, os.getpid())], "SIGTERM saves\n", ""),
        ("SIGHUP", [(0, os.getpid())], "SIGHUP saves\n", ""),
        ("SIGTERM", [(0, os.getpid()), (1, NOBODY)], "", DIED),
        ("no store", [(0, os.getpid())], "", NO_STORE),
        ("after a word", [(0, os.getpid())], "", ""),
        ("orphan", [], "", "train.py: torchrun has died, and its ranks end\n"),
        ("SIGINT", [(0, os.getpid())], "SIGINT saves\n", ""),
    ],
)
def test_a_first_signal_from_outside_asks_for_a_save_where_all_ranks_are_well(
    tmp_path: Path, name: str, others: list[tuple[int, int]], saves: str, message: str
) -> None:
    """A second one, which torchrun passes on where the job has got it as a whole, changes nothing."""
    done = signalled(tmp_path, name, others, "may save")
    assert (done.returncode, done.stdout, done.stderr) == (0 if saves else 143, saves, message)


@pytest.mark.parametrize("again", ["SIGINT", "SIGTERM"])
def test_a_second_ctrl_c_ends_a_rank_that_saves(tmp_path: Path, again: str) -> None:
    done = signalled(tmp_path, "SIGINT", [(0, os.getpid())], "may save", again)
    assert (done.returncode, done.stdout, done.stderr) == (130, "SIGINT saves\n", "train.py: interrupted\n")
