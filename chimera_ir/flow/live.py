"""What a lane keeps at once: one walk along the lifetimes of values, be it activations, versions or messages.

F m0 s0     +1
F m1 s0     +1    the peak: 2
B m0 s0     -1
B m1 s0     -1
"""

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, repeat
from typing import NamedTuple, TypeVar

from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute, singles

K = TypeVar("K")


class Highest(NamedTuple):
    """The most that is kept at once, and the number of the change that reaches it first."""

    amount: int
    change: int


def highest(changes: Iterable[int]) -> Highest | None:
    """The most that is kept, if so much more is kept after each change, or less; None if nothing ever is."""
    amounts = list(accumulate(changes))
    most = max(amounts, default=0)
    return Highest(most, amounts.index(most)) if most > 0 else None


def highest_by_key(changes: Iterable[tuple[K, int]]) -> dict[K, Highest]:
    """The same for each key of which anything is ever kept, if every change is about one of them."""
    amounts: dict[K, int] = {}
    peaks: dict[K, Highest] = {}
    for number, (key, change) in enumerate(changes):
        amounts[key] = amounts.get(key, 0) + change
        if amounts[key] > (peaks[key].amount if key in peaks else 0):
            peaks[key] = Highest(amounts[key], number)
    return peaks


class Peak(NamedTuple):
    """The most that is kept, and the operation that reaches it first, if anything is ever kept."""

    amount: int
    at: Compute | None


def _peak(lane: Sequence[Compute], changes: Iterable[int]) -> Peak:
    """The most that a lane keeps at once, if its operations change it by so much for each of their micro-batches."""
    most = highest(change * len(operation.micros) for operation, change in zip(lane, changes, strict=True))
    return Peak(0, None) if most is None else Peak(most.amount, lane[most.change])


def activations(schedule: Schedule) -> tuple[Peak, ...]:
    """Per worker, the peak number of live micro-batches, or parts of one, times stages.

    A micro-batch is live on a stage from its forward until no later operation there needs anything of it. On a stage
    that recomputes it is so from its input gradient on, if its backward is split: the activations that a backward
    computes again and needs itself are gone when it ends.
    """
    header, growth = schedule.header, schedule.header.growth
    return tuple(
        _peak(
            lane,
            [
                growth[operation.kind].forward * (not again) + growth[operation.kind].later
                for operation, again in zip(lane, _again(header, lane), strict=True)
            ],
        )
        for lane in _lanes(schedule)
    )


def inputs(schedule: Schedule) -> tuple[Peak, ...]:
    """Per worker, the peak number of inputs that its stages keep for recomputation, counted like `activations`."""
    header, growth = schedule.header, schedule.header.growth
    if not header.recomputing:
        return (Peak(0, None),) * len(schedule.lanes)
    return tuple(
        _peak(
            lane,
            [
                growth[operation.kind].forward * again
                for operation, again in zip(lane, _again(header, lane), strict=True)
            ],
        )
        for lane in _lanes(schedule)
    )


def between_halves(schedule: Schedule) -> tuple[Peak, ...]:
    """Per worker, the peak number of micro-batches between the halves of their backward, counted like `activations`."""
    growth = schedule.header.growth
    return tuple(_peak(lane, [growth[operation.kind].later for operation in lane]) for lane in _lanes(schedule))


def _lanes(schedule: Schedule) -> Iterator[tuple[Compute, ...]]:
    """The operations of each lane one by one: what both of a pair need is there at once, as its forward comes first."""
    return map(singles, schedule.lanes)


def whole(header: Header, peaks: Iterable[Peak]) -> tuple[Fraction, ...]:
    """Peaks in whole micro-batches times stages: M_a (section 3.3)."""
    return tuple(Fraction(peak.amount, header.parts) for peak in peaks)


def _again(header: Header, lane: Sequence[Compute]) -> Iterable[bool]:
    """For each operation, whether its stage keeps only the input of its micro-batches."""
    if not header.recomputing:
        return repeat(False, len(lane))
    return [header.recomputes(operation.micros[0], operation.stage) for operation in lane]
