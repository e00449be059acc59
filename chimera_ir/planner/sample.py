"""Deterministic sample of a space that is too large to be tried as a whole."""

import math
from collections.abc import Iterator, Sequence
from itertools import count, product
from typing import TypeVar

_Value = TypeVar("_Value")

_GOLDEN = (math.sqrt(5) - 1) / 2


def sample(columns: Sequence[Sequence[_Value]], most: int) -> Iterator[tuple[_Value, ...]]:
    """Yields every combination of a value from each column, or ``most`` of them if there are more.

    The sample is spread evenly. It goes round the list of all combinations in steps of about the golden ratio of the
    list's length, so it leaves out no large part and has no combination twice. It begins with the first value of each
    column.

    Examples
    --------
    >>> list(sample([[1, 2], [10, 20]], 4))
    [(1, 10), (1, 20), (2, 10), (2, 20)]
    >>> list(sample([[1, 2, 3], [10, 20, 30]], 4))
    [(1, 10), (3, 20), (2, 30), (2, 10)]
    """
    size = math.prod(map(len, columns))
    if size <= most:
        yield from product(*columns)
        return
    step = next(number for number in count(round(size * _GOLDEN)) if math.gcd(number, size) == 1)
    for number in range(most):
        yield _combination(columns, number * step % size)


def _combination(columns: Sequence[Sequence[_Value]], number: int) -> tuple[_Value, ...]:
    """The combination with this number, counted from 0 in the order of `itertools.product`."""
    values = []
    for column in reversed(columns):
        number, place = divmod(number, len(column))
        values.append(column[place])
    return tuple(reversed(values))
