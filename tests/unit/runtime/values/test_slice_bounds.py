"""Bounds of slices: at the nearest items, and those that the check cuts by, which computes them by itself."""

import random
from fractions import Fraction
from itertools import accumulate

import pytest

from chimera_runtime.check.reference import items_of_slices
from chimera_runtime.values.nested import slice_bounds


@pytest.mark.parametrize(
    ("length", "lengths", "sizes"),
    [
        (2048, (640, 512, 448, 448), [640, 512, 448, 448]),
        (1024, (640, 512, 448, 448), [320, 256, 224, 224]),
        (3, (1, 1, 98), [1, 1, 1]),
        (10, (1, 1, 1), [3, 4, 3]),
    ],
)
def test_sequences_are_cut_in_proportion_to_the_lengths(
    length: int, lengths: tuple[int, ...], sizes: list[int]
) -> None:
    assert [end - start for start, end in slice_bounds(length, lengths)] == sizes


def test_every_slice_has_an_item_and_no_boundary_is_further_than_needed() -> None:
    rng = random.Random(5)
    for _ in range(300):
        lengths = [rng.choice([1, 2, 3, 50]) for _ in range(rng.randint(1, 6))]
        length = rng.randint(len(lengths), 40)
        bounds = slice_bounds(length, lengths)
        assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
        assert bounds[-1][1] == length
        assert all(start < end for start, end in bounds)
        assert [end - start for start, end in bounds] == items_of_slices(length, lengths)
        exact = [Fraction(length * until, sum(lengths)) for until in accumulate(lengths)]
        roomy = length * min(lengths) >= 2 * sum(lengths)
        assert not roomy or all(abs(end - e) <= Fraction(1, 2) for (_, end), e in zip(bounds, exact, strict=True))
