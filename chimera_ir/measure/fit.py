"""alpha and beta from measured times: the straight line that passes nearest to them, and by how much it is off."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, log2, sinh, sqrt

from chimera_ir.profile.cluster import Link

OFF = 0.2
"""A line that is off by a larger share of a time at some size says so."""


SCATTER = 0.1
"""Deviations up to this share are taken as chance."""

_ROUNDS = 3000
_FREE_ROUNDS = 300
_NOTHING = 1e-9


@dataclass(frozen=True, slots=True)
class Point:
    """So many bytes, exchanged by so many ranks, took so many seconds; a message has two ranks."""

    size: int
    ranks: int
    seconds: float


def messages(points: Sequence[Point]) -> Link:
    """The link of Comm_p2p = alpha + beta L (section 3.4)."""
    return _nearest([(1.0, float(p.size), p.seconds) for p in points])


def sums(points: Sequence[Point]) -> Link:
    """The link of Comm_allreduce = 2 log2(r) alpha + 2 (r-1)/r beta L (section 3.4)."""
    return _nearest([(2 * log2(p.ranks), 2 * (p.ranks - 1) * p.size / p.ranks, p.seconds) for p in points])


def _nearest(terms: Sequence[tuple[float, float, float]]) -> Link:
    """alpha and beta >= 0 for which the sum over all (x, y, t) of h(log(m/t)) is smallest, where m = alpha x + beta y.

    Times span many powers of ten, so what counts is the ratio of line and time, twice too much like half of it. h is
    Huber's: squares up to SCATTER, absolute values beyond, so that one size that behaves otherwise bends nothing.

    A round reduces a weighted sum of m/t + t/m, which is convex and close to squares of logarithms: alpha and beta are
    multiplied by the square root of what pulls them up over what pulls them down, as in non-negative factorizations.
    The weights make its slope that of h; the first rounds, which find where to start from, have none.
    """
    alpha = min(t / x for x, _, t in terms) / 2
    beta = min(t / y for _, y, t in terms) / 2
    for number in range(_ROUNDS):
        up, over, down, under = 0.0, 0.0, 0.0, 0.0
        for x, y, t in terms:
            ratio = (alpha * x + beta * y) / t
            weight = 1.0 if number < _FREE_ROUNDS else _weight(log(ratio))
            pull, push = weight / (ratio * ratio * t), weight / t
            up, over = up + pull * x, over + pull * y
            down, under = down + push * x, under + push * y
        alpha, beta = alpha * sqrt(up / down), beta * sqrt(over / under)
    return Link(alpha, beta)


def _weight(off: float) -> float:
    """h'(off) / (2 sinh(off)): the slope of Huber's function over that of e^off + e^-off."""
    size = abs(off)
    return 1 / (2 * SCATTER) if size < _NOTHING else min(size / SCATTER, 1.0) / (2 * sinh(size))
