"""The most that a lane keeps at once, by one walk along the lifetimes of activations, versions or messages.

F m0 s0     +1
F m1 s0     +1    the peak: 2
B m0 s0     -1
B m1 s0     -1
"""

from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple, TypeVar

from chimera_ir.ir.kinds import Kind
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute, singles

K = TypeVar("K")


class Highest(NamedTuple):
    """The most that is kept at once, and the index of the change that reaches it first."""

    amount: int
    change: int


def highest(changes: Iterable[int]) -> Highest | None:
    """The most that is kept at once, if each change adds its amount to what is kept; None if nothing is ever kept."""
    amounts = list(accumulate(changes))
    most = max(amounts, default=0)
    return Highest(most, amounts.index(most)) if most > 0 else None


def highest_by_key(changes: Iterable[tuple[K, int]]) -> dict[K, Highest]:
    """The peak amount of each key over a sequence of changes (key, amount added), and the change that reaches it first.

    Keys whose amount never exceeds 0 are left out.
    """
    amounts: dict[K, int] = {}
    peaks: dict[K, Highest] = {}
    for number, (key, change) in enumerate(changes):
        amounts[key] = amounts.get(key, 0) + change
        if amounts[key] > (peaks[key].amount if key in peaks else 0):
            peaks[key] = Highest(amounts[key], number)
    return peaks


class Peak(NamedTuple):
    """The most that is kept, and the operation that reaches it first; None if nothing is ever kept."""

    amount: int
    at: Compute | None


def _peaks(schedule: Schedule, change: Callable[[Kind, bool], int]) -> tuple[Peak, ...]:
    """The peak of each lane; ``change`` gives the amount that an operation adds for each of its micro-batches.

    The arguments of ``change`` are the operation's kind, and whether the stage keeps only the input of the
    micro-batches. A pair counts as its forward, then its backward, so both are there at once.
    """
    peaks: list[Peak] = []
    recomputes = schedule.header.recomputes
    for lane in map(singles, schedule.lanes):
        most = highest(
            change(operation.kind, recomputes(operation.micros[0], operation.stage)) * len(operation.micros)
            for operation in lane
        )
        peaks.append(Peak(0, None) if most is None else Peak(most.amount, lane[most.change]))
    return tuple(peaks)


def activations(schedule: Schedule) -> tuple[Peak, ...]:
    """The peak number of live micro-batches, or parts of one, of each worker, added up over its stages.

    A micro-batch is live on a stage from its forward until no later operation there needs anything of it. If the stage
    recomputes, it is live between the halves of a split backward only: the activations that a backward computes again
    are gone when the backward ends.
    """
    growth = schedule.header.growth
    return _peaks(schedule, lambda kind, recomputing: growth[kind].forward * (not recomputing) + growth[kind].later)


def inputs(schedule: Schedule) -> tuple[Peak, ...]:
    """The peak number of inputs that each worker's stages keep for recomputation, counted like `activations`."""
    growth = schedule.header.growth
    if not schedule.header.recomputing:
        return (Peak(0, None),) * len(schedule.lanes)
    return _peaks(schedule, lambda kind, recomputing: growth[kind].forward * recomputing)


def between_halves(schedule: Schedule) -> tuple[Peak, ...]:
    """The peak number of micro-batches between the halves of their backward, counted like `activations`."""
    growth = schedule.header.growth
    return _peaks(schedule, lambda kind, _: growth[kind].later)


def whole(header: Header, peaks: Iterable[Peak]) -> tuple[Fraction, ...]:
    """Peaks in M_a (section 3.3): in whole micro-batches, added up over stages."""
    return tuple(Fraction(peak.amount, header.parts) for peak in peaks)
