"""`Loader`: a dataset as the mini-batches of a training loop, of which each rank loads what it uses."""

from collections.abc import Iterator, Mapping
from typing import Any

from chimera_runtime.blame import Located
from chimera_runtime.data.data_workers import DataWorkers, LoadingTask, MapReader, elements
from chimera_runtime.data.epoch_length import EpochLength
from chimera_runtime.data.item_order import ItemOrder, Share, in_items, is_stream, length_of_stream, require_enough
from chimera_runtime.data.loading import Loading, MiniBatch, Uses
from chimera_runtime.data.reading import IterableReader, ReadBatch, ReadPosition
from chimera_runtime.errors import BadCheckpoint, Misuse
from chimera_runtime.ranks.agreement import digest_of


class Loader:
    """The mini-batches of this rank's copy, see `Pipeline.loader`; an iteration is an epoch.

    Each begins the next epoch, the first one epoch 0; one that follows `load_state_dict` goes on within its epoch. All
    ranks iterate alike. Data workers live from the first mini-batch to `close`, and load ahead into the next epoch.

    Attributes
    ----------
    epoch
        The epoch that is under way, or is next.
    """

    def __init__(
        self,
        loading: Loading,
        share: Share,
        uses: Uses,
        order: ItemOrder,
        epoch_length: EpochLength,
        located: Located,
        workers: DataWorkers,
        drop_last: bool,
    ) -> None:
        self._loading = loading
        self._share = share
        self._uses = uses
        self._order = order
        self._epoch_length = epoch_length
        self._located = located
        self._workers = workers
        self._drop_last = drop_last
        self._is_stream = is_stream(loading.dataset)
        self._items = 0  # of all copies, in this epoch
        self._state: Any = None  # a stream's, there
        self._begins = True  # whether the next iteration begins where this stands
        self._elements: Iterator[Any] | None = None
        self._ahead = (-1, 0)  # where the elements go on
        self._origin: tuple[int, ...] = ()  # what decides the order of the epoch
        self.epoch = 0
        self._require_enough()

    # ---- iterating

    def __len__(self) -> int:
        """The mini-batches of an epoch.

        Raises
        ------
        TypeError
            If the dataset is iterable and has no length.
        """
        if (count := self._count) is None:
            raise TypeError("an iterable dataset without __len__ does not say how many mini-batches an epoch has")
        return count // self._share.items if self._drop_last else -(-count // self._share.items)

    def __iter__(self) -> Iterator[MiniBatch]:
        if not self._begins:
            self._stand(self.epoch + 1)
        self._begins = False
        self._require_enough()
        count = self._count
        self._origin = self._order.seed, int(self._order.shuffle), -1 if count is None else count
        while (batch := self._next()) is not None:
            if batch.items:
                yield batch
        self._stand(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Lets the next iteration be that of an epoch; where it is under way after `load_state_dict`, from there on."""
        if epoch != self.epoch or not self._begins:
            self._stand(epoch)

    def close(self) -> None:
        """Ends the data workers; an iteration after it starts others."""
        self._elements, self._ahead = None, (-1, 0)

    def _stand(self, epoch: int, items: int = 0, state: Any = None) -> None:
        """The next iteration begins there."""
        self.epoch, self._items, self._state, self._begins = epoch, items, state, True

    @property
    def _count(self) -> int | None:
        """The items of the epoch, if that is known."""
        return self._count_in(self.epoch)

    def _count_in(self, epoch: int) -> int | None:
        return length_of_stream(self._loading.dataset) if self._is_stream else self._order.count(epoch)

    def _require_enough(self) -> None:
        """Passes if the epoch has a mini-batch, or may have one; a sampler may give fewer items than in another."""
        count = self._count
        if count is not None and self._drop_last:
            require_enough(count, self._share)
        elif count == 0:
            raise Misuse("the dataset has no item")

    def _next(self) -> MiniBatch | None:
        """The next mini-batch of the epoch, None at its end."""
        items, batch = self._next_of_stream() if self._is_stream else self._next_by_key()
        if not items:
            self._ahead = self.epoch + 1, 0
            return None
        loaded = {} if batch is None else batch.micro_batches
        made = MiniBatch(self._share.held(items), self._share, loaded, self._position)
        self._items += items
        self._ahead = self.epoch, self._items
        return made

    @property
    def _position(self) -> tuple[int, ...]:
        """Where the next mini-batch begins."""
        position = (*self._origin, self.epoch, self._items)
        if self._is_stream or self._order.sampler is None:
            return position
        (key,) = self._order.keys(self.epoch, self._items, self._items + 1)
        return (*position, key if isinstance(key, int) else digest_of(repr(key)))

    def _next_by_key(self) -> tuple[int, MiniBatch | None]:
        """The items over all copies, 0 at the end, and what this rank uses of them."""
        items = self._items_of_next()
        return items, self._receive() if self._uses and items else None

    def _next_of_stream(self) -> tuple[int, MiniBatch | None]:
        """The same of a dataset that tells its end when it comes: ranks that read it tell the others."""
        tells = self._count is None
        if not self._uses:
            return self._epoch_length.receive_items() if tells else self._items_of_next(), None
        read = self._receive()
        items, batch = (read.items, read.batch) if isinstance(read, ReadBatch) else (0, None)
        if batch is not None:
            self._state = read.state
        if tells:
            self._epoch_length.send_items(items)
        return items, batch

    def _items_of_next(self) -> int:
        """The items over all copies of the next mini-batch, 0 at the end, where the length is known."""
        count = self._count
        assert count is not None
        items = min(count - self._items, self._share.items)
        return 0 if self._drop_last and items < self._share.items else items

    def _receive(self) -> Any:
        """What the workers have loaded next."""
        if self._elements is None or self._ahead != (self.epoch, self._items):
            self._elements = None  # ends its workers before others begin
            self._elements = self._started()
        try:
            with self._located:
                return next(self._elements)
        except BaseException:
            self.close()
            raise

    def _started(self) -> Iterator[Any]:
        """Mini-batches from where this stands on."""
        begin = ReadPosition(self.epoch, self._items, self._state)
        if self._is_stream:
            stream = IterableReader(self._loading, self._share, self._uses, self._drop_last, begin)
            return elements(stream, None, self._workers)
        source = MapReader(self._loading, self._share, self._uses)
        return elements(source, self._tasks(begin), self._workers)

    def _tasks(self, begin: ReadPosition) -> Iterator[LoadingTask]:
        """All mini-batches from a point on, epoch after epoch, up to one that has none."""
        epoch, start, share = begin.epoch, begin.items, self._share
        while (count := self._order.count(epoch)) >= (share.items if self._drop_last else 1):
            while (items := min(count - start, share.items)) >= (share.items if self._drop_last else 1):
                held = {}
                for micro in self._uses:
                    first = share.start(micro)
                    last = min(first + share.micro_batch_size, items)
                    if first < last:
                        held[micro] = start + first, self._order.keys(epoch, start + first, start + last)
                yield LoadingTask(epoch, share.held(items), held)
                start += items
            epoch, start = epoch + 1, 0

    # ---- resuming

    def state_dict(self) -> dict[str, Any]:
        """Epoch, the items of it that have been used, over all copies, and those that there are: the same on all ranks.

        All ranks call it: of an iterable dataset they learn the state that the dataset, or its iterator, has itself.
        """
        length = self._count
        place: dict[str, Any] = {"epoch": self.epoch, "items": self._items, "length": length}
        if length is not None and not self._items_of_next():
            place |= {"epoch": self.epoch + 1, "items": 0}
        if self._is_stream:
            place["stream"] = self._epoch_length.share_state(self._state if place["items"] else None)
        return place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next iteration go on there.

        Raises
        ------
        BadCheckpoint
            If the dataset has another length.
        Misuse
            If no mini-batch begins there.
        """
        length, items = self._count_in(state["epoch"]), state["items"]
        if state["length"] != length:
            raise BadCheckpoint(
                f"the dataset has {_in_words(length)}, and had {_in_words(state['length'])} when the checkpoint was "
                "saved: its order would be another one; take the weights alone, with load_weights (in "
                "train.py with --load)"
            )
        if items % self._share.items:
            raise Misuse(
                f"training was at item {items} of the data, and B*N*W = {self._share.formula} does not divide that: "
                "choose B, N or W so that it does"
            )
        self._stand(state["epoch"], items, state.get("stream"))


def _in_words(length: int | None) -> str:
    return "a length that it does not say" if length is None else in_items(length)
