"""An iterable dataset as mini-batches, in one process; test_loader.py has it in several, and resumed."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from chimera_runtime.blame import ModelError
from chimera_runtime.data.item_order import Share
from chimera_runtime.data.iterable_reader import EpochEnd, IterableReader, ReadBatch, ReadPosition
from chimera_runtime.data.mini_batch import ItemLoading
from chimera_runtime.errors import Misuse
from tests.unit.runtime.datasets import Flowing, Sized, Stateful, numbers

SHARE = Share(2, 2, 2, 1)


def stream(dataset: Any, begin: ReadPosition | None = None, **changed: Any) -> Iterator[Any]:
    given = {"uses": {1: frozenset({0})}, "drop_last": True, "collate": None} | changed
    loading = ItemLoading(dataset, 0, given["collate"])
    return iter(IterableReader(loading, SHARE, given["uses"], given["drop_last"], begin or ReadPosition()))


def test_all_is_read_and_what_is_used_is_collated_epoch_after_epoch() -> None:
    """Items of the second micro-batch of the second copy, in mini-batches of 8."""
    collated = []

    def collate(items: list[Any]) -> Any:
        collated.extend(int(x) for x, _ in items)
        return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])

    dataset = Flowing(20)
    elements = [*islice(stream(dataset, collate=collate), 4)]
    assert [type(element) for element in elements] == [ReadBatch, ReadBatch, EpochEnd, ReadBatch]
    assert [numbers(read.batch) for read in elements if isinstance(read, ReadBatch)] == [[6, 7], [14, 15], [6, 7]]
    assert [(read.items, read.batch.items) for read in elements if isinstance(read, ReadBatch)] == [(8, 4)] * 3
    assert collated == [6, 7, 14, 15, 6, 7]
    assert dataset.read == [*range(20), *range(8)]


def test_the_dataset_is_told_the_epoch() -> None:
    class Turning(Flowing):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            yield from ((torch.tensor(100.0 * self.epoch + number), 0) for number in range(8))

    reads = [read for read in islice(stream(Turning(), ReadPosition(3)), 3) if isinstance(read, ReadBatch)]
    assert [numbers(read.batch) for read in reads] == [[306, 307], [406, 407]]


def test_a_state_is_that_after_the_mini_batch_and_no_view_of_it() -> None:
    first, second = islice(stream(Stateful()), 2)
    assert [read.state for read in (first, second)] == [{"of_iterator": False, "state": {"next": n}} for n in (8, 16)]
    dataset = Stateful()
    (again,) = islice(stream(dataset, ReadPosition(0, 8, first.state)), 1)
    assert numbers(again.batch) == numbers(second.batch) == [14, 15]
    assert dataset.read == [*range(8, 16)]


def test_a_length_ends_the_reading_though_more_would_come() -> None:
    dataset = Sized(30, said=17)
    elements = [*islice(stream(dataset), 3)]
    assert [type(element) for element in elements] == [ReadBatch, ReadBatch, EpochEnd]
    assert dataset.read == [*range(17)]


def test_an_error_names_the_item_and_is_the_datasets() -> None:
    class Failing(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from [(1.0, 1.0)] * 3
            raise ConnectionError("reset by peer")

    with pytest.raises(ModelError, match=r"item 3 of the dataset: .*ConnectionError: reset by peer"):
        next(stream(Failing()))

    class Unopened(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise FileNotFoundError("shard-0")

    with pytest.raises(ModelError, match=r"the beginning of the dataset: .*FileNotFoundError: shard-0"):
        next(stream(Unopened()))


def test_a_stream_that_is_too_short_is_refused_with_what_a_mini_batch_takes() -> None:
    words = r"the dataset ended after 7 items, and a mini-batch takes B\*N\*W = 2\*2\*2 = 8"
    with pytest.raises(Misuse, match=words):
        next(stream(Flowing(7)))
    (read, end) = islice(stream(Flowing(7), drop_last=False), 2)
    assert (read.items, read.batch.items, numbers(read.batch)) == (7, 3, [6])
    assert end == EpochEnd()
    with pytest.raises(Misuse, match="the dataset ended after 0 items"):
        next(stream(Flowing(0), drop_last=False))
