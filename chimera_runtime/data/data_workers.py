"""The data workers of a rank: processes of torch's DataLoader that load mini-batches while the rank computes.

Threads would share the interpreter with the lane that posts messages, and generators with stages that draw dropout.

Priority is normal. Where stages need both cores, eight workers take 11 ms of CPU from a step of 63 ms: 5 ms to wake up
from the sleeps that stand for loading, 0.15 ms each, and 5 ms that instant items cost as well (benchmarks/loading.py).
A lower one (nice 10, SCHED_BATCH, SCHED_IDLE) gave 1.02 to 1.04 of a step in place of 1.07, within the scatter, and
would starve them beside other work.
"""

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from chimera_runtime.blame import ModelError, UserCode
from chimera_runtime.data.item_order import Share
from chimera_runtime.data.loading import Failure, Loading, MiniBatch, Uses, failure, sendable
from chimera_runtime.data.reading import EpochEnd, IterableReader
from chimera_runtime.errors import FAILED, MISUSED, Misuse
from chimera_runtime.ranks.parent_death import signal_when_parent_ends
from chimera_runtime.values.tensors import all_generators_kept

_STARTING = UserCode("starting the data workers", MISUSED)


_LOOK_AFTER = 5.0
"""Seconds without a mini-batch after which a DataLoader looks whether its workers are alive."""

_MOMENT = 0.01
"""Seconds in which a thread that has done its work lets go of it."""

_TO_ALL = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
"""What a terminal, torchrun and Slurm send to every process of a job, where nothing else is asked for."""


@dataclass(frozen=True)
class DataWorkers:
    """How many processes load, how many mini-batches each is ahead, and how they are started; none: the rank loads.

    ``timeout`` is how many seconds other ranks wait for this one.
    """

    count: int = 0
    ahead: int = 2
    start: str | None = None
    pins_memory: bool = False
    timeout: float = 60.0

    @property
    def patience(self) -> float:
        """Seconds to wait for the next mini-batch: fewer, so that it is this rank that speaks, and says why."""
        return self.timeout - min(_LOOK_AFTER, self.timeout / 4)


@dataclass(frozen=True)
class LoadingTask:
    """A mini-batch to load: its epoch, the items of the copy, and by micro-batch its place and the dataset's keys."""

    epoch: int
    items: int
    micro_batches: dict[int, tuple[int, list[Any]]]


class MapReader(Dataset[Any]):
    """A map-style dataset, by tasks: what a data worker runs."""

    def __init__(self, loading: Loading, share: Share, uses: Uses) -> None:
        self._loading = loading
        self._share = share
        self._uses = uses

    def __getitem__(self, task: LoadingTask) -> MiniBatch | Failure:
        if get_worker_info() is None:
            return self._loaded(task)
        try:
            return sendable(self._loaded(task))
        except (ModelError, Misuse) as error:
            return failure(error)

    def _loaded(self, task: LoadingTask) -> MiniBatch:
        triples = {}
        for micro, (place, keys) in task.micro_batches.items():
            items = self._loading.items(task.epoch, keys)
            triples[micro] = self._loading.collated(items, task.epoch, place, keys, self._uses[micro])
        return MiniBatch(task.items, self._share, triples)


def elements(
    source: MapReader | IterableReader, tasks: Iterable[LoadingTask] | None, workers: DataWorkers
) -> Iterator[Any]:
    """What is loaded, in the order of the tasks, or of the stream; the workers end when it is closed.

    The generators of this process stay as they are.

    Raises
    ------
    Misuse, ModelError
        That of the dataset; ModelError also if a worker ends.
    """
    if workers.count:
        return _by_workers(source, tasks, workers)
    loaded = iter(source) if isinstance(source, IterableReader) else map(source.__getitem__, tasks or ())
    return _by_rank(loaded, workers.pins_memory and torch.accelerator.is_available())


def _by_rank(loaded: Iterator[Any], pins_memory: bool) -> Iterator[Any]:
    while True:
        with all_generators_kept():
            element = next(loaded)
        yield element.pin_memory() if pins_memory and not isinstance(element, EpochEnd) else element


def _by_workers(
    source: MapReader | IterableReader, tasks: Iterable[LoadingTask] | None, workers: DataWorkers
) -> Iterator[Any]:
    is_child = (workers.start or multiprocessing.get_start_method()) != "forkserver"
    may_end = is_child and threading.current_thread() is threading.main_thread()
    numbers = _signals()
    loader: DataLoader[Any] = DataLoader(
        source,
        batch_size=None,
        sampler=tasks,
        collate_fn=_unchanged,
        pin_memory=workers.pins_memory,
        generator=torch.Generator(),
        num_workers=workers.count,
        prefetch_factor=workers.ahead,
        timeout=min(_LOOK_AFTER, workers.patience),
        multiprocessing_context=workers.start,
        worker_init_fn=partial(_begin, os.getpid() if may_end else None, numbers),
    )
    with _STARTING, _children_unwatched(), _uncollected(), _held(numbers):
        _let_threads_finish()
        loaded = iter(loader)
    for process in getattr(loaded, "_workers", ()):
        process._popen.terminate = process._popen.kill  # which is how torch and multiprocessing end one that hangs
    while True:
        element = _next(loaded, workers.patience)
        if isinstance(element, Failure):
            element.raise_again()
        yield element


def _next(loaded: Iterator[Any], timeout: float) -> Any:
    """The next mini-batch. A DataLoader that has timed out can be asked again, and looks after its workers then."""
    deadline = monotonic() + timeout
    while True:
        try:
            return next(loaded)
        except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
            # One that has ended no longer hands over the memory of what it had loaded.
            if isinstance(error, RuntimeError) and "DataLoader" not in str(error):
                raise
            if "timed out" not in str(error):
                lost = ModelError("a data worker has ended", FAILED)
                lost.add_note(_ENDED)
                raise lost from error.with_traceback(None)
            if monotonic() >= deadline:
                for process in getattr(loaded, "_workers", ()):
                    process.kill()  # torch would wait 5 s for one that hangs
                late = ModelError(f"no data worker has handed over a mini-batch for {timeout:g} s", FAILED)
                late.add_note(_HANGS)
                raise late from error.with_traceback(None)


_ENDED = (
    "The system may have ended it for lack of memory, or for lack of shared memory (/dev/shm): take fewer "
    "data workers, or smaller items. Or the dataset's own code has crashed or ended the process."
)
_HANGS = (
    "The dataset's own code may hang in a data worker, as where it takes a lock that was held when it was forked "
    '(multiprocessing_context="spawn" starts it afresh), or waits for a file system. If it is slow, take more '
    "data workers or a longer timeout."
)


def _unchanged(element: Any) -> Any:
    return element


@contextmanager
def _children_unwatched() -> Iterator[None]:
    """Takes away the signal handler with which a DataLoader would raise the end of a worker anywhere, as in a step.

    It notices as well when the next mini-batch is asked for.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if is_main else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGCHLD, before)


def _signals() -> Set[signal.Signals]:
    """The signals that the rank decides about: those of `_TO_ALL`, and those for which the user has a handler."""
    handled = {number for number in signal.valid_signals() if callable(signal.getsignal(number))}
    return {signal.Signals(number) for number in _TO_ALL | handled - {signal.SIGCHLD}}


@contextmanager
def _held(numbers: Set[signal.Signals]) -> Iterator[None]:
    """Blocks signals in this thread and in processes that it starts inside, which lose them in `_begin`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected, in a process that is forked inside neither: see `_begin`."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _let_threads_finish() -> None:
    """Waits a moment before processes are forked, in which threads of torch's let go of what they have sent.

    They take the interpreter for that. A process that is forked at that instant hangs for ever in some releases of
    Python 3.11 (issue 112275 of CPython).
    """
    if sys.version_info < (3, 12):
        sleep(_MOMENT)


def _begin(rank: int | None, numbers: Set[signal.Signals], _number: int) -> None:
    """Begins a worker, which ignores signals that the rank decides about, and ends with the rank's process if given.

    What the rank has left for its garbage collector stays: a communicator, whose threads are not in this process, would
    wait for them as it goes.
    """
    gc.freeze()
    gc.enable()
    signal.set_wakeup_fd(-1)
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    if rank is not None and signal_when_parent_ends(signal.SIGKILL) and os.getppid() != rank:
        os._exit(FAILED)
