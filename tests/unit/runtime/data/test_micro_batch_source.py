"""Micro-batches of a dataset by their numbers, and the refusal of datasets that cannot be used.

That they are those of a loader, and of the reference of a check, is tested in test_loader.py and test_reference.py.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from chimera_runtime.blame import ModelError
from chimera_runtime.data.micro_batch_source import Batches
from chimera_runtime.errors import Misuse
from tests.unit.runtime.datasets import Flowing, Sized
from tests.unit.runtime.models import model

ITEMS = 26


class Numbers:
    """Item i is the pair (i, -i)."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, number: int) -> tuple[float, float]:
        return float(number), -float(number)


def batches(dataset: Any = None, **changed: Any) -> Batches:
    sizes: dict[str, Any] = {"micro_batch_size": 2, "micro_batches": 2, "parts": 1, "copies": 3, "copy": 0, "seed": 7}
    return Batches(Numbers() if dataset is None else dataset, **sizes | changed)


def items(copies: Sequence[Batches], update: int) -> list[int]:
    """The items of an update in order: by copy, by micro-batch, by their place in it."""
    passes = copies[0].micro_batches * copies[0].parts
    return [int(i) for one in copies for micro in range(passes) for i in one.input(update, micro).tolist()]


def test_micro_batches_counted_from_an_earlier_update_are_the_same() -> None:
    """Items of all updates of several epochs in a row, for one of three copies, with micro-batches cut in halves."""
    counted = Batches(model().dataset(), 2, 2, 2, 3, 1, 7)
    for micro in range(20):
        update, number = divmod(micro, 4)
        assert torch.equal(counted.input(0, micro), counted.input(update, number))
        assert torch.equal(counted.target(1, micro), counted.target(update + 1, number))


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (iter([(1, 2)]), "the dataset, of type list_iterator, is none: a map-style one has __len__ and __getitem__"),
        (Sized(3), "the dataset has 3 items and one update takes B*N*W = 2*2*3 = 12; use a larger dataset"),
        ([(1, 2)], "the dataset has 1 item and one update takes B*N*W = 2*2*3 = 12; use a larger dataset"),
        ([(1, 2)] * 11, "the dataset has 11 items and one update takes"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused_with_the_reason(dataset: Any, words: str) -> None:
    with pytest.raises(Misuse) as refused:
        batches(dataset).check()
    assert words in str(refused.value)


def test_a_dataset_that_just_suffices_passes() -> None:
    batches([(1, 2)] * 12).check()


@pytest.mark.parametrize(("item", "kind"), [(5, "int"), ((1, 2, 3), "tuple"), (torch.ones(2), "Tensor")])
def test_an_item_that_is_no_pair_is_named(item: Any, kind: str) -> None:
    with pytest.raises(Misuse, match=rf"item \d+ of the dataset is a {kind}, not a pair \(input, target\)"):
        batches([item] * 12).input(0, 0)


def test_an_error_of_the_length_of_the_dataset_is_the_models() -> None:
    class Endless(Numbers):
        def __len__(self) -> int:
            raise TypeError("no end")

    with pytest.raises(ModelError, match="the length of the dataset"):
        batches(Endless()).check()


def test_an_iterable_dataset_comes_in_its_order_and_is_read_once() -> None:
    """26 items, 12 an update: two updates an epoch; a check asks for updates in any order."""
    dataset = Flowing()
    copies = [batches(dataset, copy=copy) for copy in range(3)]
    assert [items(copies, update) for update in (1, 0, 2)] == [[*range(12, 24)], [*range(12)], [*range(12)]]
    alone = batches(Flowing())
    alone.check()
    for micro in (0, 1, 0):
        alone.input(1, micro)
        alone.target(0, micro)
    assert alone.dataset.read == [*range(24)]


def test_a_sampler_decides_the_order_of_a_map_style_dataset_alone() -> None:
    chosen = batches(sampler=[*range(25, 1, -1)])
    chosen.check()
    assert items([batches(sampler=chosen.sampler, copy=copy) for copy in range(3)], 1) == [*range(13, 1, -1)]
    with pytest.raises(Misuse, match="the dataset has 3 items and one update takes"):
        batches(sampler=[1, 2, 3]).check()
    with pytest.raises(Misuse, match=r"a sampler is for a map-style dataset; this one is iterable .* leave that out"):
        batches(Flowing(), sampler=[1, 2, 3]).check()
