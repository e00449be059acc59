"""`Loader`: the mini-batches of a dataset for a training loop; each rank loads only the items that it uses.

Ranks that read an iterable dataset send its length and its state to the others, by `ReaderMessages`.
"""

import pickle
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.blame import Located
from chimera_runtime.data.data_workers import DataWorkers, LoadingTask, MapReader, elements
from chimera_runtime.data.item_order import ItemOrder, Share, is_stream, length_of_stream, require_enough
from chimera_runtime.data.iterable_reader import IterableReader, ReadBatch, ReadPosition
from chimera_runtime.data.mini_batch import ItemLoading, MiniBatch, Uses
from chimera_runtime.errors import Misuse
from chimera_runtime.errors import data as mistakes
from chimera_runtime.ranks.agreement import digest_of
from chimera_runtime.ranks.control_group import ControlGroup
from chimera_runtime.ranks.messages import unrecorded

_FIRST_TAG = 2**30
"""The tag of the first loader's messages; messages of the schedule have smaller tags."""

_AHEAD = 256
"""Messages that may be under way before the reader waits for their receivers."""

Messages = deque[tuple[dist.Work | None, torch.Tensor, int]]
"""Messages under way, each with its memory and its receiver: gloo needs the memory until the message is received."""


class ReaderMessages:
    """Sends lengths and states of an iterable dataset from the ranks that read it to those that do not.

    In each copy of the pipelines, the first of the workers ``readers``, which read the dataset, sends the length of
    each mini-batch to the workers that do not read. For each mini-batch, ranks that read call `send_items` and the
    others `receive_items`. Every rank makes an object of this class for the loader of the same ``number``. ``messages``
    are the sends of this rank that have not been waited for; they outlive the loader.
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

        Raises `PeerLost` if a receiver is far behind and does not catch up in time, or has ended.
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
        """Returns the number of items that the reader of this copy has sent with `send_items`.

        Raises `PeerLost` if the message does not come in time.
        """
        message, place = torch.zeros(1, dtype=torch.int64), self._control_group.place
        sender = place.rank_of(place.copy, self._sender)
        self._control_group.recv(message, sender, "for the length of a mini-batch", tag=self._tag)
        return int(message)

    def share_state(self, state: Any) -> Any:
        """Returns the state that the dataset has on the reader of the first copy. All ranks must call it.

        Raises `PeerLost` if the state does not come in time.
        """
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

    Attributes
    ----------
    epoch
        The present epoch; between two iterations the next one.
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
    ) -> None:
        self._loading = loading
        self._share = share
        self._uses = uses
        self._order = order
        self._reader_messages = reader_messages
        self._located = located
        self._workers = workers
        self._drop_last = drop_last
        self._is_stream = is_stream(loading.dataset)
        # The position in the data: an epoch, its items so far over all copies, and the state of an iterable dataset.
        self._items = 0
        self._state: Any = None
        self._is_at_beginning = True  # of an iteration
        self._origin: tuple[int, ...] = ()  # the numbers on which the order of the epoch depends
        # What is being loaded, and the epoch and items at which its next mini-batch begins.
        self._elements: Iterator[Any] | None = None
        self._next_loaded = (-1, 0)
        self.epoch = 0
        self._require_enough()

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
        return count // self._share.items if self._drop_last else -(-count // self._share.items)

    def __iter__(self) -> Iterator[MiniBatch]:
        if not self._is_at_beginning:
            self._move_to(self.epoch + 1)
        self._is_at_beginning = False
        self._require_enough()
        count = self._count
        self._origin = self._order.seed, int(self._order.shuffle), -1 if count is None else count
        while (batch := self._next()) is not None:
            if batch.items:
                yield batch
        self._move_to(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration begin ``epoch``, or continue in it if `load_state_dict` has set a position there."""
        if epoch != self.epoch or not self._is_at_beginning:
            self._move_to(epoch)

    def close(self) -> None:
        """Ends the data workers; a later iteration starts new ones."""
        self._elements, self._next_loaded = None, (-1, 0)

    def _move_to(self, epoch: int, items: int = 0, state: Any = None) -> None:
        self.epoch, self._items, self._state, self._is_at_beginning = epoch, items, state, True

    @property
    def _count(self) -> int | None:
        """The number of items in the epoch, or None if an iterable dataset has no length."""
        return self._count_in(self.epoch)

    def _count_in(self, epoch: int) -> int | None:
        return length_of_stream(self._loading.dataset) if self._is_stream else self._order.count(epoch)

    def _require_enough(self) -> None:
        """Raises `Misuse` if the epoch has no mini-batch. Called for each, as a sampler may give fewer items later."""
        count = self._count
        if count is not None and self._drop_last:
            require_enough(count, self._share)
        elif count == 0:
            raise Misuse(mistakes.DATASET_IS_EMPTY)

    def _next(self) -> MiniBatch | None:
        """The next mini-batch of the epoch, None at its end."""
        # The items over all copies, 0 at the end of the epoch, and this rank's part of them.
        if self._is_stream:
            items, batch = self._next_of_stream()
        else:
            items = self._items_of_next()
            batch = self._receive() if self._uses and items else None
        if not items:
            self._next_loaded = self.epoch + 1, 0
            return None
        loaded = {} if batch is None else batch.micro_batches
        mini_batch = MiniBatch(self._share.items_of_copy(items), self._share, loaded, self._position)
        self._items += items
        self._next_loaded = self.epoch, self._items
        return mini_batch

    @property
    def _position(self) -> tuple[int, ...]:
        """Returns the position at which the next mini-batch begins, as numbers with the names `POSITION_NAMES`."""
        position = (*self._origin, self.epoch, self._items)
        if self._is_stream or self._order.sampler is None:
            return position
        (key,) = self._order.keys(self.epoch, self._items, self._items + 1)
        return (*position, key if isinstance(key, int) else digest_of(repr(key)))

    def _next_of_stream(self) -> tuple[int, MiniBatch | None]:
        """Returns the number of items of the next mini-batch, and this rank's part of it, for an iterable dataset.

        The part is None at the end of an epoch and on ranks that use no item. If the dataset has no length, the ranks
        that read send the number to the others.
        """
        has_no_length = self._count is None
        if not self._uses:
            return self._reader_messages.receive_items() if has_no_length else self._items_of_next(), None
        read = self._receive()
        items, batch = (read.items, read.batch) if isinstance(read, ReadBatch) else (0, None)
        if batch is not None:
            self._state = read.state
        if has_no_length:
            self._reader_messages.send_items(items)
        return items, batch

    def _items_of_next(self) -> int:
        """Number of items of the next mini-batch over all copies; 0 at the end of an epoch of known length."""
        count = self._count
        assert count is not None
        items = min(count - self._items, self._share.items)
        return 0 if self._drop_last and items < self._share.items else items

    def _receive(self) -> Any:
        """Next loaded element. Starts the data workers first, or again if they would continue at another position."""
        if self._elements is None or self._next_loaded != (self.epoch, self._items):
            self._elements = None  # ends its workers before others begin
            self._elements = self._start_loading()
        try:
            with self._located:
                return next(self._elements)
        except BaseException:
            self.close()
            raise

    def _start_loading(self) -> Iterator[Any]:
        begin = ReadPosition(self.epoch, self._items, self._state)
        if self._is_stream:
            stream = IterableReader(self._loading, self._share, self._uses, self._drop_last, begin)
            return elements(stream, None, self._workers)
        source = MapReader(self._loading, self._share, self._uses)
        return elements(source, _tasks(self._order, self._share, self._uses, self._drop_last, begin), self._workers)

    # ---- resuming

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the data: epoch, items of it so far over all copies, and the epoch's length.

        All ranks must call it, because those that do not read an iterable dataset receive its state.
        """
        length = self._count
        place: dict[str, Any] = {"epoch": self.epoch, "items": self._items, "length": length}
        if length is not None and not self._items_of_next():
            place |= {"epoch": self.epoch + 1, "items": 0}
        if self._is_stream:
            place["stream"] = self._reader_messages.share_state(self._state if place["items"] else None)
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
        if items % self._share.items:
            raise mistakes.no_mini_batch_begins_there(items, self._share.formula)
        self._move_to(state["epoch"], items, state.get("stream"))


def _tasks(order: ItemOrder, share: Share, uses: Uses, drop_last: bool, begin: ReadPosition) -> Iterator[LoadingTask]:
    """Yields all mini-batches from a position on, epoch after epoch, until an epoch has none.

    It has no reference to the loader: in a cycle, data workers would stay until a garbage collection.
    """
    epoch, start, least = begin.epoch, begin.items, share.items if drop_last else 1
    while (count := order.count(epoch)) >= least:
        # An entry for each micro-batch of this rank that has items: its place in the epoch, and the keys.
        while (items := min(count - start, share.items)) >= least:
            micro_batches = {}
            for micro in uses:
                first = share.start(micro)
                last = min(first + share.micro_batch_size, items)
                if first < last:
                    micro_batches[micro] = start + first, order.keys(epoch, start + first, start + last)
            yield LoadingTask(epoch, share.items_of_copy(items), micro_batches)
            start += items
        epoch, start = epoch + 1, 0
