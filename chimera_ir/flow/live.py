"""What a lane keeps at once: one walk along the lifetimes of values, be it activations, versions or messages.

F m0 s0     +1
F m1 s0     +1    the peak: 2
B m0 s0     -1
B m1 s0     -1
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, repeat
from typing import NamedTuple, TypeVar

from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute

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


def peak(header: Header, lane: Sequence[Compute], sizes: Iterable[int]) -> Peak:
    """The most that a lane keeps at once, if its operations keep and free ``sizes`` for each micro-batch."""
    growth = header.growth
    changes = (
        growth[operation.kind] * len(operation.micros) * size for operation, size in zip(lane, sizes, strict=False)
    )
    most = highest(changes)
    return Peak(0, None) if most is None else Peak(most.amount, lane[most.change])


def activations(schedule: Schedule) -> tuple[Peak, ...]:
    """Per worker, the peak number of live micro-batches, or parts of one, times stages.

    A micro-batch is live on a stage from its forward until an operation frees what the forward keeps. Stages that
    recompute do not count: the activations that a backward computes again are gone when it ends.
    """
    header = schedule.header
    if not header.recomputing:
        return tuple(peak(header, lane, repeat(1)) for lane in schedule.lanes)
    return tuple(peak(header, lane, [not again for again in _again(header, lane)]) for lane in schedule.lanes)


def inputs(schedule: Schedule) -> tuple[Peak, ...]:
    """Per worker, the peak number of inputs that its stages keep for recomputation, counted like `activations`."""
    header = schedule.header
    if not header.recomputing:
        return (Peak(0, None),) * len(schedule.lanes)
    return tuple(peak(header, lane, _again(header, lane)) for lane in schedule.lanes)


def whole(header: Header, peaks: Iterable[Peak]) -> tuple[Fraction, ...]:
    """Peaks in whole micro-batches times stages: M_a (section 3.3)."""
    return tuple(Fraction(peak.amount, header.parts) for peak in peaks)


def _again(header: Header, lane: Iterable[Compute]) -> list[bool]:
    return [header.recomputes(operation.micros[0], operation.stage) for operation in lane]
