"""The items of a copy in a mini-batch, the order of a dataset, and the kinds of datasets."""

from typing import Any

import pytest
import torch

from chimera_runtime.blame import ModelError
from chimera_runtime.data.item_order import (
    ItemOrder,
    Share,
    is_stream,
    length_of_stream,
    require_enough,
)
from chimera_runtime.errors import Misuse
from chimera_runtime.errors.data import items_text, order_of_iterable
from tests.unit.runtime.datasets import Drawing, Flowing, Sized


def test_item_j_goes_to_copy_j_over_bn_and_there_to_micro_batch_j_over_b() -> None:
    """B = 3, N = 2, W = 4: each item has one place."""
    places = {}
    for copy in range(4):
        share = Share(3, 2, 4, copy)
        assert (share.items, share.formula) == (24, "3*2*4 = 24")
        places |= {share.start(micro) + i: (copy, micro) for micro in range(2) for i in range(3)}
    assert places == {j: (j // 6, j // 3 % 2) for j in range(24)}


@pytest.mark.parametrize("items", range(25))
def test_of_fewer_items_the_first_copies_have_theirs(items: int) -> None:
    assert [Share(3, 2, 4, copy).items_of_copy(items) for copy in range(4)] == [
        len([j for j in range(items) if j // 6 == copy]) for copy in range(4)
    ]


def test_the_seed_and_the_epoch_alone_decide_the_order() -> None:
    orders = [ItemOrder(Drawing(), seed) for seed in (1, 1, 2)]
    torch.manual_seed(5)
    keys = [order.keys(epoch, 0, 26) for order in orders for epoch in range(3)]
    assert all(sorted(of_epoch) == [*range(26)] for of_epoch in keys)
    assert keys[0:3] == keys[3:6]
    assert len({*map(tuple, keys)}) == 6
    assert orders[0].keys(0, 3, 9) == keys[0][3:9], "also after other epochs"
    assert ItemOrder(Drawing(), 1, shuffle=False).keys(4, 3, 9) == [3, 4, 5, 6, 7, 8]


def test_an_error_of_a_sampler_is_its_authors() -> None:
    class Failing:
        def __iter__(self) -> Any:
            raise KeyError("no weights")

    with pytest.raises(ModelError, match=r"the sampler: .*KeyError: 'no weights'"):
        ItemOrder(Drawing(), 1, sampler=Failing()).count(0)


def test_a_dataset_is_map_style_or_iterable() -> None:
    class Iterable:
        def __iter__(self) -> Any:
            return iter(())

    assert [is_stream(data) for data in (Drawing(), [1], Flowing(), Sized(), Iterable())] == [False] * 2 + [True] * 3
    assert [length_of_stream(data) for data in (Flowing(), Sized(), Iterable())] == [None, 26, None]
    for data in (5, iter([1])):
        with pytest.raises(Misuse, match="a map-style one has __len__ and __getitem__"):
            is_stream(data)


def test_messages_count_items_in_words() -> None:
    assert [items_text(count) for count in (0, 1, 2)] == ["0 items", "1 item", "2 items"]
    require_enough(24, Share(3, 2, 4, 0))
    with pytest.raises(Misuse, match=r"the dataset has 1 item and one update takes B\*N\*W = 3\*2\*4 = 24"):
        require_enough(1, Share(3, 2, 4, 0))
    assert str(order_of_iterable(name="shuffle=True")).startswith("shuffle=True is for a map-style dataset")
