"""Micro-batches cut into slices along dimension 1; what has no sequence there is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from chimera_runtime.data.evaluation_batches import evaluation_batches
from chimera_runtime.data.feed import Feed
from chimera_runtime.data.micro_batch_source import Batches
from chimera_runtime.data.mini_batch import MicroBatchParts
from chimera_runtime.errors import Misuse
from tests.unit.runtime.thread_ranks import job

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
