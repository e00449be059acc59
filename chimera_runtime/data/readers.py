"""Readers of mini-batches, in a rank or in its data workers; each collates only the items that its rank uses.

`MapReader` loads items of a map-style dataset by their keys. `IterableReader` reads all items of an iterable dataset:
their order does not depend on the number of copies or data workers, and of K workers each makes every K-th mini-batch.
So slow work belongs in ``collate``: workers collate at the same time, and only the items that the rank uses.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from chimera_runtime.blame import ModelError, UserCode
from chimera_runtime.data.item_order import Share, length_of_stream
from chimera_runtime.data.mini_batch import ItemLoading, Triple, Uses, sendable
from chimera_runtime.errors import MISUSED, Misuse
from chimera_runtime.errors import data as mistakes
from chimera_runtime.values.nested import draw_seed, mapped, seed_all

_BEGINNING = UserCode("the beginning of the dataset", MISUSED)
_STATE = UserCode("the state of the dataset", MISUSED)
_NO_ITEM = object()


@dataclass(frozen=True)
class ReadPosition:
    """A position in a dataset: behind ``items`` items of the ``epoch``, where an iterable dataset has the ``state``.

    Without a state, reading an iterable dataset begins at the start of the epoch and skips these items.
    """

    epoch: int = 0
    items: int = 0
    state: Any = None


@dataclass
class ReadTask:
    """A mini-batch to read, which begins at item ``start`` of an epoch and has ``items`` items over all copies.

    ``keys`` has the keys of the items of each micro-batch of this rank; of an iterable dataset these are the places of
    items in the epoch, ``values`` has the items, and ``state`` is that of the dataset after the mini-batch. ``uses``
    and ``share`` are those of this mini-batch, if they are not those of all.
    """

    epoch: int
    start: int
    items: int = 0
    keys: dict[int, list[Any]] = field(default_factory=dict)
    values: dict[int, list[Any]] | None = None
    state: Any = None
    uses: Uses | None = None
    share: Share | None = None


@dataclass(frozen=True)
class ReadBatch:
    """The micro-batches of this rank in a mini-batch that was read; ``items`` and ``state`` are as in `ReadTask`.

    Between two epochs of an iterable dataset there is one without items.
    """

    micro_batches: dict[int, Triple]
    items: int
    state: Any

    def pin_memory(self) -> "ReadBatch":
        """Returns a copy in pinned memory, from which a GPU can copy while it computes."""
        return replace(self, micro_batches=mapped(self.micro_batches, torch.Tensor.pin_memory))


@dataclass(frozen=True, eq=False)
class Reader:
    """Makes mini-batches from tasks. A data worker sends an error in place of the mini-batch."""

    loading: ItemLoading
    share: Share
    uses: Uses

    def read(self, task: ReadTask) -> ReadBatch:
        """Returns the mini-batch of a task, in a data worker as it can be sent."""
        micro_batches = {}
        uses, share = task.uses or self.uses, task.share or self.share
        for micro, keys in task.keys.items():
            items = self.loading.items(task.epoch, keys) if task.values is None else task.values[micro]
            place = task.start + share.start(micro)
            micro_batches[micro] = self.loading.collated(items, task.epoch, place, keys, uses[micro])
        if get_worker_info() is not None:
            micro_batches = sendable(micro_batches)
        return ReadBatch(micro_batches, task.items, task.state)


class MapReader(Reader, Dataset[Any]):
    """The mini-batches of a map-style dataset, each by its task."""

    def __getitem__(self, task: ReadTask) -> ReadBatch | ModelError | Misuse:
        try:
            return self.read(task)
        except (ModelError, Misuse) as error:
            if get_worker_info() is None:
                raise
            return error


@dataclass(frozen=True, eq=False)
class IterableReader(Reader, IterableDataset[Any]):
    """The mini-batches of an iterable dataset from a position on, epoch after epoch; an error ends the iteration."""

    drop_last: bool
    begin: ReadPosition

    def __iter__(self) -> Iterator[ReadBatch | ModelError | Misuse]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        try:
            yield from map(self.read, islice(self._tasks(), first, None, step))
        except (ModelError, Misuse) as error:
            if worker is None:
                raise
            yield error

    def _tasks(self) -> Iterator[ReadTask]:
        position = self.begin
        while True:
            yield from self._epoch(position)
            position = ReadPosition(position.epoch + 1)
            yield ReadTask(position.epoch, 0)

    def _epoch(self, position: ReadPosition) -> Iterator[ReadTask]:
        items = _Items(self.loading, position)
        starts, size = {self.share.start(micro): micro for micro in self.uses}, self.share.micro_batch_size
        micro_at = {start + i: micro for start, micro in starts.items() for i in range(size)}
        while True:
            # Read the next B*N*W items; remember those that belong to a micro-batch of this rank.
            values: dict[int, list[Any]] = {}
            task = ReadTask(position.epoch, items.place, values=values)
            while task.items < self.share.items and items.advance():
                micro = micro_at.get(task.items)
                if micro is not None:
                    task.keys.setdefault(micro, []).append(items.place - 1)
                    values.setdefault(micro, []).append(items.newest)
                task.items += 1
            # The last mini-batch may have fewer.
            is_whole = task.items == self.share.items
            if is_whole or (task.items and not self.drop_last):
                task.state = items.state()
                yield task
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
