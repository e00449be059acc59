"""The split of layers that is chosen is the best of all that there are, with and without a limit on memory."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera_ir.profile.balance import balanced

Case = tuple[list[int], list[int], list[int], list[list[int]], list[int]]
"""Seconds and bytes of layers, what stages multiply bytes by, their workers, and the bytes of each worker."""


def every(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """The first layers of the stages, for every way to cut the layers into so many."""
    return ((0, *rest) for rest in combinations(range(1, layers), stages - 1))


def parts(values: Sequence[float], split: Sequence[int]) -> list[Sequence[float]]:
    return [values[first:end] for first, end in zip(split, (*split[1:], len(values)), strict=True)]


def slowest(seconds: Sequence[float], split: Sequence[int]) -> float:
    return max(map(sum, parts(seconds, split)))


def placed(stages: int) -> st.SearchStrategy[list[list[int]]]:
    """Where stages may be: each on a worker of its own, on two as in Chimera, or several on one worker."""
    alone = [[stage] for stage in range(stages)]
    both = [sorted({stage, stages - 1 - stage}) for stage in range(stages)]
    in_turns = [[stage % 2] for stage in range(stages)]
    return st.sampled_from([alone, both, in_turns])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers = draw(st.integers(1, 8))
    stages = draw(st.integers(1, layers))
    seconds, sizes = (draw(st.lists(st.integers(0, 9), min_size=layers, max_size=layers)) for _ in range(2))
    factors = draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    workers = draw(placed(stages))
    count = 1 + max(worker for held in workers for worker in held)
    return seconds, sizes, factors, workers, draw(st.lists(st.integers(0, 120), min_size=count, max_size=count))


def fits(case: Case, split: Sequence[int]) -> bool:
    _, sizes, factors, workers, available = case
    used: Counter[int] = Counter()
    for factor, held, part in zip(factors, workers, parts(sizes, split), strict=True):
        used.update(dict.fromkeys(held, factor * int(sum(part))))
    return all(size <= available[worker] for worker, size in used.items())


@given(cases())
def test_no_split_has_a_faster_slowest_stage(
    case: tuple[list[int], list[int], list[int], list[list[int]], list[int]],
) -> None:
    seconds, _, factors, workers, _ = case
    found = balanced(seconds, workers)
    assert found in set(every(len(seconds), len(factors)))
    assert slowest(seconds, found) == min(slowest(seconds, split) for split in every(len(seconds), len(factors)))


@given(cases())
def test_no_split_that_fits_has_a_faster_slowest_stage(case: Case) -> None:
    seconds, sizes, factors, workers, available = case

    found = balanced(seconds, workers, lambda stage, first, end: factors[stage] * sum(sizes[first:end]), available)
    fitting = [slowest(seconds, split) for split in every(len(seconds), len(factors)) if fits(case, split)]
    assert (found is None) == (not fitting)
    if found is not None:
        assert fits(case, found)
        assert slowest(seconds, found) == min(fitting)


@given(cases(), st.data())
def test_no_split_that_fits_and_begins_stages_with_given_layers_has_a_faster_slowest_stage(
    case: Case, data: st.DataObject
) -> None:
    seconds, sizes, factors, workers, available = case
    layers, stages = len(seconds), len(factors)
    example = data.draw(st.sampled_from([*every(layers, stages)]))
    fixed = sorted(data.draw(st.sets(st.integers(1, stages - 1)))) if stages > 1 else []
    begins = [(stage, example[stage]) for stage in fixed]

    def needed(stage: int, first: int, end: int) -> int:
        return factors[stage] * sum(sizes[first:end])

    found = balanced(seconds, workers, needed, available, begins=begins)
    among = [split for split in every(layers, stages) if all(split[stage] == layer for stage, layer in begins)]
    fitting = [split for split in among if fits(case, split)]
    assert (found is None) == (not fitting)
    if found is not None:
        assert found in fitting
        assert slowest(seconds, found) == min(slowest(seconds, split) for split in fitting)


@pytest.mark.parametrize("stages", [2, 8, 32, 64])
def test_many_layers_take_no_longer_than_a_share_and_a_layer(stages: int) -> None:
    """As GPT-2 has them: 64 alike, the last of which comes with a projection as long as four."""
    seconds = [1.0] * 63 + [5.0]
    found = balanced(seconds, [[stage] for stage in range(stages)])
    assert slowest(seconds, found) == max(5.0, -(-sum(seconds) // stages))


def test_as_many_stages_as_a_thousand_layers_are_no_trouble() -> None:
    workers = [[stage] for stage in range(1200)]
    assert balanced([1.0] * 1200, workers, lambda _stage, first, end: end - first, [1] * 1200) == tuple(range(1200))
