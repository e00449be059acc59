"""Costs of slices of any length, from those of the slices that a profile has: equal ones, in order.

The work along the sequence is a curve that rises by the work of a slice over its length. The time of a slice is what
the curve rises from its start to its end, and the overhead of an operation once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from math import ceil

from chimera_ir.profile.costs import Times, Timing, time_of

Extent = tuple[Fraction, Fraction]
"""Start and end of a slice, as shares of the sequence."""


def extent_of(place: int, slices: int) -> Extent:
    """The extent of slice ``place`` of ``slices`` equal ones."""
    return Fraction(place, slices), Fraction(place + 1, slices)


def slice_terms(timing: Timing, overhead: Times, kind: str, extent: Extent) -> tuple[tuple[float, Fraction], ...]:
    """Time of an operation on a slice, as a sum of terms, each the seconds of a slice in the profile and a factor."""
    terms = [(part.seconds(kind), share) for part, share in _overlaps(timing.slices, extent)]
    operations = sum((share for _, share in terms), Fraction(0))
    # Each part that was measured has the overhead once, also where a slice is longer or shorter.
    seconds = min(time_of(overhead, kind), *(part.seconds(kind) for part in timing.slices))
    return (*terms, (seconds, 1 - operations)) if seconds and operations != 1 else tuple(terms)


def _overlaps(parts: Sequence[Timing], extent: Extent) -> Iterator[tuple[Timing, Fraction]]:
    """Yields the slices of a profile that overlap with an extent, each with the share of it in the extent."""
    start, end = (place * len(parts) for place in extent)
    for number, part in enumerate(parts):
        share = min(end, Fraction(number + 1)) - max(start, Fraction(number))
        if share > 0:
            yield part, share


def sliced(timing: Timing, overhead: Times, slices: int) -> Timing:
    """Costs of a micro-batch in ``slices`` equal slices, all together: times of all of them, and bytes to share evenly.

    Of a micro-batch the first slices are kept at any time, so activations and carries count as if all slices had the
    largest mean over first slices.
    """
    parts = timing.slices

    def times_of(kind: str) -> float:
        extents = (extent_of(place, slices) for place in range(slices))
        terms = (term for extent in extents for term in slice_terms(timing, overhead, kind, extent))
        return sum(seconds * float(share) for seconds, share in terms)

    # The gradient of a carry is as long as all slices before: it grows from the first boundary to the last.
    boundaries = Fraction(slices - 1, slices) / Fraction(max(1, len(parts) - 1), len(parts))
    return replace(
        timing,
        times={key: times_of(key) for key in timing.times if all(key in part.times for part in parts)},
        activations=_largest_mean([part.activations for part in parts]),
        released=len(parts) * min(part.released for part in parts),
        operands=len(parts) * max(part.operands for part in parts),
        resident=len(parts) * max(part.resident for part in parts),
        carry=_largest_mean([*_carries(parts, slices), 0]),
        carry_gradient=slices * -(-max(part.carry_gradient for part in parts) * boundaries // 1),
        slices=(),
    )


def _largest_mean(sizes: Sequence[int]) -> int:
    """The largest mean over the first slices, times the number of slices."""
    return max(-(-total * len(sizes) // count) for count, total in enumerate(accumulate(sizes), start=1))


def _carries(parts: Sequence[Timing], slices: int) -> Iterator[int]:
    """Yields the bytes of the carry that each of ``slices`` equal slices leaves, except the last, which leaves none.

    The carry of the first slice is in proportion to its length, as the keys of its positions are. What the carries of
    later slices have in addition depends on their start: a copy of earlier keys is as long as all earlier slices.
    """
    sizes = [part.carry for part in parts[:-1]] or [0]
    for place in range(slices - 1):
        start = Fraction(place * len(parts), slices)
        below = min(int(start), max(0, len(sizes) - 2))
        growth = sizes[below + 1] - sizes[below] if len(sizes) > 1 else 0
        copied = sizes[below] - sizes[0] + (start - below) * growth
        yield ceil(max(Fraction(0), sizes[0] * Fraction(len(parts), slices) + copied))
