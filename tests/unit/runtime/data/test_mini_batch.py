"""Items as micro-batches: what collating makes of them, what is drawn, and what travels between processes."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from chimera_runtime.blame import ModelError, UserCode
from chimera_runtime.data.item_order import Share
from chimera_runtime.data.mini_batch import Failure, ItemLoading, MiniBatch, as_triple, failure, sendable
from chimera_runtime.errors import FAILED, Misuse
from chimera_runtime.values.boundary import KeywordNames, whole
from tests.unit.runtime.datasets import Drawing

SHARE = Share(2, 3, 1, 0)


def test_what_an_item_draws_follows_from_seed_epoch_and_item() -> None:
    loading = ItemLoading(Drawing(), 3)
    (first, second), (again,) = loading.items(1, [4, 5]), loading.items(1, [5])
    assert torch.equal(second[1], again[1])
    others = [first, loading.items(2, [5])[0], ItemLoading(Drawing(), 4).items(1, [5])[0]]
    assert not any(torch.equal(other[1], again[1]) for other in others)


def test_a_collate_gets_the_items_as_they_are_and_draws_by_the_place_of_the_first() -> None:
    def collate(items: list[Any]) -> Any:
        assert items == ["a", "b"]
        return torch.rand(2), torch.ones(2), {"mask": torch.zeros(2)}

    loading = ItemLoading(None, 3, collate)
    triples = [loading.collated(["a", "b"], 0, place, [0, 1]) for place in (4, 4, 6)]
    assert torch.equal(triples[0][0], triples[1][0])
    assert not torch.equal(triples[0][0], triples[2][0])
    assert loading.collated(["a", "b"], 0, 0, [0, 1], frozenset({1}))[::2] == (None, {})


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (torch.ones(2), r"what collate returned is a Tensor, not a pair \(input, target\)"),
        (
            (torch.ones(3), torch.ones(2)),
            "what collate returned: dimension 0 of the input is 3, .*, and there are 2 items$",
        ),
        (
            (torch.ones(2), torch.ones(2), {"mask": torch.ones(1, 2)}),
            "dimension 0 of the keyword argument mask is 1, .*, and there are 2 items; what goes",
        ),
    ],
)
def test_a_collate_that_returns_something_else_is_refused(returned: Any, words: str) -> None:
    with pytest.raises(Misuse, match=words):
        ItemLoading(None, 0, lambda _items: returned).collated([1, 2], 0, 0, [0, 1])


def test_items_have_the_keyword_arguments_of_the_example_whatever_a_rank_uses() -> None:
    names = KeywordNames(frozenset(), frozenset())
    one, other = (1, 2), (1, 2, {"mask": 3})
    for collate in (None, lambda _items: (torch.ones(2), torch.ones(2), {"mask": torch.ones(2)})):
        with pytest.raises(Misuse, match="has the keyword argument mask and the example of the pipeline has none"):
            ItemLoading(None, 0, collate, names=names).collated([one, other], 0, 0, [0, 1], frozenset({0}))
    needed = KeywordNames(frozenset({"mask"}), frozenset({"mask"}))
    with pytest.raises(Misuse, match="item 0 of the dataset has no keyword argument mask"):
        ItemLoading(None, 0, names=needed).collated([one, other], 0, 0, [0, 1])


def test_items_of_one_micro_batch_have_the_same_names() -> None:
    """default_collate takes those of the first item."""
    items = [(1, 2), (1, 2, {"mask": 3})]
    for mixed in (items, items[::-1]):
        with pytest.raises(Misuse, match="of items 0 and 1 of the dataset only one has the keyword argument mask"):
            ItemLoading(None, 0).collated(mixed, 0, 0, [0, 1])


def test_what_is_whole_comes_once_for_all_items_of_a_micro_batch() -> None:
    def items(*tables: Any) -> list[Any]:
        return [(1, 2, {"mask": float(number), "table": table}) for number, table in enumerate(tables)]

    names = KeywordNames(frozenset({"mask", "table"}), frozenset({"table"}), frozenset({"table"}))
    loading, table = ItemLoading(None, 0, names=names), {"of": [torch.arange(3), "text", np.arange(2)]}
    equal = {"of": [torch.arange(3), "text", np.arange(2)]}
    keywords = loading.collated(items(table, equal), 0, 0, [0, 1])[2]
    assert keywords["table"] is table
    assert keywords["mask"].tolist() == [0, 1]
    assert ItemLoading(None, 0).collated([(1, 2, {whole("table"): table})], 0, 0, [0])[2] == {"table": table}
    assert loading.collated(items(table, equal), 0, 0, [0, 1], frozenset({0}))[2] == {}
    for other in ({"of": [torch.arange(4), "text", np.arange(2)]}, {"of": [torch.arange(3), "text", np.ones(2)]}, None):
        with pytest.raises(Misuse, match=r'items 5 and 9 of the dataset differ in table, which whole\("table"\) gives'):
            loading.collated(items(table, other), 0, 0, [5, 9])

    def collate(some: list[Any]) -> Any:
        return torch.ones(2), torch.ones(2), {"mask": torch.ones(2), "table": torch.arange(7)}

    keywords = ItemLoading(None, 0, collate, names=names).collated(items(1, 2), 0, 0, [0, 1])[2]
    assert keywords["table"].tolist() == [*range(7)]


def test_an_item_that_fails_is_named() -> None:
    with pytest.raises(ModelError, match=r"item 31 of the dataset: .*IndexError"):
        ItemLoading([(1, 2)], 0).items(0, [0, 31])
    with pytest.raises(
        ModelError, match=r"default_collate of a micro-batch: .*stack expects each tensor to be equal size"
    ):
        ItemLoading(None, 0).collated([(torch.ones(1), 1), (torch.ones(2), 1)], 0, 0, [0, 1])
    with pytest.raises(ModelError, match=r"collate of a micro-batch: .*ZeroDivisionError"):
        ItemLoading(None, 0, lambda _items: 1 / 0).collated([1], 0, 0, [0])


# What travels.


def test_micro_batches_that_are_alike_travel_as_one_piece_of_memory_and_others_as_they_are() -> None:
    micro_batches = {
        m: ({"x": torch.full((2, 3), float(m))}, torch.arange(2 + (m == 2)), {"names": ["a", str(m)]}) for m in range(3)
    }
    sent = sendable(MiniBatch(6, SHARE, micro_batches))
    inputs = [sent(m)[0]["x"] for m in range(3)]
    assert len({x.untyped_storage().data_ptr() for x in inputs}) == 1
    assert [x[0, 0].item() for x in inputs] == [0, 1, 2]
    assert [len(sent(m)[1]) for m in range(3)] == [2, 2, 3]
    assert [sent(m)[2]["names"][1] for m in range(3)] == ["0", "1", "2"]


def test_what_cannot_be_sent_is_said_where_it_is() -> None:
    """An error in the thread that sends it would be lost, and the rank would wait for ever."""
    with pytest.raises(ModelError, match=r"sending a micro-batch from a data worker: .*pickle"):
        sendable(MiniBatch(2, SHARE, {0: (torch.ones(2), lambda: 1, {})}))
    grown = torch.ones(2, requires_grad=True) * 2
    pickle.dumps(sendable(MiniBatch(2, SHARE, {0: (grown, None, {})})))


def test_an_error_travels_with_its_traceback_whatever_it_is() -> None:
    class Local(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("not to be pickled")

    def decode() -> None:
        raise Local("broken file")

    with pytest.raises(ModelError) as raised, UserCode("item 3 of the dataset", FAILED):
        decode()
    there = pickle.loads(pickle.dumps(failure(raised.value)))
    assert isinstance(there, Failure)
    with pytest.raises(ModelError) as again:
        there.raise_again()
    assert str(again.value) == str(raised.value)
    assert "in decode: Local: broken file" in str(again.value)
    assert 'raise Local("broken file")' in str(again.value.__cause__)
    with pytest.raises(Misuse, match="too few"):
        pickle.loads(pickle.dumps(failure(Misuse("too few")))).raise_again()


@pytest.mark.parametrize(("item", "kind"), [(5, "int"), ((1, 2, 3), "tuple"), (torch.ones(2), "Tensor")])
def test_what_is_no_pair_is_named(item: Any, kind: str) -> None:
    with pytest.raises(Misuse, match=rf"it is a {kind}, not a pair \(input, target\)"):
        as_triple(item, "it")
    assert as_triple((1, 2, {"mask": 3}), "it") == (1, 2, {"mask": 3})


def test_pinning_keeps_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    pinned = MiniBatch(2, SHARE, {0: (torch.zeros(2), "text", {})}, (4, 0)).pin_memory()
    assert pinned(0)[0].tolist() == [1, 1]
    assert (pinned(0)[1:], pinned.items, pinned.position) == (("text", {}), 2, (4, 0))
