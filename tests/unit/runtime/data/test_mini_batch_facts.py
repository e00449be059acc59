"""Data that a rank is given: facts that ranks with the same batches have the same."""

from typing import Any

import torch

from chimera_runtime.data.feed import EvaluationDataFacts, digests
from chimera_runtime.data.item_order import Share
from chimera_runtime.data.mini_batch import MiniBatch
from chimera_runtime.ranks.agreement import POSITION

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)


def facts(*batches: Any) -> dict[Any, int]:
    given = EvaluationDataFacts(1)
    for batch in batches:
        assert given.note(batch) is batch
    return {key: number for key, (number, _) in given.facts().items()}


def loaded(item: int) -> MiniBatch:
    return MiniBatch(2, Share(1, 2, 1, 0), {}, (0, 0, 6, 0, item))


def test_parts_that_are_there_are_compared_and_none_is_nothing() -> None:
    assert [which for which, _ in digests((X, Y, {"mask": X}))] == [0, 1, 2]
    assert [which for which, _ in digests((None, Y, {}))] == [1]
    assert facts((X, Y)).keys() == {("data", 1, 0), ("data", 1, 1)}
    assert facts((X, None), (X, Y)).keys() == {("data", 1, 0)}, "of the targets only some are known"


def test_other_batches_and_another_order_have_other_facts() -> None:
    assert facts((X, Y), (X + 1, Y)) == facts((X, Y), (X + 1, Y))
    for other in (facts((X, Y)), facts((X + 1, Y), (X, Y)), facts((X, Y), (X + 2, Y))):
        assert facts((X, Y), (X + 1, Y))["data", 1, 0] != other["data", 1, 0]


def test_mini_batches_of_a_loader_are_compared_by_their_positions() -> None:
    assert facts(loaded(0), loaded(2)).keys() == {POSITION}
    assert facts(loaded(0), loaded(2)) == facts(loaded(0), loaded(2)) != facts(loaded(0), loaded(4))


def test_functions_are_not_asked() -> None:
    assert facts(lambda _micro: 1 / 0) == facts(loaded(0), lambda _micro: 1 / 0) == facts() == {}
