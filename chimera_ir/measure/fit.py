"""alpha and beta from measured times: the straight line that passes nearest to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, log2, sinh, sqrt

from chimera_ir.profile.cluster import Link

OFF = 0.2
"""The largest share of a measured time by which a line may be off at some size without a remark."""


SCATTER = 0.1
"""The largest deviation of a time from the line, as a share of the time, that counts as chance."""

_ROUNDS = 3000
_FREE_ROUNDS = 300
_NOTHING = 1e-9


@dataclass(frozen=True, slots=True)
class Point:
    """Seconds of an exchange of ``size`` bytes between ``ranks`` ranks, uncertain by the share ``uncertainty``."""

    size: int
    ranks: int
    seconds: float
    uncertainty: float = 0.0


def messages(points: Sequence[Point]) -> Link:
    """The link whose alpha and beta fit messages best, by Comm_p2p = alpha + beta L (section 3.4)."""
    return _nearest([(1.0, float(p.size), p) for p in points])


def sums(points: Sequence[Point]) -> Link:
    """The link that fits sums best, by Comm_allreduce = 2 log2(r) alpha + 2 (r-1)/r beta L (section 3.4)."""
    return _nearest([(2 * log2(p.ranks), 2 * (p.ranks - 1) * p.size / p.ranks, p) for p in points])


def _nearest(terms: Sequence[tuple[float, float, Point]]) -> Link:
    """The link with the alpha and beta, never negative, that come nearest to all measured times.

    A term is (x, y, point): the line says m = alpha x + beta y where the measured time is t, the seconds of the point.
    The sum of h(log(m/t) / s) over all terms is made as small as possible. Times span many powers of ten, so the
    logarithm of m/t counts: a line twice too high is as bad as a line half as high as it should be. Its unit s is
    SCATTER plus the point's uncertainty. h is Huber's function: squares up to one, absolute values beyond, so that one
    size with an unusual time hardly bends the line.

    A round reduces a weighted sum of m/t + t/m, which is convex and close to squares of logarithms. It multiplies alpha
    and beta by the square root of the terms that pull them up over the terms that pull them down, as in non-negative
    factorizations. The weights give the sum the slope of h; in the first rounds, which find a start, all are 1.
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
    """The weight of a term in a round of `_nearest`: the slope of h(off / scale) over the slope of e^off + e^-off.

    ``off`` is the logarithm of m/t, ``scale`` is s.
    """
    size = abs(off)
    if size < _NOTHING:
        return 1 / (2 * scale * scale)
    return min(size / scale, 1.0) / scale / (2 * sinh(size))
