"""Datasets whose items tell which they are, and what they have drawn."""

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import IterableDataset

from chimera_runtime.blame import Located
from chimera_runtime.data.item_order import ItemOrder, Share
from chimera_runtime.data.loader import DataWorkers, Loader, ReaderMessages
from chimera_runtime.data.mini_batch import ALL, ItemLoading, MiniBatch
from chimera_runtime.data.readers import ReadBatch

ITEMS = 26


def drawn(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair (i, what torch, Python and NumPy draw for it)."""
    return torch.tensor(float(number)), torch.tensor([torch.rand(()).item(), random.random(), numpy.random.rand()])


class Drawing:
    """Map-style; ``asked`` are the items that were loaded in this process."""

    def __init__(self, items: int = ITEMS) -> None:
        self.items = items
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(number)
        return drawn(number)


class Flowing(IterableDataset[Any]):
    """Iterable, of so many items in their order; ``read`` are those that were read in this process."""

    def __init__(self, items: int = ITEMS) -> None:
        self.items = items
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.items):
            self.read.append(number)
            yield drawn(number)


class Sized(Flowing):
    """Iterable, and says beforehand how many items there are."""

    def __init__(self, items: int = ITEMS, said: int | None = None) -> None:
        super().__init__(items)
        self.said = items if said is None else said

    def __len__(self) -> int:
        return self.said


class Stateful(Flowing):
    """Goes on by its own state: the number of the next item."""

    def __init__(self, items: int = ITEMS) -> None:
        super().__init__(items)
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < self.items:
            self.read.append(self.next)
            self.next += 1
            yield drawn(self.next - 1)
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class StatefulIterator(Flowing):
    """The state is that of what __iter__ returns."""

    class Iterator:
        def __init__(self, items: int, read: list[int]) -> None:
            self.items, self.read, self.next = items, read, 0

        def __iter__(self) -> "StatefulIterator.Iterator":
            return self

        def __next__(self) -> Any:
            if self.next == self.items:
                raise StopIteration
            self.read.append(self.next)
            self.next += 1
            return drawn(self.next - 1)

        def state_dict(self) -> dict[str, Any]:
            return {"next": self.next}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.next = state["next"]

    def __iter__(self) -> Any:
        return self.Iterator(self.items, self.read)


def loader(
    world: Any,
    dataset: Any,
    size: int = 2,
    micro_batches: int = 2,
    copies: int = 1,
    copy: int = 0,
    *,
    uses: Any = None,
    readers: frozenset[int] = frozenset({0}),
    shuffle: bool = True,
    sampler: Any = None,
    collate: Any = None,
    workers: DataWorkers | int = 0,
    drop_last: bool = True,
    seed: int = 7,
) -> Loader:
    """A loader as `Pipeline.loader` makes it; by default all parts are used."""
    return Loader(
        ItemLoading(dataset, seed, collate),
        Share(size, micro_batches, copies, copy),
        dict.fromkeys(range(micro_batches), ALL) if uses is None else uses,
        ItemOrder(dataset, seed, shuffle, sampler),
        ReaderMessages(world.control_group, readers, 1, deque()),
        Located(0, 0, str),
        DataWorkers(workers) if isinstance(workers, int) else workers,
        drop_last,
    )


def numbers(batch: MiniBatch | ReadBatch) -> list[int]:
    """The items of a mini-batch that were loaded, micro-batch by micro-batch."""
    return [int(x) for micro in sorted(batch.micro_batches) for x in batch.micro_batches[micro][0].tolist()]


def draws(batch: MiniBatch) -> dict[int, list[float]]:
    """The random numbers of each item."""
    rows = [row for micro in sorted(batch.micro_batches) for row in batch(micro)[1].tolist()]
    return dict(zip(numbers(batch), rows, strict=True))
