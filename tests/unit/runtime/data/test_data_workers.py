"""Processes that load: their errors are the rank's, and they end when it does, or when they are no longer needed."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from chimera_runtime.blame import ModelError, describe
from chimera_runtime.data.loader import DataWorkers, _next
from chimera_runtime.errors import Misuse
from chimera_runtime.ranks.world import World
from tests import forkserver
from tests.patience import PATIENCE
from tests.unit.runtime.datasets import Drawing, Flowing, drawn, draws, loader, numbers
from tests.unit.runtime.tools.open.test_parent import ROOT, is_there


class Failing(Drawing):
    def __getitem__(self, number: int) -> Any:
        return self.decode(number) if number == 9 else super().__getitem__(number)

    def decode(self, number: int) -> Any:
        raise ValueError(f"no image in file {number}")


class Dying(Drawing):
    def __getitem__(self, number: int) -> Any:
        if number == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(number)


class Broken(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from map(drawn, range(9))
        raise ValueError("no image in file 9")


@pytest.mark.parametrize("workers", [1, 2])
def test_an_item_that_fails_is_named_with_the_traceback_of_its_code(alone: World, workers: int) -> None:
    with pytest.raises(ModelError) as raised:
        list(loader(alone, Failing(), shuffle=False, workers=workers))
    assert str(raised.value).startswith("rank 0 (worker 0): item 9 of the dataset: ")
    assert str(raised.value).endswith("in decode: ValueError: no image in file 9")
    told = describe(raised.value)
    assert 'raise ValueError(f"no image in file {number}")' in told
    assert "self.decode(number) if number == 9" in told
    assert "chimera_runtime" not in told
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [1, 2])
def test_mini_batches_before_the_one_that_fails_are_given(alone: World, workers: int) -> None:
    for dataset in (Failing(), Broken()):
        mine = iter(loader(alone, dataset, shuffle=False, workers=workers))
        assert [numbers(batch) for batch in islice(mine, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(ModelError, match=r"item 9 of the dataset: .*no image in file 9"):
            next(mine)


def test_what_a_collate_does_wrong_in_a_worker_is_said_as_without_one(alone: World) -> None:
    for workers in (0, 1):
        with pytest.raises(Misuse, match="what collate returned is a int, not a pair"):
            next(iter(loader(alone, Drawing(), collate=len, workers=workers)))


def test_a_worker_that_is_killed_is_an_error_with_what_to_do_and_no_signal_in_between(alone: World) -> None:
    """A DataLoader would raise it wherever the rank is when it happens."""
    before = signal.getsignal(signal.SIGCHLD)
    mine = iter(loader(alone, Dying(), shuffle=False, workers=DataWorkers(1, ahead=1, timeout=30)))
    assert signal.getsignal(signal.SIGCHLD) == before
    next(mine)
    next(mine)
    time.sleep(0.5)
    with pytest.raises(ModelError) as raised:
        next(mine)
    told = describe(raised.value)
    assert told.startswith("rank 0 (worker 0): a data worker has ended: ")
    assert "take fewer data workers" in told


class Hanging(Drawing):
    def __getitem__(self, number: int) -> Any:
        time.sleep(600 if number == 9 else 0)
        return super().__getitem__(number)


def test_a_worker_that_hangs_is_an_error_after_the_timeout(alone: World) -> None:
    mine = loader(alone, Hanging(), shuffle=False, workers=DataWorkers(1, timeout=4))
    batches = iter(mine)
    assert [numbers(batch) for batch in islice(batches, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ModelError, match=r"no data worker has handed over a mini-batch for 3 s") as raised:
        next(batches)
    assert "a longer timeout" in describe(raised.value)
    mine.close()
    assert multiprocessing.active_children() == []


def test_a_worker_that_is_slow_is_asked_again_until_the_timeout() -> None:
    class Late:
        """Times out twice before it gives what it has."""

        late = 2

        def __iter__(self) -> "Late":
            return self

        def __next__(self) -> int:
            if self.late:
                self.late -= 1
                raise RuntimeError("DataLoader timed out after 5 seconds")
            return 3

    assert _next(Late(), 60) == 3


def test_workers_go_on_into_the_next_epoch_and_end_when_the_loader_is_closed(alone: World) -> None:
    mine = loader(alone, Flowing(), workers=2)
    processes = []
    for _ in range(2):
        assert len([*mine]) == 6
        processes.append({child.pid for child in multiprocessing.active_children()})
    assert processes[0] == processes[1]
    assert len(processes[0]) == 2
    mine.close()
    assert multiprocessing.active_children() == []


def test_workers_that_are_started_afresh_load_the_same(alone: World) -> None:
    """All that workers use is pickled with ``spawn``."""
    (first, *_) = loader(alone, Drawing())
    mine = loader(alone, Drawing(), workers=DataWorkers(1, start="spawn"))
    batch = next(iter(mine))
    mine.close()
    assert draws(batch) == draws(first)
    with pytest.raises(ModelError, match=r"starting the data workers: .*[Pp]ickle"):
        next(iter(loader(alone, Drawing(), collate=lambda items: items, workers=DataWorkers(1, start="spawn"))))


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), EOFError(), FileNotFoundError(2, "socket")])
def test_what_a_dead_worker_had_loaded_cannot_be_had_and_the_worker_is_named(error: Exception) -> None:
    def receiving() -> Iterator[Any]:
        raise error
        yield

    with pytest.raises(ModelError, match="a data worker has ended") as raised:
        _next(receiving(), 60)
    assert raised.value.__cause__ is error
    with pytest.raises(RuntimeError, match="of another kind"):
        _next(map(_fail, [0]), 60)


def _fail(_number: int) -> None:
    raise RuntimeError("of another kind")


RANK = """
import multiprocessing, os, signal, sys, threading, time
from chimera_runtime.data.loader import DataWorkers, elements
from chimera_runtime.data.mini_batch import ALL, ItemLoading
from chimera_runtime.data.readers import MapReader, ReadTask
from chimera_runtime.data.item_order import Share
class Items(list):
    def __getitem__(self, number):
        time.sleep(600 if number == 22 else 0)
        return super().__getitem__(number)
def loaded(start, workers):
    tasks = (ReadTask(0, n, 1, {0: [n]}) for n in range(1000))
    reader = MapReader(ItemLoading(Items([(1, 2)] * 1000), 0), Share(1, 1, 1, 0), {0: ALL})
    return elements(reader, tasks, DataWorkers(workers, start=start))
"""

WAITING = """
from rank import *
batches = loaded("fork", 2)
next(batches)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone tells a process of the end of its parent")
def test_workers_end_at_once_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    words = [sys.executable, "-c", WAITING]
    rank = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=variables)
    assert rank.stdout is not None
    children = [int(word) for word in rank.stdout.readline().split()]
    assert len(children) == 2
    rank.kill()
    rank.wait()
    deadline = time.monotonic() + 2  # torch itself looks every 5 seconds
    while any(map(is_there, children)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_there, children))
    rank.stdout.close()


SIGNALLED = """
from rank import *
received = set()
numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1)
def send():
    for number in numbers:
        os.killpg(0, number)
for number in numbers:
    signal.signal(number, lambda number, _: received.add(number))
if sys.argv[1] == "spawn":
    threading.Timer(0.3, send).start()  # the worker imports torch
batches = loaded(sys.argv[1], 1)
next(batches)
send()
for _ in range(20):
    next(batches)
print(len(received), len(multiprocessing.active_children()), flush=True)
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_signals_to_all_processes_are_the_ranks_alone_and_a_worker_that_hangs_ends_with_it(
    start: str, tmp_path: Path
) -> None:
    """Signals as torchrun, Slurm or a terminal send them, at any time; the worker is at item 22 when the rank ends."""
    (tmp_path / "rank.py").write_text(RANK)  # which a process that is started afresh imports
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    begin = time.monotonic()
    done = forkserver.run(("-c", SIGNALLED, start), variables, tmp_path, PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5 1\n", "")
    assert time.monotonic() - begin < 40


@pytest.mark.parametrize("dataset", [Drawing(), Flowing()])
def test_a_rank_that_loads_by_itself_pins_memory_where_there_is_a_gpu(
    alone: World, dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pinned_in(has_gpu: bool) -> int:
        pinned: list[torch.Tensor] = []
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
        mine = loader(alone, dataset, workers=DataWorkers(pins_memory=True))
        assert len([*mine]) == len([*mine]) == 6
        return len(pinned)

    assert pinned_in(has_gpu=False) == 0
    assert pinned_in(has_gpu=True) >= 12
