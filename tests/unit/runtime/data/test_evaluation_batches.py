"""Batches of an evaluation as rounds of micro-batches of any size."""

from typing import Any

import pytest
import torch

from chimera_runtime.blame import ModelError
from chimera_runtime.data.evaluation_batches import evaluation_batches
from chimera_runtime.data.item_order import Share
from chimera_runtime.data.mini_batch import MiniBatch
from chimera_runtime.errors import Misuse
from chimera_runtime.values.boundary import KeywordNames
from tests.unit.runtime.thread_ranks import job


@pytest.mark.parametrize(
    ("items", "sizes"),
    [
        (8, [(2, 2, 2, 2)]),
        (7, [(2, 2, 2, 1)]),
        (3, [(2, 1, 0, 0)]),
        (1, [(1, 0, 0, 0)]),
        (17, [(2, 2, 2, 2), (2, 2, 2, 2), (1, 0, 0, 0)]),
    ],
)
def test_the_last_micro_batches_of_a_batch_hold_what_is_left(items: int, sizes: list[tuple[int, ...]]) -> None:
    numbers = torch.arange(items)
    made = list(evaluation_batches(job(evaluated=4), 2, ({"x": numbers}, numbers)))
    assert [tuple(of.sizes) for of in made] == sizes
    seen = [of.load(micro) for of in made for micro, size in enumerate(of.sizes) if size]
    assert [n for inputs, *_ in seen for n in inputs["x"].tolist()] == numbers.tolist()
    assert [n for _, target, _ in seen for n in target.tolist()] == numbers.tolist()


def test_parts_of_micro_batches_are_counted_like_micro_batches() -> None:
    numbers = torch.arange(7)
    (made,) = evaluation_batches(job(evaluated=2, parts=2), 4, (numbers, numbers))
    assert [made.load(micro)[0].tolist() for micro in range(4)] == [[0, 1], [2, 3], [4, 5], [6]]


def test_a_function_gives_whole_micro_batches_and_is_asked_for_one_at_a_time() -> None:
    asked: list[int] = []

    def load(micro: int) -> Any:
        asked.append(micro)
        return torch.arange(4) + 10 * micro, torch.zeros(4)

    (made,) = evaluation_batches(job(evaluated=2, parts=2), 4, load)
    assert made.sizes == (2, 2, 2, 2)
    assert made.load(3)[0].tolist() == [12, 13]
    assert asked == [1]
    (made,) = evaluation_batches(job(evaluated=2), 3, load)
    with pytest.raises(Misuse, match="micro-batch 1 of an evaluation: dimension 0 of its tensors is 4, and was 3"):
        made.load(1)

    def fail(_micro: int) -> Any:
        raise KeyError("gone")

    (made,) = evaluation_batches(job(evaluated=2), 3, fail)
    with pytest.raises(ModelError, match="the function that gives the micro-batches of an evaluation"):
        made.load(0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.zeros(3), "is a Tensor, not a pair"),
        ((torch.zeros(3), torch.zeros(4)), "dimension 0 of the target is 4, .*, and the input has 3"),
        ((1, 2), "has no tensor"),
        ((torch.zeros(0, 3), torch.zeros(0)), "has no item"),
    ],
)
def test_what_is_no_batch_is_refused(given: Any, words: str) -> None:
    with pytest.raises(Misuse, match=words):
        list(evaluation_batches(job(), 2, given))


def test_what_a_loader_gives_is_a_round_of_the_micro_batches_that_it_has() -> None:
    """7 items in micro-batches of 4, each cut in two, of which this rank uses the second; a round may have more."""
    second = torch.arange(4, 7), None, {"mask": torch.arange(4, 7) > 5}
    (made,) = evaluation_batches(job(evaluated=3, parts=2), 4, MiniBatch(7, Share(4, 2, 1, 0), {1: second}))
    assert made.sizes == (2, 2, 2, 1, 0, 0)
    assert [made.load(micro)[0].tolist() for micro in (2, 3)] == [[4, 5], [6]]
    assert made.load(3)[1] is None
    assert made.load(3)[2]["mask"].tolist() == [True]


def test_a_batch_of_one_micro_batch_is_not_cut_and_a_larger_one_has_to_be() -> None:
    names = ["a", "b", "c"]
    (made,) = evaluation_batches(job(), 2, (torch.zeros(2), None, {"names": names[:2]}))
    assert made.load(0)[2] == {"names": ["a", "b"]}
    with pytest.raises(Misuse, match=r"a batch of an evaluation: the keyword argument names is a list of 3"):
        list(evaluation_batches(job(), 2, (torch.zeros(3), None, {"names": names})))


def test_names_that_the_example_lacks_are_refused_in_every_form() -> None:
    known = KeywordNames(frozenset({"mask"}), frozenset({"mask"}))
    triple = torch.zeros(2), None, {"bias": torch.zeros(2)}
    for batch in (triple, lambda _micro: triple, MiniBatch(2, Share(2, 1, 1, 0), {0: triple})):
        with pytest.raises(Misuse, match="has the keyword argument bias and the example of the pipeline has none"):
            next(evaluation_batches(job(), 2, batch, known)).load(0)
