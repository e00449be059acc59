"""Which item of the dataset goes where, and what is said of a dataset that cannot be used."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from chimera_runtime.batches import Batches
from chimera_runtime.blame import ModelError
from chimera_runtime.errors import Misuse
from tests.unit.runtime.models import model

ITEMS = 26


class Numbers:
    """Item i is the pair (i, -i)."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, number: int) -> tuple[float, float]:
        return float(number), -float(number)


def batches(dataset: Any = None, **changed: int) -> Batches:
    sizes = {"micro_batch_size": 2, "micro_batches": 2, "parts": 1, "copies": 3, "copy": 0, "seed": 7}
    return Batches(Numbers() if dataset is None else dataset, **sizes | changed)


def items(copies: Sequence[Batches], update: int) -> list[int]:
    """The items of an update in order: by copy, by micro-batch, by their place in it."""
    passes = copies[0].micro_batches * copies[0].parts
    return [int(i) for one in copies for micro in range(passes) for i in one.input(update, micro).tolist()]


def test_an_epoch_has_every_item_once_but_for_those_that_do_not_fill_an_update() -> None:
    """26 items, 12 an update: two updates an epoch, each epoch in an order of its own."""
    copies = [batches(copy=copy) for copy in range(3)]
    epochs = [items(copies, update) + items(copies, update + 1) for update in (0, 2)]
    for epoch in epochs:
        assert len(epoch) == 24
        assert set(Counter(epoch).values()) == {1}
    assert epochs[0] != epochs[1]


def test_targets_belong_to_their_inputs() -> None:
    copy = batches(copy=1)
    assert torch.equal(copy.input(1, 1), -copy.target(1, 1))


def test_parts_share_the_items_of_a_micro_batch_in_order() -> None:
    whole, halves = batches(), batches(parts=2)
    for micro in range(2):
        assert whole.input(0, micro).tolist() == [halves.input(0, 2 * micro + part).item() for part in range(2)]


def test_the_seed_alone_decides_the_order() -> None:
    assert items([batches(seed=1)], 0) == items([batches(seed=1)], 0) != items([batches(seed=2)], 0)


def test_micro_batches_counted_from_an_earlier_update_are_the_same() -> None:
    """Over several epochs: those of all updates in a row, for a copy of three, cut in halves."""
    counted = Batches(model().dataset(), 2, 2, 2, 3, 1, 7)
    for micro in range(20):
        update, number = divmod(micro, 4)
        assert torch.equal(counted.input(0, micro), counted.input(update, number))
        assert torch.equal(counted.target(1, micro), counted.target(update + 1, number))


def test_what_an_item_draws_at_random_is_the_same_whoever_loads_it_when() -> None:
    """In an epoch; the next one draws anew."""

    class Noisy(Numbers):
        def __getitem__(self, number: int) -> tuple[Any, Any]:
            return torch.rand(()) + number, torch.rand(())

    first, again = batches(Noisy()), batches(Noisy())
    torch.manual_seed(1)
    second = again.input(1, 0)
    assert torch.equal(first.input(0, 1), again.input(0, 1))
    assert torch.equal(first.input(1, 0), second)
    by_item = {int(x): x % 1 for update in range(4) for x in first.input(update, 0).tolist()}
    assert len(set(by_item.values())) == len(by_item)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (iter([(1, 2)]), "dataset() must return a map-style dataset: one with __len__ and __getitem__"),
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


def test_errors_of_the_dataset_are_the_models() -> None:
    class Broken(Numbers):
        def __getitem__(self, number: int) -> tuple[float, float]:
            raise KeyError(number)

    class Endless(Numbers):
        def __len__(self) -> int:
            raise TypeError("no end")

    with pytest.raises(ModelError, match="an item of the dataset"):
        batches(Broken()).input(0, 0)
    with pytest.raises(ModelError, match="the length of the dataset"):
        batches(Endless()).check()
    with pytest.raises(ModelError, match="default_collate of a micro-batch"):
        batches([(object(), 1)] * 12).input(0, 0)


def test_keyword_arguments_are_those_of_the_same_items() -> None:
    items = [(float(i), -float(i), {"mask": torch.tensor([i, i])}) for i in range(26)]
    copy = batches(items, copy=1)
    assert torch.equal(copy.keywords(1, 1)["mask"][:, 0], copy.input(1, 1))
    assert batches(copy=1).keywords(1, 1) == {}


# Going on elsewhere in the data.


@pytest.mark.parametrize("sizes", [(1, 4, 1, 3), (4, 1, 1, 3), (2, 3, 1, 2), (6, 2, 2, 1), (1, 2, 1, 3), (3, 1, 1, 1)])
def test_other_mini_batches_go_on_with_the_items_that_are_next(sizes: tuple[int, ...]) -> None:
    """From every update, over three epochs of 24 items: B, parts, N and W of which B*N*W is 12, 6 or 3."""
    size, number, parts, count = sizes
    first = [batches(copy=copy) for copy in range(3)]
    others = [Batches(Numbers(), size, number, parts, count, copy, 7) for copy in range(count)]
    larger = 12 // (size * number * count)
    for update in range(6):
        epoch, place = first[0].position(update)
        moved = [other.at(40, epoch, place) for other in others]
        assert [one.position(40) for one in moved] == [(epoch, place)] * count
        seen = [item for later in range(larger) for item in items(moved, 40 + later)]
        assert seen == items(first, update), update


def test_the_items_that_fill_no_update_are_left_out_after_it_went_on_too() -> None:
    """26 items: 26 // 5 = 5 updates an epoch, the first of the next epoch after them."""
    other = Batches(Numbers(), 5, 1, 1, 1, 0, 7).at(3, 1, 20)
    plain = Batches(Numbers(), 5, 1, 1, 1, 0, 7)
    assert [other.position(update) for update in (3, 4, 5)] == [(1, 20), (2, 0), (2, 5)]
    assert other.input(4, 0).tolist() == plain.input(10, 0).tolist()


def test_where_no_update_begins_is_refused_with_the_sizes() -> None:
    with pytest.raises(Misuse) as refused:
        Batches(Numbers(), 2, 2, 1, 2, 0, 7).at(1, 0, 12)
    assert str(refused.value) == (
        "training was at item 12 of the data, and B*N*W = 2*2*2 = 8 does not divide that: choose B, N or W so that it "
        "does"
    )
