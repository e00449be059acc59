"""Finds the turns of a scheme with a flush (a warm-up, equal turns, a drain), and takes most of them out.

    worker 0 of 1F1B, D=2, N=1000          its window, 996 turns of one micro-batch less
      F m0  F m1  B m0                       F m0  F m1  B m0
      F m2  B m1                             F m2  B m1              a turn: F m, B m-1
      F m3  B m2                             F m3  B m2
      ..                                     B m3
      F m999  B m998
      B m999

The lists of all operations are made as numbers, not as objects: of each worker the clock, the micro-batch and the
*place* of each operation (its line of the text, its stage, and all else that does not change with the micro-batch). A
turn of a list is a number of operations after which the places repeat, while all micro-batches and all clocks have
grown by the same amounts. The window is a plan as the text gives it, with fewer micro-batches.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, compress, pairwise
from math import lcm
from operator import itemgetter, sub
from typing import NamedTuple

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.elaborate.elaborate import Outline
from chimera_ir.elaborate.grid import Grid, UndefinedOnGrid
from chimera_ir.elaborate.operations import Single, single_of
from chimera_ir.elaborate.pipes import Shape
from chimera_ir.ir.kinds import Kind
from chimera_ir.ir.levels import Header, Plan, Schedule
from chimera_ir.ir.ops import NOWHERE, Clock, Compute, Micro, Operation, Pair, Planned, Stage
from chimera_ir.source import Span
from chimera_ir.syntax import ast

_FEWEST = 8
"""The fewest turns of a list that are worth being taken out."""

_LENGTHS = 64
"""The most lengths of a turn that are tried at a place of a list."""


class Part(NamedTuple):
    """The work of an operation of a place: on ``size`` micro-batches, of which the first is ``ahead`` of the entry's.

    A pair has two parts. ``pipe`` is a number in the header.
    """

    kind: Kind
    pipe: int
    stage: int
    ahead: int
    size: int


class Place(NamedTuple):
    """The facts that entries of a list share: the line of the text, and the parts of an operation."""

    origin: Span
    parts: tuple[Part, ...]


class Entry(NamedTuple):
    """An operation in the list of its worker: when it comes, the number of its place, and its first micro-batch.

    ``order`` is twice the clock, and one more if the operation is no move of memory: a move comes first on its clock.
    Micro-batches count within the pipe, slices one by one.
    """

    order: int
    place: int
    micro: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """The part of a list that repeats: entries ``start`` to ``stop``, in turns of ``length`` entries.

    From turn to turn micro-batches are ``step`` later, and orders ``rise`` higher.
    """

    start: int
    stop: int
    length: int
    step: int
    rise: int

    @property
    def turns(self) -> int:
        """The number of whole turns."""
        return (self.stop - self.start) // self.length

    def in_turns_of(self, step: int) -> "Stretch":
        """This stretch in turns of ``step`` micro-batches, a multiple of its own."""
        times = step // self.step
        return Stretch(self.start, self.stop, self.length * times, step, self.rise * times)


@dataclass(frozen=True)
class Window:
    """A plan with ``left_out`` turns less than ``header`` asks for; each turn has ``step`` micro-batches of each pipe.

    ``cuts[w]`` are the operations of worker w with which a turn begins, and the next one: further turns come between
    the two. Each list has ``before`` turns before the second, and ``after`` turns after it.
    """

    plan: Plan
    header: Header
    left_out: int
    step: int
    cuts: tuple[tuple[Operation, Operation], ...]
    before: int
    after: int


@dataclass(frozen=True)
class Lists:
    """All operations of a scheme: ``lanes[w]`` has those of worker w in the order in which it runs them.

    ``stretches[w]`` is what repeats in the list, in turns of the same micro-batches on every worker.
    """

    header: Header
    places: Sequence[Place]
    lanes: Sequence[Sequence[Entry]]
    stretches: Sequence[Stretch]

    @property
    def turns(self) -> int:
        """The number of turns that every list has."""
        return min(stretch.turns for stretch in self.stretches)

    def window(self, kept: int, back: int) -> Window | None:
        """The window in which the list with the fewest turns has ``kept`` of them; None if it has no more by far.

        The others come in before the last ``back - 1``.
        """
        shorter = self._shorter(kept, back)
        if shorter is None:
            return None
        header, lanes = shorter
        planned = [[_planned(entry, self.places[entry.place], header) for entry in lane] for lane in lanes]
        cuts = []
        for lane, stretch in zip(planned, self.stretches, strict=True):
            start = self._cut(stretch, kept, back)
            if start + stretch.length == len(lane):
                return None
            cuts.append((lane[start].operation, lane[start + stretch.length].operation))
        plan, step = Plan(header, tuple(chain.from_iterable(planned))), self.stretches[0].step
        return Window(plan, self.header, self.turns - kept, step, tuple(cuts), kept - back + 1, back - 1)

    def forwards(self, kept: int) -> Schedule | None:
        """The operations with a forward in the window that keeps so many turns; None if there is no such window."""
        shorter = self._shorter(kept, 1)
        if shorter is None:
            return None
        header, lanes = shorter
        opening = [any(part.kind.opens for part in place.parts) for place in self.places]
        return Schedule(
            header,
            tuple(
                tuple(
                    [
                        _planned(entry, self.places[entry.place], header).operation
                        for entry in lane
                        if opening[entry.place]
                    ]
                )
                for lane in lanes
            ),
        )

    def _cut(self, stretch: Stretch, kept: int, back: int) -> int:
        return stretch.start + (stretch.turns - (self.turns - kept) - back) * stretch.length

    def _shorter(self, kept: int, back: int) -> tuple[Header, list[list[Entry]]] | None:
        """The header of a window, and its lists."""
        left_out, step = self.turns - kept, self.stretches[0].step
        if left_out < _FEWEST:
            return None
        cuts = [self._cut(stretch, kept, back) for stretch in self.stretches]
        # In the numbering the micro-batches are left out that come next after those of the turn at the cuts.
        first = [len(pipe.micros) for pipe in self.header.pipes]
        lanes: list[list[Entry]] = []
        for lane, cut, stretch in zip(self.lanes, cuts, self.stretches, strict=True):
            for _, place, micro in lane[cut : cut + stretch.length]:
                for part in self.places[place].parts:
                    first[part.pipe] = min(first[part.pipe], micro + part.ahead)
            end, rise = cut + stretch.length, left_out * stretch.rise
            after = lane[end + left_out * stretch.length :]
            later = [Entry(order - rise, place, micro - left_out * step) for order, place, micro in after]
            lanes.append([*lane[:end], *later])
        header = _without(self.header, first, left_out * step)
        return (header, lanes) if header and self._known(header, lanes) else None

    def _known(self, header: Header, lanes: Iterable[Sequence[Entry]]) -> bool:
        """Whether the lists have no other micro-batches than the header; they have if what is open grows."""
        counts = [len(pipe.micros) for pipe in header.pipes]
        return all(
            0 <= micro + part.ahead <= counts[part.pipe] - part.size
            for lane in lanes
            for _, place, micro in lane
            for part in self.places[place].parts
        )


def _without(header: Header, first: Sequence[int], count: int) -> Header | None:
    """The header without ``count`` micro-batches of each pipe, from its ``first`` on; the others move up."""
    kept = [(*pipe.micros[:at], *pipe.micros[at + count :]) for pipe, at in zip(header.pipes, first, strict=True)]
    if any(len(micros) + count != len(pipe.micros) for micros, pipe in zip(kept, header.pipes, strict=True)):
        return None
    numbers = {micro: Micro(number) for number, micro in enumerate(sorted(chain.from_iterable(kept)))}
    pipes = [
        replace(pipe, micros=tuple([numbers[micro] for micro in micros]))
        for pipe, micros in zip(header.pipes, kept, strict=True)
    ]
    return replace(header, micro_batches=len(numbers), pipes=tuple(pipes))


def _planned(entry: Entry, place: Place, header: Header) -> Planned:
    def compute(part: Part) -> Compute:
        start = entry.micro + part.ahead
        micros = header.pipes[part.pipe].micros[start : start + part.size]
        return Compute(part.kind, micros, Stage(part.stage), place.origin)

    parts = place.parts
    operation = compute(parts[0]) if len(parts) == 1 else Pair(compute(parts[0]), compute(parts[1]), place.origin)
    return Planned(Clock(entry.order // 2), header.pipes[parts[0].pipe].workers[parts[0].stage], operation)


def lists_of(outline: Outline) -> Lists | None:
    """The lists of a scheme in which every list has turns; None if any has none, or anything may be wrong with them.

    Streams have none, nor have micro-batches of different weights or recomputation, or operations without clocks, nor
    graphs of stages that take several micro-batches together.
    """
    header = outline.header
    uneven = header.weights or any(pipe.recomputed for pipe in header.pipes)
    subjects = (subject for shape in outline.shapes for line in shape.operations for subject in line.subjects)
    if (
        outline.endless is not None
        or uneven
        or (header.named and any(isinstance(subject.micro, ast.Range) for subject in subjects))
        or any(line.clock is None for s in outline.shapes for line in s.operations)
    ):
        return None
    places: dict[Place, int] = {}
    lanes: list[list[Entry]] = [[] for _ in range(header.workers)]
    try:
        for number, shape in enumerate(outline.shapes):
            for sliced in shape.by_slice():
                for line in shape.operations:
                    _listed(line, number, sliced, outline, places, lanes)
    except (UndefinedOnGrid, Rejected):
        return None
    for lane in lanes:
        lane.sort(key=itemgetter(0))
        if any(entry.order == later.order for entry, later in pairwise(lane)):
            return None
    stretches = _together(lanes, [*places], header.parts)
    if stretches is None:
        return None
    moves = any(part.kind.moves for place in places for part in place.parts)
    return Lists(replace(header, moves=True) if moves else header, [*places], lanes, stretches)


def _listed(
    line: ast.Operation,
    number: int,
    shape: Shape,
    outline: Outline,
    places: dict[Place, int],
    lanes: Sequence[list[Entry]],
) -> None:
    """Adds the operations of a line to the lists; raises `UndefinedOnGrid` or ``Rejected`` if one may be wrong."""
    assert line.clock is not None
    of_group = shape.on_group(*line.formulas)
    grid = Grid(of_group.steps, of_group.stage_range, of_group.names, of_group.scope)
    holds = None if line.guard is None else grid.values(line.guard)

    def values(formula: ast.Expression) -> list[int]:
        column = grid.values(formula)
        return column if holds is None else list(compress(column, holds))

    by_name = {each.name: (each, pipe) for each, pipe in zip(outline.shapes, outline.header.pipes, strict=True)}
    numbers = {each.name: place for place, each in enumerate(outline.shapes)}
    singles = [single_of(subject, shape, outline.header.pipes[number], by_name) for subject in line.subjects]
    # Of a pair, the forward first; both are on the same worker, and on other micro-batches.
    singles.sort(key=lambda single: not single.subject.kind.opens)
    columns = [_column(single, values) for single in singles]
    kinds = [(single.subject.kind, numbers[single.shape.name], single.pipe.workers) for single in singles]
    (_, _, workers), (micros, _, stages) = kinds[0], columns[0]
    orders = [2 * clock + (not line.subjects[0].kind.moves) for clock in values(line.clock)]
    known: dict[tuple[tuple[int, int, int], ...], int] = {}
    for at, (order, micro) in enumerate(zip(orders, micros, strict=True)):
        key = tuple([(further[at] - micro, sizes[at], places_of[at]) for further, sizes, places_of in columns])
        place = known.get(key)
        if place is None:
            parts = tuple(
                [
                    Part(kind, pipe, stage, ahead, size)
                    for (kind, pipe, _), (ahead, size, stage) in zip(kinds, key, strict=True)
                ]
            )
            _check_pair(parts, [located[part.stage] for (_, _, located), part in zip(kinds, parts, strict=True)])
            place = known[key] = places.setdefault(Place(line.span, parts), len(places))
        lanes[workers[stages[at]]].append(Entry(order, place, micro))


def _column(single: Single, values: Callable[[ast.Expression], list[int]]) -> tuple[list[int], list[int], list[int]]:
    """The first micro-batches, the numbers of micro-batches and the stages of a column; raises `UndefinedOnGrid`."""
    subject, shape = single.subject, single.shape
    starts, stages, slots = values(subject.ends[0]), values(subject.stage), [0]
    stops = values(subject.ends[1]) if len(subject.ends) > 1 else [start + 1 for start in starts]
    if subject.slice is not None:
        slots = values(subject.slice)
    if not isinstance(shape.micro_range, range):
        raise UndefinedOnGrid
    low, high = shape.start, shape.stop
    inside = all(low <= start < stop <= high for start, stop in {*zip(starts, stops, strict=True)})
    known = {*stages} <= {*shape.stage_range} and {*slots} <= {*range(shape.slices)}
    if not inside or not known or (subject.slice is None) != (shape.slices == 1):
        raise UndefinedOnGrid
    if subject.slice is not None:
        starts = [(start - low) * shape.slices + slot for start, slot in zip(starts, slots, strict=True)]
        return starts, [1] * len(starts), stages
    return [start - low for start in starts], list(map(sub, stops, starts)), stages


def _check_pair(parts: Sequence[Part], workers: Sequence[int]) -> None:
    """Raises `UndefinedOnGrid` if two operations cannot be a pair."""
    if len(parts) == 2:
        first, second = parts
        apart = first.pipe != second.pipe or abs(second.ahead) >= first.size
        if len({*workers}) > 1 or first.size != second.size or not apart:
            raise UndefinedOnGrid


def stretches_in(schedule: Schedule) -> list[Stretch] | None:
    """The stretches of a schedule's lanes, in turns of the same micro-batches; None if a lane has no turns."""
    header = schedule.header
    local = {m: (number, place) for number, pipe in enumerate(header.pipes) for place, m in enumerate(pipe.micros)}
    places: dict[Place, int] = {}
    lanes: list[list[Entry]] = []
    for lane in schedule.lanes:
        entries: list[Entry] = []
        for operation in lane:
            firsts = [(local[part.micros[0]], part) for part in operation.parts]
            (_, micro), _ = firsts[0]
            parts = [Part(part.kind, pipe, part.stage, first - micro, part.size) for (pipe, first), part in firsts]
            entries.append(Entry(0, places.setdefault(Place(NOWHERE, tuple(parts)), len(places)), micro))
        lanes.append(entries)
    return _together(lanes, [*places], header.parts)


def _together(lanes: Sequence[Sequence[Entry]], places: Sequence[Place], parts: int) -> list[Stretch] | None:
    by_lane = [_stretch(lane, places) for lane in lanes]
    stretches = [stretch for stretch in by_lane if stretch is not None]
    if len(stretches) < len(by_lane):
        return None
    step = lcm(parts, *(stretch.step for stretch in stretches))
    stretches = [stretch.in_turns_of(step) for stretch in stretches]
    aligned = _aligned(lanes, stretches)
    turns = [min(stretch.turns for stretch in each) for each in (stretches, aligned)]
    return aligned if turns[0] == turns[1] else stretches


def _aligned(lanes: Sequence[Sequence[Entry]], stretches: Sequence[Stretch]) -> list[Stretch]:
    """The stretches from the moment on at which the last of them begins: then none waits for what comes after a cut."""
    latest = max(lane[stretch.start].order for lane, stretch in zip(lanes, stretches, strict=True))
    starts = [
        bisect_left(lane, latest, s.start, s.stop, key=itemgetter(0)) for lane, s in zip(lanes, stretches, strict=True)
    ]
    return [replace(stretch, start=start) for stretch, start in zip(stretches, starts, strict=True)]


def _stretch(lane: Sequence[Entry], places: Sequence[Place]) -> Stretch | None:
    """The longest stretch of a list around one of a few places; None if there is none of several turns."""
    counted = [[part for part in place.parts if part.kind.opens or part.kind.sums] for place in places]
    of_each = {(part.pipe, part.stage, part.kind.opens) for entry in lane for part in counted[entry.place]}
    work = [*accumulate((sum(part.size for part in counted[entry.place]) for entry in lane), initial=0)]
    best: Stretch | None = None
    for part in (4, 3, 5, 2, 6):
        at = len(lane) * part // 8
        for stretch in _stretches(lane, at, work, len(of_each)):
            if best is None or stretch.stop - stretch.start > best.stop - best.start:
                best = stretch
            if 2 * (best.stop - best.start) > len(lane):
                return best
    return best


def _stretches(lane: Sequence[Entry], at: int, work: Sequence[int], kinds: int) -> Iterator[Stretch]:
    """Yields the stretches around a place, those with the shortest turns first.

    In a turn the forwards of each stage and pipe get as many micro-batches further as any others, and so do what adds
    up their gradients: ``kinds`` of operations, of which ``work`` has been done before each place.
    """
    order, place, micro = lane[at] if at < len(lane) else (0, 0, 0)
    tried = 0
    for other in range(at + 1, len(lane)):
        if lane[other].place != place:
            continue
        length, step, rise = other - at, lane[other].micro - micro, lane[other].order - order
        tried += 1
        if step > 0 and work[other] - work[at] == kinds * step:
            start = stop = at
            while stop + length < len(lane) and _repeats(lane, stop, length, step, rise):
                stop += 1
            while start and _repeats(lane, start - 1, length, step, rise):
                start -= 1
            if stop + length - start > 2 * length:
                yield Stretch(start, stop + length, length, step, rise)
        if tried == _LENGTHS:
            return


def _repeats(lane: Sequence[Entry], at: int, length: int, step: int, rise: int) -> bool:
    order, place, micro = lane[at]
    return lane[at + length] == (order + rise, place, micro + step)
