"""alpha and beta from measured times: the straight line that passes nearest to them, and by how much it is off."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2, sqrt

from chimera_ir.profile.cluster import Link

OFF = 0.2
"""A line that is off by a larger share of a time at some size says so."""


_ROUNDS = 2000


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
    """alpha and beta >= 0 for which the sum over all (x, y, t) of m/t + t/m is smallest, where m = alpha x + beta y.

    Times span many powers of ten, so what counts is the ratio of line and time, twice too much like half of it. The sum
    is convex, so there is one minimum. Each round multiplies alpha and beta by the square root of what pulls them up
    over what pulls them down, which never makes the sum larger (majorization, as in multiplicative updates of
    non-negative factorizations).
    """
    alpha = min(t / x for x, _, t in terms) / 2
    beta = min(t / y for _, y, t in terms) / 2
    down = sum(x / t for x, _, t in terms), sum(y / t for _, y, t in terms)
    for _ in range(_ROUNDS):
        pulls = [t / (alpha * x + beta * y) ** 2 for x, y, t in terms]
        up = sum(p * x for p, (x, _, _) in zip(pulls, terms, strict=True))
        over = sum(p * y for p, (_, y, _) in zip(pulls, terms, strict=True))
        alpha, beta = alpha * sqrt(up / down[0]), beta * sqrt(over / down[1])
    return Link(alpha, beta)
