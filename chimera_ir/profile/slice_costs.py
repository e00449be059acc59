"""Costs of slices of any length, computed from the equal slices that a profile has.

The work along the sequence is a curve, which rises over each measured slice by the work of that slice. Any other slice
takes the time by which the curve rises from its start to its end, and the overhead of an operation once.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise
from math import ceil

from chimera_ir.ir.slice_lengths import Extent, extents
from chimera_ir.profile.costs import Times, Timing, time_of


def slice_terms(timing: Timing, overhead: Times, kind: str, extent: Extent) -> tuple[tuple[float, Fraction], ...]:
    """Time of an operation on a slice, as terms to be added: each is the seconds of a measured slice and a factor.

    ``extent`` is where the slice begins and ends, as shares of the sequence. A last term adds or removes overhead, so
    that the slice has that of one operation.
    """
    terms = [(part.seconds(kind), share) for part, share in _overlaps(timing.slices, extent)]
    operations = sum((share for _, share in terms), Fraction(0))
    # Each part that was measured has the overhead once, also where a slice is longer or shorter.
    seconds = min(time_of(overhead, kind), *(part.seconds(kind) for part in timing.slices))
    return (*terms, (seconds, 1 - operations)) if seconds and operations != 1 else tuple(terms)


def _overlaps(parts: Sequence[Timing], extent: Extent) -> Iterator[tuple[Timing, Fraction]]:
    """Yields the measured slices that overlap with an extent, each with the share of that slice which lies in it."""
    start, end = (place * len(parts) for place in extent)
    for number, part in enumerate(parts):
        share = min(end, Fraction(number + 1)) - max(start, Fraction(number))
        if share > 0:
            yield part, share


def sliced(timing: Timing, overhead: Times, lengths: tuple[int, ...]) -> Timing:
    """Costs of a micro-batch in slices of these relative lengths: times of all together, bytes as if it were whole.

    The bytes of a slice are then its share of the length. If a worker keeps only some slices of a micro-batch, these
    are always the first ones, which may be larger than the mean. So activations and carries count as if every slice
    were as large as the largest mean of the first n slices, for any n.
    """
    parts, of_slices = timing.slices, extents(lengths)

    def times_of(kind: str) -> float:
        terms = (term for extent in of_slices for term in slice_terms(timing, overhead, kind, extent))
        return sum(seconds * float(share) for seconds, share in terms)

    # The gradient of a carry is as long as all slices before: it grows from the first boundary to the last.
    boundaries = [start / Fraction(max(1, len(parts) - 1), len(parts)) for start, _ in of_slices[1:]] or [Fraction(0)]
    gradient = max(part.carry_gradient for part in parts)
    shares = [end - start for start, end in of_slices[1:]]
    gradients = [ceil(ceil(gradient * b) / share) for b, share in zip(boundaries, shares, strict=False)]
    return replace(
        timing,
        times={key: times_of(key) for key in timing.times if all(key in part.times for part in parts)},
        activations=_largest_mean([part.activations for part in parts]),
        released=len(parts) * min(part.released for part in parts),
        operands=len(parts) * max(part.operands for part in parts),
        resident=len(parts) * max(part.resident for part in parts),
        resident_operands=len(parts) * max(part.resident_operands for part in parts),
        carry=_largest_mean([*_carries(parts, of_slices), 0], lengths),
        carry_gradient=max(gradients, default=0),
        slices=(),
    )


def _largest_mean(sizes: Sequence[int], lengths: Sequence[int] = ()) -> int:
    """The bytes of a whole micro-batch if every slice were as large as the largest mean of its first slices.

    There is a mean for each n: the bytes of the first n slices, divided by their length. Without ``lengths`` all slices
    are equally long.
    """
    counts = accumulate(lengths or (1,) * len(sizes))
    whole = sum(lengths) or len(sizes)
    return max(-(-total * whole // count) for count, total in zip(counts, accumulate(sizes), strict=True))


def _carries(parts: Sequence[Timing], of_slices: Sequence[Extent]) -> Iterator[int]:
    """Yields the bytes of the carry that each slice leaves, except the last, which leaves none.

    The carry of the first measured slice is in proportion to its length, as the keys of its positions are. The carry of
    a later slice may be larger, the later the slice starts: it may hold a copy of the keys of all positions before.
    """
    sizes = [part.carry for part in parts[:-1]] or [0]
    for start_of_slice, end in of_slices[:-1]:
        start = start_of_slice * len(parts)
        below = min(int(start), max(0, len(sizes) - 2))
        growth = sizes[below + 1] - sizes[below] if len(sizes) > 1 else 0
        copied = sizes[below] - sizes[0] + (start - below) * growth
        yield ceil(max(Fraction(0), sizes[0] * (end - start_of_slice) * len(parts) + copied))


def equal_times(slices: int, length: int, time: Callable[[int, int], float]) -> tuple[int, ...]:
    """Lengths of slices, ``length`` in all, with which the slowest slice is fastest: all take about equally long.

    ``time`` gives the time of a slice from its start and end; a slice within another one is not slower. From the last
    slice back, each is as long as the time of the slowest allows, and leaves at least 1 for each slice before it.
    """
    most, least = time(0, length), 0.0
    best = _cut(slices, length, time, most)
    # The interval of limits is halved until no number is between its ends.
    while least < (limit := (least + most) / 2) < most:
        if (starts := _cut(slices, length, time, limit)) is None:
            least = limit
        else:
            best, most = starts, limit
    assert best is not None, "the whole sequence takes longest"
    return tuple(end - start for end, start in reversed([*pairwise([length, *best])]))


def _cut(slices: int, length: int, time: Callable[[int, int], float], limit: float) -> list[int] | None:
    """The starts of ``slices`` slices, the last one first, none of which takes longer than ``limit``.

    The result is None if there are no such slices. The sequence has ``length`` positions.
    """
    starts = [length]
    for others in range(slices - 1, -1, -1):
        end = starts[-1]
        first = bisect_left(range(end), True, lo=others, key=partial(_fits, time, limit, end))
        if first == end or (first and not others):
            return None
        starts.append(first)
    return starts[1:]


def _fits(time: Callable[[int, int], float], limit: float, end: int, start: int) -> bool:
    return time(start, end) <= limit


_BOTH = ("F", "B")
"""The keys of times that every profile has; together they are all work on a slice, if nothing is computed twice."""


def slowest_stage(stages: Sequence[tuple[Timing, Times]], length: int) -> Callable[[int, int], float]:
    """Returns a function from the start and the end of a slice to its time on the stage where it takes longest.

    Starts and ends are positions in a sequence of this ``length``. ``stages`` have a timing and the overhead each; the
    time is that of the forward and the backward.
    """
    curves = []
    for timing, overhead in stages:
        once = [min(time_of(overhead, kind), *(part.seconds(kind) for part in timing.slices)) for kind in _BOTH]
        work = (sum(part.seconds(kind) for kind in _BOTH) - sum(once) for part in timing.slices)
        curves.append(([*accumulate(work, initial=0.0)], sum(once)))

    def work_until(place: int, curve: Sequence[float]) -> float:
        whole, rest = divmod(place * (len(curve) - 1), length)
        return curve[whole] + (rest / length * (curve[whole + 1] - curve[whole]) if rest else 0.0)

    return lambda start, end: max(work_until(end, curve) - work_until(start, curve) + once for curve, once in curves)
