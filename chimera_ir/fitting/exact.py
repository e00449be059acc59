"""Finds the whole numbers by which terms have to be multiplied to add up to given values, at every point."""

from collections.abc import Sequence
from fractions import Fraction


def exact_fit(rows: Sequence[Sequence[int]], values: Sequence[int]) -> list[int] | None:
    """Returns whole numbers x with ``row * x == value`` for each of the rows and its value; None if none are found.

    Where the rows leave a choice, a later number is 0 rather than an earlier one.

    Examples
    --------
    >>> exact_fit([[1, 0, 0], [1, 1, 1], [1, 2, 2]], [3, 5, 7])
    [3, 2, 0]
    >>> exact_fit([[1], [1]], [3, 4])
    """
    # Gaussian elimination; a column without a pivot keeps the factor 0.
    pivots: list[tuple[int, list[Fraction]]] = []
    for row, value in zip(rows, values, strict=True):
        line = [Fraction(number) for number in (*row, value)]
        for column, pivot in pivots:
            if factor := line[column]:
                line = [number - factor * other for number, other in zip(line, pivot, strict=True)]
        first = next((place for place, number in enumerate(line[:-1]) if number), None)
        if first is None:
            if line[-1]:
                return None
            continue
        line = [number / line[first] for number in line]
        pivots = [
            (place, [number - pivot[first] * other for number, other in zip(pivot, line, strict=True)])
            for place, pivot in pivots
        ]
        pivots.append((first, line))
    factors = [Fraction(0)] * len(rows[0])
    for column, pivot in pivots:
        factors[column] = pivot[-1]
    return [int(factor) for factor in factors] if all(factor.denominator == 1 for factor in factors) else None
