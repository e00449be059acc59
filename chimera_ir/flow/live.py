"""The memory that a lane keeps: one walk along the lifetimes of the values that its operations make.

F m0 s0     +1
F m1 s0     +1    the peak: 2
B m0 s0     -1
B m1 s0     -1
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, repeat
from typing import NamedTuple

from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute


class Peak(NamedTuple):
    """The most that is kept, and the operation that reaches it first, if anything is ever kept."""

    amount: int
    at: Compute | None


def peak(lane: Sequence[Compute], sizes: Iterable[int]) -> Peak:
    """The most that a lane keeps at once, if its operations keep and free ``sizes`` for each micro-batch."""
    changes = (
        operation.kind.growth * len(operation.micros) * size for operation, size in zip(lane, sizes, strict=False)
    )
    amounts = list(accumulate(changes))
    highest = max(amounts, default=0)
    return Peak(highest, lane[amounts.index(highest)]) if highest > 0 else Peak(0, None)


def activations(schedule: Schedule) -> tuple[Peak, ...]:
    """Per worker, the peak number of live micro-batches, or parts of one, times stages.

    A micro-batch is live on a stage from its forward until an operation frees what the forward keeps. Stages that
    recompute do not count: the activations that a backward computes again are gone when it ends.
    """
    header = schedule.header
    if not header.recomputing:
        return tuple(peak(lane, repeat(1)) for lane in schedule.lanes)
    return tuple(peak(lane, [not again for again in _again(header, lane)]) for lane in schedule.lanes)


def inputs(schedule: Schedule) -> tuple[Peak, ...]:
    """Per worker, the peak number of inputs that its stages keep for recomputation, counted like `activations`."""
    if not schedule.header.recomputing:
        return (Peak(0, None),) * len(schedule.lanes)
    return tuple(peak(lane, _again(schedule.header, lane)) for lane in schedule.lanes)


def whole(header: Header, peaks: Iterable[Peak]) -> tuple[Fraction, ...]:
    """Peaks in whole micro-batches times stages: M_a (section 3.3)."""
    return tuple(Fraction(peak.amount, header.parts) for peak in peaks)


def _again(header: Header, lane: Iterable[Compute]) -> list[bool]:
    return [header.recomputes(operation.micros[0], operation.stage) for operation in lane]
