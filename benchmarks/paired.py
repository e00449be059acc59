"""Medians, and how sure they are: for measurements that were taken in pairs, one right after the other."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Middle:
    """A median and the interval that holds the true one with 95 % confidence, whatever the distribution."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f}..{self.high:.3f})"


def middle(values: Sequence[float]) -> Middle:
    """The median of the values; the interval is that of the sign test, and all values where they are fewer than 6.

    Examples
    --------
    >>> middle([3, 1, 2, 5, 4, 6, 8, 7, 9])
    Middle(value=5, low=2, high=8)
    """
    ordered, count = sorted(values), len(values)
    outside, cut = 1 / 2**count, 0
    while outside <= 0.025:
        cut += 1
        outside += math.comb(count, cut) / 2**count
    cut = max(cut, 1)
    return Middle(statistics.median(ordered), ordered[cut - 1], ordered[-cut])


def ratio(one: Sequence[float], other: Sequence[float]) -> Middle:
    """The median of the ratios pair by pair: what slows a moment down slows both."""
    return middle([a / b for a, b in zip(one, other, strict=True)])
