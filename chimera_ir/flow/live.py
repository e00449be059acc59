"""Counts what a lane keeps at any time, from where its operations make values and free them.

Values are counted in units of their own (`Counted`):

    F m0 s0     activations +1
    F m1 s0     activations +1    the peak: 2
    I m0 s0     activations -1, operands +1
    W m0 s0     operands -1
    B m1 s0     activations -1
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple, TypeVar

from chimera_ir.ir.kinds import ON_HOST_UNITS, ON_WORKER, Counted, Kind, Value
from chimera_ir.ir.levels import Header, Program, Quantity, Schedule
from chimera_ir.ir.ops import Compute, Instruction, Micro, Operation, Stage, WaitMove, singles
from chimera_ir.ir.streams import computes, turn_in
from chimera_ir.ir.turns import Turn, moved, unroll

# Decides where a lane waits for memory that moves between the worker and its host, that is for offloads and reloads.
#
#     worker 0:                    worker 0:
#       F m0 s0                      F m0 s0
#       offload m0 s0                offload m0 s0         (launched: the lane goes on)
#       F m1 s0                      F m1 s0
#       offload m1 s0                wait offload m0 s0
#       F m2 s0                      offload m1 s0
#       reload m0 s0                 F m2 s0
#       B m0 s0                      wait offload m1 s0
#                                    reload m0 s0
#                                    wait reload m0 s0
#                                    B m0 s0
#
# A lane waits for any move before the next operation on the same micro-batch and stage. It also waits for the oldest
# offload before an operation with which it would keep more activations than the declared bound. So a copy has all the
# time that memory allows. If no bound is declared, the bound is what the lane would keep if it waited for each offload
# after the next operation that occupies the lane. The lanes of a stream wait where its turn does in the steady state.
# `live` counts what is kept by these waits, `net` lets operations wait for the moves, and `lower` writes the waits as
# lines.

MoveStep = Compute | WaitMove
"""A step of a lane at which what it keeps may change: an operation, or the wait for a move."""

MoveWaits = Mapping[int, Sequence[int]]
"""Maps a place of a lane to the moves that the lane waits for before it, each by its own place in the lane.

The key ``len(lane)`` stands for the end of the lane.
"""


def waits_of(header: Header, lane: Sequence[Operation]) -> MoveWaits:
    """Returns where a lane waits for its moves, by the rule at the top of this file.

    A lane that shows some updates of a stream waits where the turn of the stream does.
    """
    if not any(operation.kind.moves for operation in lane):
        return {}
    if header.asynchronous:
        turn = turn_in(header, singles(lane))
        shown = _shown(header, singles(lane), turn) if turn else None
        if shown is not None:
            return shown
    return _waits(header, lane)


def _waits(header: Header, lane: Sequence[Operation]) -> MoveWaits:
    moving = next(operation.parts[0] for operation in lane if operation.kind.moves)
    worker = header.worker(moving.micros[0], moving.stage)
    declared = [bound.limits[worker] for bound in header.bounds if bound.quantity is Quantity.ACTIVATIONS]
    limit = int(min(declared) * header.units_of_m_a) if declared else _MovingLane(header, lane, None).peak
    return _MovingLane(header, lane, limit).waits


def _shown(header: Header, lane: Sequence[Compute], turn: Turn) -> MoveWaits | None:
    """The waits of a lane that shows the first updates of the stream with this ``turn``.

    None if the first updates of that stream are other operations than those of ``lane``.
    """
    lines = [*computes(turn.instructions)]
    waits = waits_in_turn(header, lines)
    steps: list[Instruction] = []
    for place, line in enumerate(lines):
        steps += [*waited(lines, waits.get(place, ()), header.period), line]
    launched: dict[tuple[Kind, tuple[Micro, ...], Stage], int] = {}
    places: dict[int, list[int]] = {}
    place = 0
    for step in unroll(header, Turn(tuple(steps)), header.updates):
        assert isinstance(step, Compute | WaitMove)
        move = step.kind, step.micros, step.stage
        if isinstance(step, WaitMove):
            places.setdefault(place, []).append(launched[move])
            continue
        if place == len(lane) or move != (lane[place].kind, lane[place].micros, lane[place].stage):
            return None
        launched[move] = place
        place += 1
    return places if place == len(lane) else None


class _MovingLane:
    """A walk along a lane: where it waits for its moves (``waits``), and the most activations that it keeps (``peak``).

    With a ``limit``, in `Header.units_of_m_a`, the lane waits for an offload only where it would otherwise keep more;
    without one, after the next operation that occupies the lane.
    """

    def __init__(self, header: Header, lane: Sequence[Operation], limit: int | None) -> None:
        self._header, self._lane = header, lane
        self.waits: dict[int, list[int]] = {}
        self.peak = self._kept = 0
        # The moves under way by micro-batch and stage, and the offloads among them, as they were launched.
        self._under_way: dict[tuple[Micro, Stage], int] = {}
        self._leaving: dict[int, None] = {}
        for place, operation in enumerate(lane):
            self._wait(place, dict.fromkeys(self._under_way[c] for c in _cells(operation) if c in self._under_way))
            made, freed = made_and_freed(header, operation)
            while limit is not None and self._leaving and self._kept + made > limit:
                self._wait(place, [next(iter(self._leaving))])
            self._kept += made
            self.peak = max(self.peak, self._kept)
            if operation.kind.moves:
                self._under_way.update(dict.fromkeys(_cells(operation), place))
                self._leaving |= {place: None} if leaves(operation) else {}
                continue
            self._kept -= freed
            self._wait(place + 1, [] if limit is not None else [*self._leaving])
        self._wait(len(lane), dict.fromkeys(self._under_way.values()))

    def _wait(self, before: int, moves: Iterable[int]) -> None:
        for move in moves:
            self.waits.setdefault(before, []).append(move)
            for cell in _cells(self._lane[move]):
                self._under_way.pop(cell, None)
            if move in self._leaving:
                del self._leaving[move]
                self._kept -= made_and_freed(self._header, self._lane[move])[1]


def made_and_freed(header: Header, operation: Operation) -> tuple[int, int]:
    """How much memory an operation adds to the worker when it starts, and how much it frees when it ends.

    Both are in units of which M_a has `Header.units_of_m_a`. An operation that makes one value and frees another, as
    `I` makes operands and frees activations, only swaps them: it adds nothing and frees nothing.
    """
    made = freed = 0
    for part in operation.parts:
        size, kind = header.length(part.micros) * header.sizes[part.stage], part.kind
        added = sum(value.counted in ON_WORKER for value in kind.makes)
        removed = sum(value.counted in ON_WORKER for value in kind.frees)
        made += size * max(0, added - removed)
        freed += size * max(0, removed - added)
    return made, freed


def waits_in_turn(header: Header, operations: Sequence[Operation]) -> MoveWaits:
    """Where a turn of a stream waits for moves in the steady state; ``operations`` are those of the turn.

    Places are counted from the first operation of the turn, so the moves of earlier turns have negative places.
    """
    if not any(operation.kind.moves for operation in operations):
        return {}
    steps = _until_settled(header, singles(operations))
    start = len(steps) - len(operations)
    waits = _waits(header, steps).items()
    return {before - start: [move - start for move in moves] for before, moves in waits if start <= before < len(steps)}


def _until_settled(header: Header, turn: Sequence[Compute]) -> list[Compute]:
    """The operations of the first turns of a stream, until a turn waits for moves as all later turns do.

    That is so soon after the warm-up: the oldest offload that may still be under way then depends only on the turn
    before.
    """
    turns = [micro // header.period for operation in turn for micro in operation.micros]
    settled = max(turns) - 2 * min(turns) + 2
    numbers = range(-max(turns), settled + 1)
    later = ((operation, moved(operation.micros, n * header.period)) for n in numbers for operation in turn)
    return [replace(operation, micros=micros) for operation, micros in later if min(micros) >= 0]


def most_kept(header: Header, lane: Sequence[Operation], limit: int) -> int:
    """The most activations that a lane keeps, in `Header.units_of_m_a`.

    The lane waits for an offload only where it would otherwise keep more than ``limit``. Of a stream, ``lane`` is the
    turn.
    """
    steps = _until_settled(header, singles(lane)) if header.asynchronous and lane else lane
    return _MovingLane(header, steps, limit).peak


def leaves(move: Operation) -> bool:
    """Whether a move is an offload, so that what it moves leaves the worker."""
    return any(part.kind.offloads for part in move.parts)


def _cells(operation: Operation) -> Iterator[tuple[Micro, Stage]]:
    return ((micro, part.stage) for part in operation.parts for micro in part.micros)


def waited(lane: Sequence[Operation], moves: Iterable[int], period: int = 0) -> Iterator[WaitMove]:
    """Yields the lines that wait for some moves of a lane; ``moves`` are their places in it.

    If the lane is a turn of a stream with this ``period``, places of earlier turns are negative.
    """
    for turn, place in (divmod(move, len(lane)) for move in moves):
        for part in lane[place].parts:
            yield WaitMove(part.kind, moved(part.micros, turn * period), part.stage, part.origin)


def with_waits(header: Header, lane: Sequence[Operation]) -> Iterator[MoveStep]:
    """Yields the operations of a lane (a pair as its two sides) and, where the lane waits for its moves, the waits."""
    waits = waits_of(header, lane)
    for place, operation in enumerate(lane):
        yield from waited(lane, waits.get(place, ()))
        yield from operation.parts
    yield from waited(lane, waits.get(len(lane), ()))


K = TypeVar("K")
T = TypeVar("T")


class Highest(NamedTuple):
    """The highest total when changes are added up in order, and the index of the ``change`` that first reaches it."""

    amount: int
    change: int


def highest_by_key(changes: Iterable[tuple[K, int]]) -> dict[K, Highest]:
    """Adds up changes, each (key, amount added), in order; returns the highest total that each key reaches.

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
    """Yields changes as (key, amount): first those that make what exists when a turn begins, then those of the turn.

    ``changes`` are those of one turn of a stream, each (key, amount added, turn of the thing, counted from this one).
    Each thing is added once and freed once. If a turn adds a thing of turn i and frees one of turn j, i - j things
    exist when a turn begins.

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
    """The most things of each key that exist at once; a lifetime is a key, a start and an end.

    Lifetimes that do not end after their start do not count.

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
"""A change to what a stage keeps: the step that makes it, the unit that is counted, and how much is added.

The step is an operation or the wait for a move of memory. An amount of `Header.units` is a whole micro-batch.
"""


def changes(
    header: Header, lane: Iterable[MoveStep], units: Collection[Counted] = tuple(Counted)
) -> Iterator[KeptChange]:
    """Yields the changes of the amounts that a lane keeps, in order, each (operation or wait, unit, amount added).

    Only values in ``units`` count, and that some operation frees. What an operation makes is added before what it frees
    is subtracted, since both exist while it runs. Operands are added last: they take the place of the activations that
    are freed. What a move frees is subtracted where the lane has waited for the move.
    """
    effects = _effects(header.kinds, tuple(units), header.slice_lengths)
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
    """Whether a change of what is kept belongs to the end of its operation (``step``), not to the start.

    That holds for all that is freed, and for operands, which take the place of freed activations.
    """
    return amount < 0 or (unit is Counted.OPERANDS and not step.kind.moves)


def timed_changes(
    header: Header, steps: Iterable[tuple[MoveStep, T, T]], units: Collection[Counted]
) -> Iterator[tuple[T, MoveStep, Counted, int]]:
    """Yields the changes of `changes` with their times, each (time, step, unit, amount).

    ``steps`` are those of a lane with start and end; at the launch of a move, and at the wait for it, both are equal.
    """
    for step, start, end in steps:
        for _, unit, amount in changes(header, (step,), units):
            yield end if is_at_end(step, unit, amount) else start, step, unit, amount


def waiting(header: Header) -> dict[Kind, int]:
    """By how many values each kind of operation changes what its stage keeps of a micro-batch: made less freed.

    Carries, and values in host memory, do not count.
    """
    values = (value for kind in header.kinds for value in kind.keeps_in_slice)
    units = dict.fromkeys(value.counted for value in values if value.counted not in ON_HOST_UNITS)
    effects = _effects(header.kinds, tuple(units), (1,) * header.slices)
    return {kind: sum(per_micro for _, per_micro in effects[kind][0]) for kind in header.kinds}


_Effects = tuple[tuple[Counted, int], ...]
"""The changes that an operation makes, in order, each as (unit, amount).

The amount is that of one micro-batch or, with slices, the length of a slice.
"""


@cache
def _effects(
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
    """The slice that made ``value``, which an operation on slice ``place`` frees."""
    return place - value.slices_on if value in kind.reads else place


class Peak(NamedTuple):
    """The most that a lane keeps at any time, and the first step with which it keeps so much, if any.

    The ``amount`` is in units of which M_a has `Header.units_of_m_a`.
    """

    amount: int
    at: MoveStep | None


def peaks(level: Schedule | Program, *units: Counted) -> tuple[Peak, ...]:
    """The most that each worker keeps at any time of all that is counted in any of ``units``.

    All stages of the worker are added up, each with its share. A pair counts as its forward, then its backward, so what
    both need is there at once. What a move takes away is kept until the lane has waited for the move (`waits_of`).
    """
    by_lane: list[Peak] = []
    for steps in _steps(level):
        counted = list(changes(level.header, steps, units))
        sized = (amount * level.header.size(unit, step.stage) for step, unit, amount in counted)
        amounts = list(accumulate(sized, initial=0))
        reached = amounts.index(max(amounts))
        by_lane.append(Peak(amounts[reached], counted[reached - 1][0] if reached else None))
    return tuple(by_lane)


def _steps(level: Schedule | Program) -> Iterator[Iterable[MoveStep]]:
    if isinstance(level, Program):
        return (parts.steps for parts in level.parts)
    return map(singles if level.header.lanes_only else partial(with_waits, level.header), level.lanes)


def activations(level: Schedule | Program) -> tuple[Peak, ...]:
    """The most live micro-batches on each worker, added up over stages (`peaks`).

    A micro-batch is live on a stage from its forward, or from its recomputation if the stage recomputes, until no later
    operation there needs anything of it. What is on the host does not count.
    """
    return peaks(level, *ON_WORKER)


def on_host(level: Schedule | Program) -> tuple[Peak, ...]:
    """The most micro-batches of each worker whose activations or operands are in host memory (`peaks`)."""
    return peaks(level, *ON_HOST_UNITS)


def inputs(level: Schedule | Program) -> tuple[Peak, ...]:
    """The most inputs that the stages of each worker keep for recomputation (`peaks`)."""
    return peaks(level, Counted.INPUT)


def between_halves(level: Schedule | Program) -> tuple[Peak, ...]:
    """The most micro-batches of each worker between the two halves of a split backward (`peaks`)."""
    return peaks(level, Counted.OPERANDS)


def whole(header: Header, peaks: Iterable[Peak]) -> tuple[Fraction, ...]:
    """The amounts of peaks in M_a (section 3.3), so that a whole micro-batch on a stage whose share is 1 is 1."""
    return tuple(Fraction(peak.amount, header.units_of_m_a) for peak in peaks)
