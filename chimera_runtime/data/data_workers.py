"""The data workers of a rank: processes of torch's DataLoader that load mini-batches while the rank computes.

They are processes and not threads, because threads would compete with the lane for the interpreter, and would share
random generators with stages that draw dropout.

Their priority is normal. If stages need all cores, eight workers take 11 ms of CPU from a step of 63 ms: 5 ms to wake
up from the sleeps that stand for loading, and 5 ms that instant items cost as well (benchmarks/loading.py). With lower
priorities (nice 10, SCHED_BATCH, SCHED_IDLE) a step took 1.02 to 1.04 of its time without workers, and 1.07 with the
normal one: within the scatter. And other work on the machine would starve them.
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
from weakref import proxy

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from chimera_runtime.blame import ModelError, UserCode
from chimera_runtime.data.item_order import Share
from chimera_runtime.data.iterable_reader import EpochEnd, IterableReader
from chimera_runtime.data.mini_batch import Failure, ItemLoading, MiniBatch, Uses, failure, sendable
from chimera_runtime.errors import FAILED, MISUSED, Misuse
from chimera_runtime.errors import data as mistakes
from chimera_runtime.ranks.parent_death import signal_when_parent_ends
from chimera_runtime.values.tensors import all_generators_kept

_STARTING = UserCode("starting the data workers", MISUSED)

_LOOK_AFTER = 5.0
"""Seconds without a mini-batch after which a DataLoader checks that its workers are alive."""

_MOMENT = 0.01
"""Seconds that a thread of torch needs at most to free the tensors that it has sent."""

_TO_ALL = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
"""The signals that a terminal, torchrun and Slurm send to every process of a job by default."""


@dataclass(frozen=True)
class DataWorkers:
    """Settings of the data workers of a rank.

    ``count`` processes load, each ``ahead`` mini-batches ahead; with 0 the rank itself loads. ``start`` is the way in
    which multiprocessing starts them. ``timeout`` is the number of seconds that other ranks wait for this one.
    """

    count: int = 0
    ahead: int = 2
    start: str | None = None
    pins_memory: bool = False
    timeout: float = 60.0

    @property
    def patience(self) -> float:
        """Seconds to wait for a mini-batch, fewer than ``timeout``: this rank says why before other ranks give up."""
        return self.timeout - min(_LOOK_AFTER, self.timeout / 4)


@dataclass(frozen=True)
class LoadingTask:
    """A mini-batch to load from a map-style dataset.

    ``items`` is the number of items of the copy. For each micro-batch by its number, ``micro_batches`` has the number
    of its first item in the epoch, and the keys of its items in the dataset.
    """

    epoch: int
    items: int
    micro_batches: dict[int, tuple[int, list[Any]]]


@dataclass(frozen=True, eq=False)
class MapReader(Dataset[Any]):
    """Loads the mini-batch of each task from a map-style dataset, in a rank or in a data worker."""

    loading: ItemLoading
    share: Share
    uses: Uses

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
            items = self.loading.items(task.epoch, keys)
            triples[micro] = self.loading.collated(items, task.epoch, place, keys, self.uses[micro])
        return MiniBatch(task.items, self.share, triples)


def elements(
    source: MapReader | IterableReader, tasks: Iterable[LoadingTask] | None, workers: DataWorkers
) -> Iterator[Any]:
    """Loads mini-batches in the order of the tasks, or of an iterable dataset. Closing the iterator ends the workers.

    The random generators of this process do not change.

    Raises `Misuse` or `ModelError`: the error that the dataset raises; ModelError also if a worker ends.
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
    # Workers ignore signals that are sent to the whole job: the rank handles these, and ends its workers. If the rank
    # is killed, the system tells its children, but for those of a fork server or of another thread.
    is_child = (workers.start or multiprocessing.get_start_method()) != "forkserver"
    may_end = is_child and threading.current_thread() is threading.main_thread()
    signals = _signals()
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
        worker_init_fn=partial(_begin_worker, os.getpid() if may_end else None, signals),
    )
    with _STARTING, _prepared_to_fork(signals):
        loaded = iter(loader)
    for process in getattr(loaded, "_workers", ()):
        # So a worker that hangs is ended, too. A method of its own would be a cycle, which keeps descriptors open.
        process._popen.terminate = partial(type(process._popen).kill, proxy(process._popen))
    while True:
        element = _next(loaded, workers.patience)
        if isinstance(element, Failure):
            element.raise_again()
        yield element


def _next(loaded: Iterator[Any], timeout: float) -> Any:
    """The next mini-batch. A DataLoader that has timed out is asked again, and checks that its workers are alive."""
    deadline = monotonic() + timeout
    while True:
        try:
            return next(loaded)
        except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
            # The last three: a worker that has ended no longer hands over the memory of what it had loaded.
            if isinstance(error, RuntimeError) and "DataLoader" not in str(error):
                raise
            message, note = mistakes.WORKER_ENDED, mistakes.WORKER_ENDED_NOTE
            if "timed out" in str(error):
                if monotonic() < deadline:
                    continue
                for process in getattr(loaded, "_workers", ()):
                    process.kill()  # torch would wait 5 s for one that hangs
                message, note = mistakes.worker_hangs(timeout), mistakes.WORKER_HANGS_NOTE
            model_error = ModelError(message, FAILED)
            model_error.add_note(note)
            raise model_error from error.with_traceback(None)


def _unchanged(element: Any) -> Any:
    return element


def _signals() -> Set[signal.Signals]:
    """The signals that workers leave to the rank: those of `_TO_ALL`, and those for which the user has a handler."""
    handled = {number for number in signal.valid_signals() if callable(signal.getsignal(number))}
    return {signal.Signals(number) for number in _TO_ALL | handled - {signal.SIGCHLD}}


@contextmanager
def _prepared_to_fork(signals: Set[signal.Signals]) -> Iterator[None]:
    """Blocks signals and stops garbage collection while data workers are forked; `_begin_worker` undoes it in each.

    Also removes the signal handler by which a DataLoader would raise the end of a worker anywhere, such as in a step.
    The DataLoader notices the end as well when the next mini-batch is asked for.
    """
    is_main = threading.current_thread() is threading.main_thread()
    child_handler = signal.getsignal(signal.SIGCHLD) if is_main else None
    was_enabled = gc.isenabled()
    gc.disable()
    signals_before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        # Threads of torch take the interpreter to free what they have sent. A process that is forked at that instant
        # hangs for ever in some releases of Python 3.11 (issue 112275 of CPython).
        if sys.version_info < (3, 12):
            sleep(_MOMENT)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals_before)
        if was_enabled:
            gc.enable()
        if child_handler is not None:
            signal.signal(signal.SIGCHLD, child_handler)


def _begin_worker(rank: int | None, signals: Set[signal.Signals], _number: int) -> None:
    """Prepares a data worker: it ignores signals that are meant for its rank, and ends when the process ``rank`` ends.

    What the rank had before the fork is kept out of garbage collection: freeing one of its communicators would wait
    for threads that do not exist in this process.
    """
    gc.freeze()
    gc.enable()
    signal.set_wakeup_fd(-1)
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    if rank is not None and signal_when_parent_ends(signal.SIGKILL) and os.getppid() != rank:
        os._exit(FAILED)
