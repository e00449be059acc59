"""Items as micro-batches: what collating makes of them, what is drawn, and what travels between processes."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from chimera_runtime.blame import ModelError, UserCode
from chimera_runtime.data.evaluation_batches import evaluation_batches
from chimera_runtime.data.feed import Feed
from chimera_runtime.data.item_order import (
    ItemOrder,
    Share,
    is_stream,
    length_of_stream,
)
from chimera_runtime.data.micro_batch_source import Batches
from chimera_runtime.data.mini_batch import (
    ItemLoading,
    MicroBatchParts,
    sendable,
)
from chimera_runtime.data.readers import ReadBatch
from chimera_runtime.errors import FAILED, Misuse
from chimera_runtime.errors.data import order_of_iterable
from chimera_runtime.values.boundary import KeywordNames, whole
from tests.unit.runtime.datasets import Drawing, Flowing, Sized
from tests.unit.runtime.thread_ranks import job

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
    sent = sendable(micro_batches)
    inputs = [sent[m][0]["x"] for m in range(3)]
    assert len({x.untyped_storage().data_ptr() for x in inputs}) == 1
    assert [x[0, 0].item() for x in inputs] == [0, 1, 2]
    assert [len(sent[m][1]) for m in range(3)] == [2, 2, 3]
    assert [sent[m][2]["names"][1] for m in range(3)] == ["0", "1", "2"]


def test_what_cannot_be_sent_is_said_where_it_is() -> None:
    """An error in the thread that sends it would be lost, and the rank would wait for ever."""
    with pytest.raises(ModelError, match=r"sending a micro-batch from a data worker: .*pickle"):
        sendable({0: (torch.ones(2), lambda: 1, {})})
    grown = torch.ones(2, requires_grad=True) * 2
    pickle.dumps(sendable({0: (grown, None, {})}))


def test_an_error_travels_with_its_traceback_whatever_it_is() -> None:
    class Local(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("not to be pickled")

    def decode() -> None:
        raise Local("broken file")

    with pytest.raises(ModelError) as raised, UserCode("item 3 of the dataset", FAILED):
        decode()
    there = pickle.loads(pickle.dumps(raised.value))
    assert isinstance(there, ModelError)
    assert str(there) == str(raised.value)
    assert "in decode: Local: broken file" in str(there)
    assert 'raise Local("broken file")' in str(there.__cause__)
    assert str(pickle.loads(pickle.dumps(Misuse("too few")))) == "too few"


def test_pinning_keeps_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    pinned = ReadBatch({0: (torch.zeros(2), "text", {})}, 2, "a state").pin_memory()
    assert pinned.micro_batches[0][0].tolist() == [1, 1]
    assert (pinned.micro_batches[0][1:], pinned.items, pinned.state) == (("text", {}), 2, "a state")


# Micro-batches cut into slices along dimension 1; what has no sequence there is refused.


B, N, K, LENGTH = 2, 2, 3, 6
X = torch.arange(N * B * LENGTH).reshape(N * B, LENGTH)
KEYWORDS = {"mask": {"of": X + 200}, "item": torch.arange(N * B), "flag": True}
SLICED = job(micro_batches=N, parts=K, slices=K, evaluated=N)


def pair(micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    return X[micro * B : (micro + 1) * B], X[micro * B : (micro + 1) * B] + 100


def test_slices_together_are_the_micro_batch_however_it_is_given() -> None:
    whole, function = Feed(SLICED, B), Feed(SLICED, B)
    whole.put(0, (X, X + 100, KEYWORDS))
    function.put(0, pair)
    for micro in range(N):
        rows = slice(micro * B, (micro + 1) * B)
        for source in (whole, function):
            numbers = range(micro * K, (micro + 1) * K)
            assert torch.equal(torch.cat([source.input(0, n) for n in numbers], 1), X[rows])
            assert torch.equal(torch.cat([source.target(0, n) for n in numbers], 1), X[rows] + 100)
            assert all(source.input(0, n).is_contiguous() for n in numbers)
        keywords = [whole.keywords(0, n) for n in range(micro * K, (micro + 1) * K)]
        assert torch.equal(torch.cat([k["mask"]["of"] for k in keywords], 1), X[rows] + 200)
        assert all(torch.equal(k["item"], torch.arange(N * B)[rows]) for k in keywords)
        assert all(k["flag"] for k in keywords)


def test_a_model_file_cuts_slices_in_its_own_way() -> None:
    """Here along dimension 2, and values of another kind not at all."""

    def cut_slice(value: Any, which: str, number: int, slices: int) -> Any:
        return {"of": number} if which == "keywords" else value.chunk(slices, 2)[number]

    deep = X.unflatten(1, (1, LENGTH))
    dataset = [(row, row, {}) for row in deep]
    feed, batches = Feed(SLICED, B), Batches(dataset, B, N, K, 1, 0, 0, slices=K, cut_slice=cut_slice)
    feed.put_example(batches)
    feed.put(1, (deep, deep, KEYWORDS))
    (evaluated,) = evaluation_batches(SLICED, B, (deep, deep), cut_slice=cut_slice)
    for number in range(N * K):
        part = deep[number // K * B :][:B, :, number % K * 2 :][:, :, :2]
        assert torch.equal(feed.target(1, number), part)
        assert feed.keywords(1, number) == evaluated.load(number)[2] == {"of": number % K}
        assert torch.equal(evaluated.load(number)[0], part)
        assert sorted(batches.input(0, number).flatten() % LENGTH // 2) == [number % K] * 2 * B


def test_slices_of_unequal_lengths_are_cut_at_the_nearest_items() -> None:
    """Six items in proportion to 4, 1, 1; the model file's function gets the same bounds."""
    unequal = replace(SLICED, lengths=(4, 1, 1))

    def cut_slice(value: Any, which: str, number: int, slices: int, bounds: Any = None) -> Any:
        return (bounds(LENGTH), which, number, slices)

    feed, own = Feed(unequal, B), Feed(unequal, B, cut_slice=cut_slice)
    for one in (feed, own):
        one.put(0, (X, X + 100, {}))
    assert [feed.input(0, n).tolist() for n in range(K)] == [X[:B, a:b].tolist() for a, b in ((0, 4), (4, 5), (5, 6))]
    assert [own.target(0, n) for n in range(K)] == [
        ((a, b), "target", n, K) for n, (a, b) in enumerate(((0, 4), (4, 5), (5, 6)))
    ]
    (batch,) = evaluation_batches(unequal, B, (X, X))
    assert [batch.load(n)[0].size(1) for n in range(K)] == [4, 1, 1]


def test_what_unequal_slices_need_is_said() -> None:
    parts = MicroBatchParts(B, K, K, lengths=(4, 1, 1))
    parts.require((X[:, :5], X[:, :5], {}), "a batch")  # 3 does not divide 5
    with pytest.raises(Misuse, match="a batch: dimension 1 is 2, and each of 3 slices needs an item"):
        parts.require((X[:, :2], X[:, :2], {}), "a batch")
    with pytest.raises(Misuse, match="cut_slice of the model file takes no bounds"):
        replace(parts, cut_slice=lambda value, which, number, slices: value).require((X, X, {}), "a batch")


@pytest.mark.parametrize("items", [N * B, N * B - 1, 1])
def test_an_evaluation_cuts_the_items_that_there_are(items: int) -> None:
    (batch,) = evaluation_batches(SLICED, B, (X[:items], X[:items] + 100))
    sizes = [max(0, min(B, items - B * micro)) for micro in range(N)]
    assert [*batch.sizes] == [size for size in sizes for _ in range(K)]
    for micro, size in enumerate(sizes):
        if size:
            loaded = [batch.load(n) for n in range(micro * K, (micro + 1) * K)]
            assert torch.equal(torch.cat([inputs for inputs, *_ in loaded], 1), X[micro * B : micro * B + size])


@pytest.mark.parametrize(
    ("triple", "said"),
    [
        ((X[:, :5], X[:, :5], {}), "a batch: dimension 1 is 5, and slices of equal lengths need a multiple of .* 3"),
        ((X, X[:, :3], {}), r"dimension 1 is 6 in the input and 3 in the target; slices are cut along dimension 1"),
        ((X, X, {"mask": X[:, :3]}), r"dimension 1 is 6 in the input and 3 in the keyword argument mask"),
        ((X, X[:, 0], {}), r"the target is a tensor of shape \(4,\), which cannot be cut into slices"),
        (({"text": "a"}, X, {}), r"the input\['text'\] is no tensor, which cannot be cut into slices"),
    ],
)
def test_what_cannot_be_cut_into_slices_is_refused(triple: Any, said: str) -> None:
    with pytest.raises(Misuse, match=said):
        MicroBatchParts(B, K, K).require(triple, "a batch")


# The items of a copy in a mini-batch, the order of a dataset, and the kinds of datasets.


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


def test_the_message_that_the_pipeline_raises_for_an_order_of_an_iterable_dataset() -> None:
    assert str(order_of_iterable(name="shuffle=True")).startswith("shuffle=True is for a map-style dataset")
