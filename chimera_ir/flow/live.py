"""The walk along the lifetimes of values: what a lane keeps at any time, by the unit in which a value counts.

F m0 s0     activations +1
F m1 s0     activations +1    the peak: 2
I m0 s0     activations -1, operands +1
W m0 s0     operands -1
B m1 s0     activations -1
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple, TypeVar

from chimera_ir.ir.kinds import KEPT, Counted, Kind, Value
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute, singles

K = TypeVar("K")


class Highest(NamedTuple):
    """The most that is kept at once, and the index of the change that reaches it first."""

    amount: int
    change: int


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


def most_at_once(lifetimes: Iterable[tuple[K, int, int]]) -> dict[K, int]:
    """The most things of each key that exist at once.

    A lifetime is a key, a start and an end; what does not start before it ends never exists. Keys of which nothing ever
    exists are left out.

    Examples
    --------
    >>> most_at_once([("a", 0, 2), ("a", 1, 3), ("a", 3, 4), ("b", 1, 1)])
    {'a': 2}
    """
    lasting = [lifetime for lifetime in lifetimes if lifetime[1] < lifetime[2]]
    changes = [change for key, start, end in lasting for change in ((start, 1, key), (end, -1, key))]
    ordered = ((key, amount) for _, amount, key in sorted(changes, key=itemgetter(0, 1)))
    return {key: most.amount for key, most in highest_by_key(ordered).items()}


KeptChange = tuple[Compute, Counted, int]
"""A change by an operation to what its stage keeps, in a unit: an amount of micro-batches, or parts of one."""


class _Effect(NamedTuple):
    """A change by an operation of a kind: ``per_micro`` for each of its micro-batches, and ``once``."""

    unit: Counted
    per_micro: int
    once: int


def changes(
    header: Header, lane: Iterable[Compute], units: Collection[Counted] = tuple(Counted)
) -> Iterator[KeptChange]:
    """Yields the changes in some units by the operations of a lane, in order.

    What an operation makes exists while it runs, and so does what it frees. Operands alone take the place of the
    activations that are freed. A value that no operation frees does not count.
    """
    effects, recomputes = _effects(header, units), header.recomputes if header.recomputing else None
    if not any(effects.values()):
        return
    for operation in lane:
        kind, micros = operation.kind, operation.micros
        for unit, per_micro, once in effects[kind, recomputes is not None and recomputes(micros[0], operation.stage)]:
            yield operation, unit, per_micro * len(micros) + once


def waiting(header: Header) -> dict[Kind, int]:
    """Number of values, of any unit, that an operation of each kind adds to what a stage keeps of a micro-batch."""
    effects = _effects(header, tuple(Counted))
    return {kind: sum(effect.per_micro for effect in effects[kind, False]) for kind in header.kinds}


def _effects(header: Header, units: Collection[Counted]) -> Mapping[tuple[Kind, bool], tuple[_Effect, ...]]:
    """The effects of operations of each kind, in order, on a stage that keeps activations and on one that recomputes.

    Only effects in ``units`` are listed. A stage that recomputes keeps the input until the activations are freed. They
    exist while an operation reads them, of one micro-batch at a time.
    """
    freed = {value for kind in header.kinds for value in kind.frees}

    def effects(kind: Kind, again: bool) -> Iterator[_Effect]:
        def unit(value: Value) -> Counted:
            return Counted.INPUT if again and value is KEPT else value.counted

        made, gone = Counter(unit(value) for value in kind.keeps if value in freed), Counter(map(unit, kind.frees))
        operands = made.pop(Counted.OPERANDS, 0)
        computed_again = int(again and KEPT in kind.reads)
        yield _Effect(Counted.ACTIVATIONS, 0, computed_again)
        yield from (_Effect(counted, amount, 0) for counted, amount in made.items())
        yield from (_Effect(counted, -amount, 0) for counted, amount in gone.items())
        yield _Effect(Counted.ACTIVATIONS, 0, -computed_again)
        yield _Effect(Counted.OPERANDS, operands, 0)

    return {
        (kind, again): tuple(effect for effect in effects(kind, again) if effect.unit in units and effect[1:] != (0, 0))
        for kind in header.kinds
        for again in (False, True)[: 1 + header.recomputing]
    }


class Peak(NamedTuple):
    """The most that is kept, and the operation that reaches it first; None if nothing is ever kept."""

    amount: int
    at: Compute | None


def peaks(schedule: Schedule, *units: Counted) -> tuple[Peak, ...]:
    """The peak of each worker in micro-batches, or parts of one, of which anything is kept in some units.

    Stages are added up. A pair counts as its forward, then its backward, so both are there at once.
    """
    by_lane: list[Peak] = []
    for lane in map(singles, schedule.lanes):
        counted = list(changes(schedule.header, lane, units))
        amounts = list(accumulate((amount for _, _, amount in counted), initial=0))
        reached = amounts.index(max(amounts))
        by_lane.append(Peak(amounts[reached], counted[reached - 1][0] if reached else None))
    return tuple(by_lane)


def activations(schedule: Schedule) -> tuple[Peak, ...]:
    """The `peaks` of live micro-batches.

    A micro-batch is live on a stage from its forward until no later operation there needs anything of it. If the stage
    recomputes, it is live during its backward, or from the first half of a split backward to the second.
    """
    return peaks(schedule, Counted.ACTIVATIONS, Counted.OPERANDS)


def inputs(schedule: Schedule) -> tuple[Peak, ...]:
    """The `peaks` of inputs that are kept for recomputation."""
    return peaks(schedule, Counted.INPUT)


def between_halves(schedule: Schedule) -> tuple[Peak, ...]:
    """The `peaks` of micro-batches between the halves of their backward."""
    return peaks(schedule, Counted.OPERANDS)


def whole(header: Header, peaks: Iterable[Peak]) -> tuple[Fraction, ...]:
    """Peaks in M_a (section 3.3): in whole micro-batches, added up over stages."""
    return tuple(Fraction(peak.amount, header.parts) for peak in peaks)
