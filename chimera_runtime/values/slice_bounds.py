"""Bounds of the slices of a sequence, from their relative lengths."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def slice_bounds(length: int, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Returns start and end of each slice of a sequence, which has at least as many items as slices.

    Each boundary is at the item nearest to its share of the sequence, or at the later of two that are equally near;
    then it moves as far as is needed for every slice to have an item.

    Examples
    --------
    >>> slice_bounds(8, (3, 2, 2, 1)), slice_bounds(11, (3, 2, 2, 1))
    ([(0, 3), (3, 5), (5, 7), (7, 8)], [(0, 4), (4, 7), (7, 10), (10, 11)])
    >>> slice_bounds(4, (97, 1, 1, 1))
    [(0, 1), (1, 2), (2, 3), (3, 4)]
    """
    whole, slices = sum(lengths), len(lengths)
    bounds = [0]
    for place, until in enumerate(accumulate(lengths), start=1):
        nearest = (2 * length * until + whole) // (2 * whole)
        bounds.append(min(max(nearest, bounds[-1] + 1), length - (slices - place)))
    return [*pairwise(bounds)]
