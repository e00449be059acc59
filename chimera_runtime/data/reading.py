"""An iterable dataset as mini-batches: every reader goes through all of it, and collates what is its own alone.

So the order is that of the stream, whatever the number of copies and of data workers: of K workers each makes every
K-th mini-batch. What takes long belongs into ``collate``, which is called for what a rank uses, by all workers at once.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from chimera_runtime.blame import ModelError, UserCode
from chimera_runtime.data.item_order import Share, in_items, length_of_stream
from chimera_runtime.data.loading import Failure, Loading, MiniBatch, Uses, failure, sendable
from chimera_runtime.errors import MISUSED, Misuse
from chimera_runtime.values.tensors import draw_seed, seed_all

_BEGINNING = UserCode("the beginning of the dataset", MISUSED)
_STATE = UserCode("the state of the dataset", MISUSED)
_NO_ITEM = object()


@dataclass(frozen=True)
class ReadPosition:
    """Where the reading of a stream begins: the epoch, the items of it that come before, and the dataset's state there.

    Without a state these items are read once more, and skipped.
    """

    epoch: int = 0
    items: int = 0
    state: Any = None


@dataclass(frozen=True)
class ReadBatch:
    """A mini-batch of a stream: how many items it has over all copies, and the dataset's state after it."""

    batch: MiniBatch
    items: int
    state: Any

    def pin_memory(self) -> "ReadBatch":
        """The same with the mini-batch in memory that is locked."""
        return ReadBatch(self.batch.pin_memory(), self.items, self.state)


@dataclass(frozen=True)
class EpochEnd:
    """The stream has ended, and begins anew: the next epoch."""


@dataclass
class _CollectedItems:
    """The items of a mini-batch: how many there were, those that this rank uses, by micro-batch, and the state."""

    epoch: int
    start: int
    count: int = 0
    micro_batches: dict[int, list[Any]] = field(default_factory=dict)
    state: Any = None


class IterableReader(IterableDataset[Any]):
    """The mini-batches of an iterable dataset from a point on, epoch after epoch: what a data worker runs.

    An error ends it, and where there are workers is its last element.
    """

    def __init__(self, loading: Loading, share: Share, uses: Uses, drop_last: bool, begin: ReadPosition) -> None:
        self._loading = loading
        self._share = share
        self._uses = uses
        self._drop_last = drop_last
        self._begin = begin
        starts = {micro: share.start(micro) for micro in uses}
        self._micro_at = {start + i: micro for micro, start in starts.items() for i in range(share.micro_batch_size)}

    def __iter__(self) -> Iterator[ReadBatch | EpochEnd | Failure]:
        worker = get_worker_info()
        if worker is None:
            for element in self._elements():
                yield EpochEnd() if isinstance(element, EpochEnd) else self._read(element)
            return
        try:
            for number, element in enumerate(self._elements()):
                if number % worker.num_workers == worker.id:
                    if isinstance(element, EpochEnd):
                        yield element
                    else:
                        read = self._read(element)
                        yield ReadBatch(sendable(read.batch), read.items, read.state)
        except (ModelError, Misuse) as error:
            yield failure(error)

    def _read(self, gathered: _CollectedItems) -> ReadBatch:
        triples = {}
        for micro, items in gathered.micro_batches.items():
            place = gathered.start + self._share.start(micro)
            names = range(place, place + len(items))
            triples[micro] = self._loading.collated(items, gathered.epoch, place, names, self._uses[micro])
        batch = MiniBatch(self._share.held(gathered.count), self._share, triples)
        return ReadBatch(batch, gathered.count, gathered.state)

    def _elements(self) -> Iterator[_CollectedItems | EpochEnd]:
        point = self._begin
        while True:
            yield from self._epoch(point)
            yield EpochEnd()
            point = ReadPosition(point.epoch + 1)

    def _epoch(self, point: ReadPosition) -> Iterator[_CollectedItems]:
        """The mini-batches of an epoch from a point on."""
        items = _Items(self._loading, point)
        while True:
            gathered = _CollectedItems(point.epoch, items.place)
            while gathered.count < self._share.items and items.advance():
                micro = self._micro_at.get(gathered.count)
                if micro is not None:
                    gathered.micro_batches.setdefault(micro, []).append(items.newest)
                gathered.count += 1
            is_whole = gathered.count == self._share.items
            if is_whole or (gathered.count and not self._drop_last):
                gathered.state = items.state()
                yield gathered
            if not is_whole:
                break
        if items.place < (self._share.items if self._drop_last else 1):
            raise Misuse(
                f"the dataset ended after {in_items(items.place)}, and a mini-batch takes B*N*W = {self._share.formula}"
            )


class _Items:
    """The items of an epoch, one after the other."""

    def __init__(self, loading: Loading, point: ReadPosition) -> None:
        self._loading = loading
        self._epoch = point.epoch
        self._dataset = dataset = loading.dataset
        self._length = length_of_stream(dataset)
        self.place = 0
        self.newest: Any = None
        seed_all(draw_seed("item", loading.seed, point.epoch, "begin"))
        with _BEGINNING:
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(point.epoch)
            if point.state is not None and not point.state["of_iterator"]:
                dataset.load_state_dict(point.state["state"])
            self._iterator = iter(dataset)
            if point.state is not None and point.state["of_iterator"]:
                self._iterator.load_state_dict(point.state["state"])
        if point.state is not None:
            self.place = point.items
        while self.place < point.items:
            if not self.advance():
                raise Misuse(
                    f"the dataset ended after {in_items(self.place)}, and training was at item {point.items} of it: is "
                    "it the same one?"
                )

    def advance(self) -> bool:
        """Reads one more item; False at the end."""
        if self.place == self._length:
            return False
        seed_all(draw_seed("item", self._loading.seed, self._epoch, self.place))
        with UserCode(f"item {self.place} of the dataset", MISUSED):
            self.newest = next(self._iterator, _NO_ITEM)
        if self.newest is not _NO_ITEM:
            self.place += 1
        elif self._length is not None:
            raise Misuse(f"the dataset ended after {in_items(self.place)}, and its __len__ says {self._length}")
        return self.newest is not _NO_ITEM

    def state(self) -> Any:
        """That of the iterator, if it has one, or of the dataset; None if neither has."""
        with _STATE:
            for of_iterator, owner in ((True, self._iterator), (False, self._dataset)):
                if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
                    return {"of_iterator": of_iterator, "state": copy.deepcopy(owner.state_dict())}
        return None
