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
    """So many bytes, exchanged by so many ranks, took so many seconds; a message has two ranks.

    ``uncertainty`` is the share by which that may be off by chance.
    """

    size: int
    ranks: int
    seconds: float
    uncertainty: float = 0.0


def messages(points: Sequence[Point]) -> Link:
    """The link of Comm_p2p = alpha + beta L (section 3.4)."""
    return _nearest([(1.0, float(p.size), p) for p in points])


def sums(points: Sequence[Point]) -> Link:
    """The link of Comm_allreduce = 2 log2(r) alpha + 2 (r-1)/r beta L (section 3.4)."""
    return _nearest([(2 * log2(p.ranks), 2 * (p.ranks - 1) * p.size / p.ranks, p) for p in points])


def _nearest(terms: Sequence[tuple[float, float, Point]]) -> Link:
    """alpha and beta >= 0 for which the sum of h(log(m/t) / s) over all points is smallest, where m = alpha x + beta y.

    Times span many powers of ten, so what counts is the ratio of line and time t, twice too much like half of it, in
    units of what it may be off by: s is SCATTER and the point's uncertainty. h is Huber's function: squares up to one,
    absolute values beyond, so that one size that behaves otherwise bends nothing.

    A round reduces a weighted sum of m/t + t/m, which is convex and close to squares of logarithms: alpha and beta are
    multiplied by the square root of what pulls them up over what pulls them down, as in non-negative factorizations.
    The weights make its slope that of h; the first rounds, which find where to start from, have none.
    """
    alpha = min(point.seconds / x for x, _, point in terms) / 2
    beta = min(point.seconds / y for _, y, point in terms) / 2
    for number in range(_ROUNDS):
        up, over, down, under = 0.0, 0.0, 0.0, 0.0
        for x, y, point in terms:
            ratio = (alpha * x + beta * y) / point.seconds
            weight = 1.0 if number < _FREE_ROUNDS else _weight(log(ratio), SCATTER + point.uncertainty)
            pull, push = weight / (ratio * ratio * point.seconds), weight / point.seconds
            up, over = up + pull * x, over + pull * y
            down, under = down + push * x, under + push * y
        alpha, beta = alpha * sqrt(up / down), beta * sqrt(over / under)
    return Link(alpha, beta)


def _weight(off: float, scale: float) -> float:
    """The slope of h(off / scale) over that of e^off + e^-off."""
    size = abs(off)
    if size < _NOTHING:
        return 1 / (2 * scale * scale)
    return min(size / scale, 1.0) / scale / (2 * sinh(size))
