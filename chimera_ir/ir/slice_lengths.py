"""Lengths of the slices of a micro-batch, relative to one another, and what follows from them: extents and loads.

Without lengths all slices are equally long.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise

from chimera_ir.ir import ops

Extent = tuple[Fraction, Fraction]
"""Start and end of a slice, as shares of the sequence."""

MAX_LENGTH = 10**9
"""The largest length of a slice in a text."""


def normalized(lengths: Sequence[int]) -> tuple[int, ...]:
    """Returns the lengths as they are, or an empty tuple if they are all equal.

    Examples
    --------
    >>> normalized([3, 2, 2, 1]), normalized([5, 5])
    ((3, 2, 2, 1), ())
    """
    return tuple(lengths) if len({*lengths}) > 1 else ()


@cache
def extents(lengths: tuple[int, ...]) -> tuple[Extent, ...]:
    """Returns start and end of each slice as shares of the sequence, from the relative lengths of the slices.

    Examples
    --------
    >>> extents((3, 1))
    ((Fraction(0, 1), Fraction(3, 4)), (Fraction(3, 4), Fraction(1, 1)))
    """
    ends = [Fraction(end, sum(lengths)) for end in accumulate(lengths, initial=0)]
    return tuple(pairwise(ends))


def loads(weights: Sequence[int | Fraction], lengths: Sequence[int]) -> tuple[int | Fraction, ...]:
    """Returns the work of consecutive micro-batches or slices, as a list that repeats from its end on.

    An entry is a weight times a length, divided by the mean length. ``weights`` is empty if all are 1, ``lengths`` if
    all are equal. If both are empty, so is the result, and every load is 1.

    Examples
    --------
    >>> loads((), (3, 1))
    (Fraction(3, 2), Fraction(1, 2))
    """
    if not lengths:
        return tuple(weights)
    factors = [Fraction(length * len(lengths), sum(lengths)) for length in lengths]
    return tuple(w * factors[place % len(factors)] for place, w in enumerate(weights or (1,) * len(factors)))


def weighed(operation: ops.Operation, loads: Sequence[int | Fraction]) -> int | Fraction:
    """Adds up the loads of an operation's micro-batches; of a pair, returns the mean of its two sums.

    Micro-batch m has load ``loads[m % len(loads)]``, or 1 if ``loads`` is empty.
    """
    if not loads:
        return operation.size
    parts = operation.parts
    total = sum(loads[micro % len(loads)] for part in parts for micro in part.micros)
    return total if len(parts) == 1 else Fraction(total, len(parts))
