"""The walk along the lifetimes of values: what a lane keeps at any time, by the unit in which a value counts.

F m0 s0     activations +1
F m1 s0     activations +1    the peak: 2
I m0 s0     activations -1, operands +1
W m0 s0     operands -1
B m1 s0     activations -1
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache, partial
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple, TypeVar

from chimera_ir.flow.host_moves import MoveStep, with_waits
from chimera_ir.ir.kinds import ON_HOST_UNITS, ON_WORKER, Counted, Kind, Value
from chimera_ir.ir.levels import Header, Program, Schedule
from chimera_ir.ir.ops import WaitMove, singles

K = TypeVar("K")


class Highest(NamedTuple):
    """The highest total reached while changes are added up in order, and the index of the change that did it."""

    amount: int
    change: int


def highest_by_key(changes: Iterable[tuple[K, int]]) -> dict[K, Highest]:
    """The highest total of each key, while changes (key, amount added) are added up in order.

    Keys whose total never exceeds 0 are left out.
    """
    amounts: dict[K, int] = {}
    peaks: dict[K, Highest] = {}
    for number, (key, change) in enumerate(changes):
        amounts[key] = amounts.get(key, 0) + change
        if amounts[key] > (peaks[key].amount if key in peaks else 0):
            peaks[key] = Highest(amounts[key], number)
    return peaks


def repeated(changes: Iterable[tuple[K, int, int | Fraction]]) -> Iterator[tuple[K, int]]:
    """Yields the changes of a turn that repeats without end, after changes that add what exists when it begins.

    A change is a key, the amount added, and the number of the turn to which the thing belongs, counted from this turn.
    Each thing is added once and taken away once. If a turn adds a thing of turn i and takes one of turn j away, i - j
    things exist when a turn begins.

    Examples
    --------
    >>> list(repeated([("a", 1, 0), ("a", -1, -3)]))
    [('a', 3), ('a', 1), ('a', -1)]
    """
    turn = list(changes)
    at_start: dict[K, int | Fraction] = {}
    for key, amount, number in turn:
        at_start[key] = at_start.get(key, 0) + amount * number
    yield from ((key, int(amount)) for key, amount in at_start.items())
    yield from ((key, amount) for key, amount, _ in turn)


def most_at_once(lifetimes: Iterable[tuple[K, int, int]]) -> dict[K, int]:
    """The most things of each key that exist at once.

    A lifetime is a key, a start and an end. Lifetimes that do not end after their start are left out, and so are keys
    without any others.

    Examples
    --------
    >>> most_at_once([("a", 0, 2), ("a", 1, 3), ("a", 3, 4), ("b", 1, 1)])
    {'a': 2}
    """
    lasting = [lifetime for lifetime in lifetimes if lifetime[1] < lifetime[2]]
    changes = [change for key, start, end in lasting for change in ((start, 1, key), (end, -1, key))]
    ordered = ((key, amount) for _, amount, key in sorted(changes, key=itemgetter(0, 1)))
    return {key: most.amount for key, most in highest_by_key(ordered).items()}


KeptChange = tuple[MoveStep, Counted, int]
"""A change to what a stage keeps: the step that makes it, the unit, and the amount added.

The step is an operation or the wait for a move of memory. `Header.units` of an amount are a whole micro-batch.
"""


def changes(
    header: Header, lane: Iterable[MoveStep], units: Collection[Counted] = tuple(Counted)
) -> Iterator[KeptChange]:
    """Yields how the operations of a lane change what is kept in some units, in order.

    What an operation makes exists while it runs, and so does what it frees; only operands come after it, in place of
    the activations that are freed. A value that no operation frees does not count. What a move frees is there until the
    lane has waited for the move.
    """
    effects = _effects(header, tuple(units))
    if not any(map(any, effects.values())):
        return
    slices = header.slices
    if not header.lanes_only:
        yield from _changes_with_moves(effects, lane, slices)
        return
    for operation in lane:
        for unit, per_micro in effects[operation.kind][operation.micros[0] % slices]:
            yield operation, unit, per_micro * len(operation.micros)


def _changes_with_moves(
    effects: "Mapping[Kind, Sequence[_Effects]]", lane: Iterable[MoveStep], slices: int
) -> Iterator[KeptChange]:
    for step in lane:
        is_wait = isinstance(step, WaitMove)
        for unit, per_micro in effects[step.kind][step.micros[0] % slices]:
            if not step.kind.moves or is_wait == (per_micro < 0):
                yield step, unit, per_micro * len(step.micros)


def is_at_end(step: MoveStep, unit: Counted, amount: int) -> bool:
    """Whether a change counts from the end of its operation on: what is freed, and operands in its place."""
    return amount < 0 or (unit is Counted.OPERANDS and not step.kind.moves)


def waiting(header: Header) -> dict[Kind, int]:
    """The number of values that an operation of each kind adds to what a stage keeps of a micro-batch.

    Values that it frees are subtracted. Neither carries nor values on the host count.
    """
    values = (value for kind in header.kinds for value in kind.keeps_in_slice)
    units = dict.fromkeys(value.counted for value in values if value.counted not in ON_HOST_UNITS)
    effects = _effects_of(header.kinds, tuple(units), (1,) * header.slices)
    return {kind: sum(per_micro for _, per_micro in effects[kind][0]) for kind in header.kinds}


_Effects = tuple[tuple[Counted, int], ...]
"""The changes by an operation, in order: a unit, and the amount for each micro-batch, or for the length of a slice."""


def _effects(header: Header, units: tuple[Counted, ...]) -> Mapping[Kind, Sequence[_Effects]]:
    """The changes in ``units`` by operations of each kind on each slice of a micro-batch."""
    return _effects_of(header.kinds, units, header.slice_lengths)


@cache
def _effects_of(
    kinds: tuple[Kind, ...], units: tuple[Counted, ...], lengths: tuple[int, ...]
) -> Mapping[Kind, Sequence[_Effects]]:
    freed, slices = {value for kind in kinds for value in kind.frees}, len(lengths)

    def effects(kind: Kind, place: int) -> Iterator[tuple[Counted, int]]:
        made, gone = Counter[Counted](), Counter[Counted]()
        for value in kind.keeps:
            if value in freed and value.is_made(place, slices):
                made[value.counted] += lengths[place]
        for value in kind.frees:
            maker = _maker(kind, value, place)
            if value.is_made(maker, slices):
                gone[value.counted] += lengths[maker]
        operands = made.pop(Counted.OPERANDS, 0)
        yield from made.items()
        yield from ((counted, -amount) for counted, amount in gone.items())
        yield Counted.OPERANDS, operands

    return {
        kind: [tuple([(unit, n) for unit, n in effects(kind, place) if unit in units and n]) for place in range(slices)]
        for kind in kinds
    }


def _maker(kind: Kind, value: Value, place: int) -> int:
    """The slice that made a value which an operation on slice ``place`` frees.

    If the operation reads the value, it is the slice from which it reads, else its own.
    """
    return place - value.slices_on if value in kind.reads else place


class Peak(NamedTuple):
    """The most that is kept, and the operation that reaches it first; None if nothing is ever kept."""

    amount: int
    at: MoveStep | None


def peaks(level: Schedule | Program, *units: Counted) -> tuple[Peak, ...]:
    """The peak of each worker of what is kept in some units, counted as in `changes`.

    Stages are added up. A pair counts as its forward, then its backward, so both are there at once. What a move takes
    away is kept until the lane has waited for the move; in a schedule, which has no waits, `flow.host_moves` says where
    that is.
    """
    by_lane: list[Peak] = []
    for steps in _steps(level):
        counted = list(changes(level.header, steps, units))
        amounts = list(accumulate(map(itemgetter(2), counted), initial=0))
        reached = amounts.index(max(amounts))
        by_lane.append(Peak(amounts[reached], counted[reached - 1][0] if reached else None))
    return tuple(by_lane)


def _steps(level: Schedule | Program) -> Iterator[Iterable[MoveStep]]:
    """Yields the steps of each lane."""
    if isinstance(level, Program):
        return (parts.steps for parts in level.parts)
    return map(singles if level.header.lanes_only else partial(with_waits, level.header), level.lanes)


def activations(level: Schedule | Program) -> tuple[Peak, ...]:
    """The `peaks` of live micro-batches.

    A micro-batch is live on a stage from its forward, or from its recomputation if the stage recomputes, until no later
    operation there needs anything of it.
    """
    return peaks(level, *ON_WORKER)


def on_host(level: Schedule | Program) -> tuple[Peak, ...]:
    """The `peaks` of what is in the memory of the host: activations, and operands, in which activations live on."""
    return peaks(level, *ON_HOST_UNITS)


def inputs(level: Schedule | Program) -> tuple[Peak, ...]:
    """The `peaks` of inputs that are kept for recomputation."""
    return peaks(level, Counted.INPUT)


def between_halves(level: Schedule | Program) -> tuple[Peak, ...]:
    """The `peaks` of micro-batches between the halves of their backward."""
    return peaks(level, Counted.OPERANDS)


def whole(header: Header, peaks: Iterable[Peak]) -> tuple[Fraction, ...]:
    """The amounts of peaks in M_a (section 3.3), that is in whole micro-batches, added up over stages."""
    return tuple(Fraction(peak.amount, header.units) for peak in peaks)
