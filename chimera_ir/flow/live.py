"""How much is kept: one walk along a lane over the lifetimes of what its operations make, with a size for each.

F m0 s0     +1
F m1 s0     +1    the peak: 2
B m0 s0     -1
B m1 s0     -1
"""

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import NamedTuple

from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute

Size = Callable[[Compute], int]
"""What an operation's stage keeps of each of its micro-batches."""


class Peak(NamedTuple):
    """The most that is kept, and the operation that reaches it first, if anything is ever kept."""

    amount: int
    at: Compute | None


def peak(lane: Iterable[Compute], size: Size) -> Peak:
    """The most that a lane keeps at once."""
    amount = highest = 0
    at = None
    for operation in lane:
        amount += operation.kind.growth * len(operation.micros) * size(operation)
        if amount > highest:
            highest, at = amount, operation
    return Peak(highest, at)


def activations(schedule: Schedule) -> tuple[Peak, ...]:
    """Per worker, the peak number of live micro-batches, or parts of one, times stages.

    Live is what a forward keeps until it is freed. Stages that recompute do not count: what the one at work computes
    again is gone when its backward ends.
    """
    return tuple(peak(lane, lambda each: not _again(schedule.header, each)) for lane in schedule.lanes)


def inputs(schedule: Schedule) -> tuple[Peak, ...]:
    """The same for the stages that recompute: how many inputs a worker keeps."""
    if not schedule.header.recomputing:
        return (Peak(0, None),) * len(schedule.lanes)
    return tuple(peak(lane, lambda each: _again(schedule.header, each)) for lane in schedule.lanes)


def whole(header: Header, peaks: Iterable[Peak]) -> tuple[Fraction, ...]:
    """Peaks in whole micro-batches times stages: M_a (section 3.3)."""
    return tuple(Fraction(each.amount, header.parts) for each in peaks)


def _again(header: Header, operation: Compute) -> bool:
    return header.recomputes(operation.micros[0], operation.stage)
