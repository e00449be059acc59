"""`Loader`: the mini-batches of a dataset for a training loop; each rank loads only the items that it uses.

Ranks that read an iterable dataset send its length and its state to the others, by `ReaderMessages`.
"""

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep
from typing import Any
from weakref import proxy

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from chimera_runtime.blame import Located, ModelError, UserCode
from chimera_runtime.data.item_order import ItemOrder, Share, is_stream, length_of_stream, require_enough
from chimera_runtime.data.mini_batch import ItemLoading, MiniBatch, Uses
from chimera_runtime.data.readers import IterableReader, MapReader, ReadBatch, ReadPosition, ReadTask
from chimera_runtime.errors import FAILED, MISUSED, Misuse
from chimera_runtime.errors import data as mistakes
from chimera_runtime.ranks.agreement import ControlGroup, digest_of
from chimera_runtime.ranks.messages import unrecorded
from chimera_runtime.ranks.parent_death import signal_when_parent_ends
from chimera_runtime.values.nested import all_generators_kept

# The data workers of a rank: processes of torch's DataLoader that load mini-batches while the rank computes.
#
# They are processes and not threads, because threads would compete with the lane for the interpreter, and would share
# random generators with stages that draw dropout. Their priority is normal: with lower ones a step was no faster beyond
# the scatter (benchmarks/loading.py), and other work on the machine would starve them.

_STARTING = UserCode("starting the data workers", MISUSED)

_LOOK_AFTER = 5.0
"""Seconds without a mini-batch after which a DataLoader checks that its workers are alive."""

_MOMENT = 0.01
"""Seconds that a thread of torch needs at most to free the tensors that it has sent."""

_TO_ALL = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
"""The signals that a terminal, torchrun and Slurm send to every process of a job by default."""


@dataclass(frozen=True)
class DataWorkers:
    """Settings of the data workers of a rank: ``count`` processes, each ``ahead`` mini-batches ahead, or none.

    ``start`` is the way in which multiprocessing starts them. Other ranks wait ``timeout`` seconds for this one.
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


def elements(
    source: MapReader | IterableReader, tasks: Iterable[ReadTask] | None, workers: DataWorkers
) -> Iterator[Any]:
    """Loads mini-batches in the order of the tasks, or of an iterable dataset. Closing the iterator ends the workers.

    The random generators of this process do not change. Raises the `Misuse` or `ModelError` of the dataset; ModelError
    also if a worker ends.
    """
    if workers.count:
        return _by_workers(source, tasks, workers)
    loaded = iter(source) if isinstance(source, IterableReader) else map(source.__getitem__, tasks or ())
    return _by_rank(loaded, workers.pins_memory and torch.accelerator.is_available())


def _by_rank(loaded: Iterator[Any], pins_memory: bool) -> Iterator[Any]:
    while True:
        with all_generators_kept():
            element = next(loaded)
        yield element.pin_memory() if pins_memory else element


def _by_workers(
    source: MapReader | IterableReader, tasks: Iterable[ReadTask] | None, workers: DataWorkers
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
        if isinstance(element, Exception):
            raise element
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
                message, note = mistakes.worker_hangs(seconds=timeout), mistakes.WORKER_HANGS_NOTE
            model_error = ModelError(message, FAILED)
            model_error.add_note(note)
            raise model_error from error.with_traceback(None)


def _unchanged(element: Any) -> Any:
    return element


def _signals() -> Set[signal.Signals]:
    handled = {number for number in signal.valid_signals() if callable(signal.getsignal(number))}
    return {signal.Signals(number) for number in _TO_ALL | handled - {signal.SIGCHLD}}


@contextmanager
def _prepared_to_fork(signals: Set[signal.Signals]) -> Iterator[None]:
    """Blocks signals and stops garbage collection while data workers are forked; `_begin_worker` undoes it in each.

    Also removes the signal handler by which a DataLoader would raise the end of a worker anywhere, such as in a step:
    it notices the end as well when the next mini-batch is asked for.
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


_FIRST_TAG = 2**30
"""The tag of the first loader's messages; messages of the schedule have smaller tags."""

_AHEAD = 256
"""Messages that may be under way before the reader waits for their receivers."""

Messages = deque[tuple[dist.Work | None, torch.Tensor, int]]
"""Messages under way, each with its memory and its receiver: gloo needs the memory until the message is received."""


class ReaderMessages:
    """Sends lengths and states of an iterable dataset from the ranks that read it to those that do not.

    In each copy the first of the workers ``readers`` sends the length of each mini-batch: ranks that read call
    `send_items`, the others `receive_items`. Every rank makes an object for the loader of the same ``number``.
    ``messages`` are the sends of this rank that have not been waited for; they outlive the loader.
    """

    def __init__(self, control_group: ControlGroup, readers: frozenset[int], number: int, messages: Messages) -> None:
        place = control_group.place
        self._control_group = control_group
        self._number = number
        self._tag = _FIRST_TAG + number
        self._sender = min(readers)
        self._receivers = [place.rank_of(place.copy, w) for w in range(place.workers) if w not in readers]
        self._messages = messages
        self._shared = 0

    def send_items(self, items: int) -> None:
        """Sends the number of items of the next mini-batch over all copies; 0 at the end of an epoch.

        Raises `PeerLost` if a receiver is far behind and does not catch up in time.
        """
        control = self._control_group
        if control.place.worker != self._sender:
            return
        for rank in self._receivers:
            message, purpose = torch.tensor([items]), "for a rank to hear the length of a mini-batch"
            with control.waiting(purpose, [rank]):
                work = unrecorded(dist.isend, message, control.members[rank], group=control.group, tag=self._tag)
            self._messages.append((work, message, rank))
            if len(self._messages) > _AHEAD:
                work, _, rank = self._messages.popleft()
                control.settle(work, purpose, [rank])

    def receive_items(self) -> int:
        """Returns the number of items that the reader of this copy has sent with `send_items`."""
        message, place = torch.zeros(1, dtype=torch.int64), self._control_group.place
        sender = place.rank_of(place.copy, self._sender)
        self._control_group.recv(message, sender, "for the length of a mini-batch", tag=self._tag)
        return int(message)

    def share_state(self, state: Any) -> Any:
        """Returns the state that the dataset has on the reader of the first copy. All ranks must call it."""
        control, place = self._control_group, self._control_group.place
        key, sender = f"data/{self._number}/{self._shared}", place.rank_of(0, self._sender)
        self._shared += 1
        if place.rank == sender:
            control.store.set(key, pickle.dumps(state).hex())
            return state
        text = control.wait_for_key(key, sender, "for the state of the dataset").decode()
        return pickle.loads(bytes.fromhex(text))


class Loader:
    """The mini-batches of this rank's copy, see `Pipeline.loader`; an iteration is an epoch.

    The first iteration is epoch 0, and each is followed by the next epoch; an iteration after `load_state_dict`
    continues within its epoch. All ranks must iterate in the same way. Data workers live from the first mini-batch to
    `close`, and load ahead into the next epoch.

    These are the parameters of `Pipeline.loader`.

    Parameters
    ----------
    dataset
        Map-style or iterable, of (input, target) or (input, target, keywords), or of what ``collate_fn`` takes.
    shuffle
        Whether a map-style dataset comes in another order in each epoch.
    sampler
        The keys of a map-style dataset for an epoch, the same on all ranks; global generators are seeded alike.
    batch_sampler
        In place of a sampler: lists of keys, one for each mini-batch over all copies, of any number of items. Their
        micro-batches, B items each, are spread evenly over the copies. It needs programs for several N.
    seed
        Seed of the order of an epoch and of the random numbers of an item; by default the pipeline's.
    collate_fn
        Makes the pair or triple of a micro-batch from the list of its B items; by default torch's default_collate.
    drop_last
        Whether items at the end of an epoch that do not fill a mini-batch are left out; if not, they are a smaller
        mini-batch, for evaluation.
    num_workers, prefetch_factor, multiprocessing_context, pin_memory
        As of torch's DataLoader: processes that load while the rank computes, how many mini-batches each is ahead,
        how they are started, and whether they fill memory from which a GPU copies. The order stays the same.
    """

    def __init__(
        self,
        loading: ItemLoading,
        share: Share,
        uses: Uses,
        order: ItemOrder,
        reader_messages: ReaderMessages,
        located: Located,
        workers: DataWorkers,
        drop_last: bool,
        uses_of: Callable[[int], Uses] | None = None,
    ) -> None:
        self._loading = loading
        self._share = share
        self._uses = uses
        self._uses_of = uses_of
        self._order = order
        self._reader_messages = reader_messages
        self._located = located
        self._workers = workers
        self._drop_last = drop_last
        self._is_stream = is_stream(loading.dataset)
        self._place = ReadPosition()
        self._is_at_beginning = True  # of an iteration
        self._elements: Iterator[Any] | None = None  # what is being loaded, from `_place` on
        self._require_enough()

    @property
    def epoch(self) -> int:
        """The present epoch; between two iterations the next one."""
        return self._place.epoch

    # ---- iterating

    def __len__(self) -> int:
        """Returns the number of mini-batches of an epoch.

        Raises
        ------
        TypeError
            If the dataset is iterable and has no length.
        """
        if (count := self._count) is None:
            raise TypeError("an iterable dataset without __len__ does not say how many mini-batches an epoch has")
        if self._order.gives_batches:
            return self._order.batches(self.epoch)
        return count // self._share.items if self._drop_last else -(-count // self._share.items)

    def __iter__(self) -> Iterator[MiniBatch]:
        if not self._is_at_beginning:
            self._move_to(ReadPosition(self.epoch + 1))
        self._is_at_beginning = False
        self._require_enough()
        while (batch := self._next()) is not None:
            if batch.items:
                yield batch
        self._is_at_beginning = True

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration begin ``epoch``, or continue in it if `load_state_dict` has set a position there."""
        if epoch != self.epoch or not self._is_at_beginning:
            self._move_to(ReadPosition(epoch))

    def close(self) -> None:
        """Ends the data workers; a later iteration starts new ones."""
        self._elements = None

    def _move_to(self, place: ReadPosition) -> None:
        self.close()  # what is being loaded goes on at another position
        self._place, self._is_at_beginning = place, True

    @property
    def _count(self) -> int | None:
        return self._count_in(self.epoch)

    def _count_in(self, epoch: int) -> int | None:
        return length_of_stream(self._loading.dataset) if self._is_stream else self._order.count(epoch)

    def _require_enough(self) -> None:
        """Called for each epoch, as a sampler may give fewer items later."""
        count = self._count
        if count is not None and self._drop_last and not self._order.gives_batches:
            require_enough(count, self._share)
        elif count == 0:
            raise Misuse(mistakes.DATASET_IS_EMPTY)

    def _next(self) -> MiniBatch | None:
        """The next mini-batch of the epoch; None at its end, from where the next epoch begins."""
        count, place = self._count, self._place
        read = self._receive() if self._uses and (self._is_stream or self._items_of_next()) else None
        # Without a length of the dataset, the ranks that read it send the number of items to the others.
        if read is None:
            items = self._reader_messages.receive_items() if count is None else self._items_of_next()
        else:
            items = read.items
            if count is None:
                self._reader_messages.send_items(items)
        if not items:
            self._place = ReadPosition(place.epoch + 1)
            return None
        loaded, state = ({}, None) if read is None else (read.micro_batches, read.state)
        share = self._share.of(items) if self._order.gives_batches else self._share
        mini_batch = MiniBatch(share.items_of_copy(items), share, loaded, self._position)
        self._place = ReadPosition(place.epoch, place.items + items, state)
        return mini_batch

    @property
    def _position(self) -> tuple[int, ...]:
        count, place, order = self._count, self._place, self._order
        position = order.seed, int(order.shuffle), -1 if count is None else count, place.epoch, place.items
        if self._is_stream or order.sampler is None:
            return position
        (key,) = order.keys(place.epoch, place.items, place.items + 1)
        return (*position, key if isinstance(key, int) else digest_of(repr(key)))

    def _items_of_next(self) -> int:
        count = self._count
        assert count is not None
        if self._order.gives_batches:
            return self._order.size_at(self.epoch, self._place.items)
        items = min(count - self._place.items, self._share.items)
        return 0 if self._drop_last and items < self._share.items else items

    def _receive(self) -> ReadBatch:
        try:
            with self._located:
                if self._elements is None:
                    self._elements = self._start_loading()
                read: ReadBatch = next(self._elements)
                return read
        except BaseException:
            self.close()
            raise

    def _start_loading(self) -> Iterator[ReadBatch]:
        share, uses, drop_last, begin = self._share, self._uses, self._drop_last, self._place
        if self._is_stream:
            return elements(IterableReader(self._loading, share, uses, drop_last, begin), None, self._workers)
        tasks = _tasks(self._order, share, self._uses_of or (lambda _number: uses), drop_last, begin)
        return elements(MapReader(self._loading, share, uses), tasks, self._workers)

    # ---- resuming

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the data: epoch, items of it so far over all copies, and the epoch's length.

        All ranks must call it, because those that do not read an iterable dataset receive its state.
        """
        length = self._count
        place: dict[str, Any] = {"epoch": self.epoch, "items": self._place.items, "length": length}
        if length is not None and not self._items_of_next():
            place |= {"epoch": self.epoch + 1, "items": 0}
        if self._is_stream:
            place["stream"] = self._reader_messages.share_state(self._place.state if place["items"] else None)
        return place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue at a position that `state_dict` returned.

        Raises
        ------
        BadCheckpoint
            If the dataset has another length.
        Misuse
            If no mini-batch begins at the position.
        """
        length, items = self._count_in(state["epoch"]), state["items"]
        if state["length"] != length:
            raise mistakes.length_has_changed(length, state["length"])
        if self._order.gives_batches:
            self._require_beginning(state["epoch"], items)
        elif items % self._share.items:
            raise mistakes.no_mini_batch_begins_there(items=items, formula=self._share.formula)
        self._move_to(ReadPosition(state["epoch"], items, state.get("stream")))

    def _require_beginning(self, epoch: int, items: int) -> None:
        try:
            self._order.size_at(epoch, items)
        except KeyError:
            raise mistakes.no_batch_of_sampler_begins_there(items=items, epoch=epoch) from None


def _tasks(
    order: ItemOrder, share: Share, uses_of: Callable[[int], Uses], drop_last: bool, begin: ReadPosition
) -> Iterator[ReadTask]:
    """Yields all mini-batches from a position on, epoch after epoch, until an epoch has none. ``uses_of`` returns what
    the rank uses of so many micro-batches.

    It has no reference to the loader: in a cycle, data workers would stay until a garbage collection.
    """
    epoch, start, least = begin.epoch, begin.items, share.items if drop_last and not order.gives_batches else 1
    while (count := order.count(epoch)) >= least:
        while (items := min(count - start, share.items)) >= least:
            keys, of_batch = {}, share
            if order.gives_batches:
                items = order.size_at(epoch, start)
                of_batch = share.of(items)
            uses = uses_of(-(-of_batch.items_of_copy(items) // share.micro_batch_size))
            for micro in uses:
                first = of_batch.start(micro)
                last = min(first + share.micro_batch_size, items)
                if first < last:
                    keys[micro] = order.keys(epoch, start + first, start + last)
            yield ReadTask(epoch, start, items, keys, uses=uses, share=of_batch)
            start += items
        epoch, start = epoch + 1, 0
