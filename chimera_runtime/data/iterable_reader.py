"""Reads mini-batches of an iterable dataset: every reader reads all items, and collates only those that its rank uses.

A reader is a rank or one of its data workers. The order of items does not depend on the number of copies or data
workers; of K workers each makes every K-th mini-batch. All workers read all items, so slow work belongs in ``collate``:
workers collate at the same time, and only the items that the rank uses.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from chimera_runtime.blame import ModelError, UserCode
from chimera_runtime.data.item_order import Share, length_of_stream
from chimera_runtime.data.mini_batch import Failure, ItemLoading, MiniBatch, Uses, failure, sendable
from chimera_runtime.errors import MISUSED, Misuse
from chimera_runtime.errors import data as mistakes
from chimera_runtime.values.nested import draw_seed, seed_all

_BEGINNING = UserCode("the beginning of the dataset", MISUSED)
_STATE = UserCode("the state of the dataset", MISUSED)
_NO_ITEM = object()


@dataclass(frozen=True)
class ReadPosition:
    """A position in an iterable dataset: behind ``items`` items of the ``epoch``, where the dataset has the ``state``.

    Without a state, reading begins at the start of the epoch and skips these items.
    """

    epoch: int = 0
    items: int = 0
    state: Any = None


@dataclass(frozen=True)
class ReadBatch:
    """A mini-batch of an iterable dataset, the items that it has over all copies, and the dataset's state after it."""

    batch: MiniBatch
    items: int
    state: Any

    def pin_memory(self) -> "ReadBatch":
        """Returns a copy whose mini-batch is in pinned memory."""
        return replace(self, batch=self.batch.pin_memory())


@dataclass(frozen=True)
class EpochEnd:
    """Mark between two mini-batches that were read: an epoch ends here, and the next one begins."""


@dataclass
class _CollectedItems:
    """The items of a mini-batch while they are read: of all copies ``count``, kept are those of this rank."""

    epoch: int
    start: int
    count: int = 0
    micro_batches: dict[int, list[Any]] = field(default_factory=dict)
    state: Any = None


@dataclass(frozen=True, eq=False)
class IterableReader(IterableDataset[Any]):
    """The mini-batches of an iterable dataset from a position on, epoch after epoch; a rank or a data worker reads it.

    An error of the dataset ends the iteration. In a data worker the last element is a `Failure` with the error.
    """

    loading: ItemLoading
    share: Share
    uses: Uses
    drop_last: bool
    begin: ReadPosition

    def __iter__(self) -> Iterator[ReadBatch | EpochEnd | Failure]:
        worker = get_worker_info()
        if worker is None:
            yield from map(self._read, self._elements())
            return
        try:
            for element in map(self._read, islice(self._elements(), worker.id, None, worker.num_workers)):
                yield replace(element, batch=sendable(element.batch)) if isinstance(element, ReadBatch) else element
        except (ModelError, Misuse) as error:
            yield failure(error)

    def _read(self, collected: _CollectedItems | EpochEnd) -> ReadBatch | EpochEnd:
        if isinstance(collected, EpochEnd):
            return collected
        triples = {}
        for micro, items in collected.micro_batches.items():
            place = collected.start + self.share.start(micro)
            names = range(place, place + len(items))
            triples[micro] = self.loading.collated(items, collected.epoch, place, names, self.uses[micro])
        batch = MiniBatch(self.share.items_of_copy(collected.count), self.share, triples)
        return ReadBatch(batch, collected.count, collected.state)

    def _elements(self) -> Iterator[_CollectedItems | EpochEnd]:
        position = self.begin
        while True:
            yield from self._epoch(position)
            yield EpochEnd()
            position = ReadPosition(position.epoch + 1)

    def _epoch(self, position: ReadPosition) -> Iterator[_CollectedItems]:
        items = _Items(self.loading, position)
        starts, size = {self.share.start(micro): micro for micro in self.uses}, self.share.micro_batch_size
        micro_at = {start + i: micro for start, micro in starts.items() for i in range(size)}
        while True:
            # Read the next B*N*W items; remember those that belong to a micro-batch of this rank.
            collected = _CollectedItems(position.epoch, items.place)
            while collected.count < self.share.items and items.advance():
                micro = micro_at.get(collected.count)
                if micro is not None:
                    collected.micro_batches.setdefault(micro, []).append(items.newest)
                collected.count += 1
            # The last mini-batch may have fewer.
            is_whole = collected.count == self.share.items
            if is_whole or (collected.count and not self.drop_last):
                collected.state = items.state()
                yield collected
            if not is_whole:
                break
        if items.place < (self.share.items if self.drop_last else 1):
            raise mistakes.dataset_ended_in_first_mini_batch(items=items.place, formula=self.share.formula)


class _Items:
    def __init__(self, loading: ItemLoading, position: ReadPosition) -> None:
        self._loading = loading
        self._epoch = position.epoch
        self._dataset = dataset = loading.dataset
        self._length = length_of_stream(dataset)
        self.newest: Any = None
        seed_all(draw_seed("item", loading.seed, position.epoch, "begin"))
        with _BEGINNING:
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(position.epoch)
            if position.state is not None and not position.state["of_iterator"]:
                dataset.load_state_dict(position.state["state"])
            self._iterator = iter(dataset)
            if position.state is not None and position.state["of_iterator"]:
                self._iterator.load_state_dict(position.state["state"])
        self.place = 0 if position.state is None else position.items
        while self.place < position.items:
            if not self.advance():
                raise mistakes.dataset_ended_before_checkpoint(items=self.place, place=position.items)

    def advance(self) -> bool:
        if self.place == self._length:
            return False
        seed_all(draw_seed("item", self._loading.seed, self._epoch, self.place))
        with UserCode(f"item {self.place} of the dataset", MISUSED):
            self.newest = next(self._iterator, _NO_ITEM)
        if self.newest is not _NO_ITEM:
            self.place += 1
        elif self._length is not None:
            raise mistakes.dataset_ended_before_its_length(items=self.place, length=self._length)
        return self.newest is not _NO_ITEM

    def state(self) -> Any:
        with _STATE:
            for of_iterator, owner in ((True, self._iterator), (False, self._dataset)):
                if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
                    return {"of_iterator": of_iterator, "state": copy.deepcopy(owner.state_dict())}
        return None
