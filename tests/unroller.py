"""The program of some updates of a stream, made from the schedule of some updates: the oracle for turns.

It lowers a schedule that has been made longer on both sides, cuts the middle out, and finds a turn by looking for what
comes again; so it has to guess where the initial weights are kept. The compiler lowers one turn and unrolls it.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from chimera_ir.flow.net import net_of
from chimera_ir.ir.kinds import Kind
from chimera_ir.ir.levels import Header, Program, Schedule
from chimera_ir.ir.ops import (
    Compute,
    Drop,
    Instruction,
    Micro,
    Recv,
    Slot,
    Stage,
    Stash,
    Step,
    Version,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
    WeightGroup,
)
from chimera_ir.ir.turns import Ring, Shelf, extent, shelf, shifted
from chimera_ir.lower.comm import Posting, Traffic, communicate
from chimera_ir.lower.lower import with_inserted
from chimera_ir.lower.updates import Duration, Insertions
from tests.unrolled_updates import update


class Initial(NamedTuple):
    """The versions, 0 or less, at whose places the initial weights of a stage are stashed and dropped.

    The first micro-batches read version 0 in place of versions below 0. Where the steady state keeps one of those
    versions longer than version 0, the initial weights are kept as long.
    """

    stash: int
    drop: int


@dataclass(frozen=True, slots=True)
class Body:
    """One turn of a lane in the steady state: the turn that begins with micro-batch ``turn * period``."""

    turn: int
    instructions: tuple[Instruction, ...]
    rings: Mapping[Shelf, Ring]


def body(header: Header, lane: Sequence[Instruction]) -> Body | None:
    """The turn in the middle of an asynchronous lane, from a compute operation to the same operation a turn later.

    The turn begins with the instructions that prepare its first operation. None if the lane has no such turn.
    """
    turn = header.micro_batches // header.period // 2
    start = turn * header.period
    wanted = range(start, start + header.period)
    opening = next(
        (
            i
            for i, instruction in enumerate(lane)
            if isinstance(instruction, Compute) and extent(instruction).first in wanted
        ),
        None,
    )
    if opening is None:
        return Body(turn, (), {}) if not lane else None
    again = moved(lane[opening], header.period, header.per_turn)
    closing = next((i for i in range(opening + 1, len(lane)) if lane[i] == again), None)
    if closing is None:
        return None
    lead = _lead(lane, opening)
    instructions = tuple(lane[opening - lead : closing - lead])
    return Body(turn, instructions, _rings(lane, instructions))


def unroll(header: Header, lane: Body, updates: int) -> Iterator[Instruction]:
    """A lane for a number of updates: every turn, without the instructions about none of their micro-batches.

    No version is below 0, as the first micro-batches read the initial weights.
    """
    return (instruction for _, instruction in by_turn(header, lane, updates))


def by_turn(header: Header, lane: Body, updates: int) -> Iterator[tuple[int, Instruction]]:
    """The instructions of `unroll`, each with the number of its turn."""
    per_turn, micro_batches = header.per_turn, updates * header.per_update
    known = initial(header, lane)
    listed = [(instruction, *extent(instruction), lowest(known, instruction)) for instruction in lane.instructions]
    for turn in _turns(header, lane, updates, known):
        by = turn - lane.turn
        micros, versions = by * header.period, by * per_turn
        for instruction, first, last, of_updates, least in listed:
            offset, end = (versions, updates) if of_updates else (micros, micro_batches)
            if (first + offset > 0 or first + offset == least) and last + offset < end:
                made = moved(instruction, micros, versions)
                yield turn, _in_ring(lane.rings[shelf(made.message)], made, by) if isinstance(made, Recv) else made


def initial(header: Header, lane: Body) -> dict[WeightGroup, Initial]:
    """The stages whose initial weights are not kept like version 0 of the steady state."""
    per_turn = header.per_turn
    places = {
        (type(instruction), instruction.group, instruction.version % per_turn): (instruction.version, place)
        for place, instruction in enumerate(lane.instructions)
        if isinstance(instruction, Step | Stash | Drop) and instruction.version is not None
    }

    def at(kind: type[Step | Stash | Drop], group: WeightGroup, version: int) -> tuple[int, int] | None:
        """The turn of the line about a version, counted from the body's turn, and the line's place in it."""
        line = places.get((kind, group, version % per_turn))
        return None if line is None else ((version - line[0]) // per_turn, line[1])

    lasts: dict[WeightGroup, dict[int, tuple[int, int]]] = {}
    for place, instruction in enumerate(lane.instructions):
        if not isinstance(instruction, Compute) or instruction.version is None:
            continue
        for group in ((instruction.stage,), *(tie for tie in header.ties if instruction.stage in tie)):
            step = at(Step, group, 1)
            for turns in range(-(-instruction.version // per_turn), min(instruction.micros) // header.period + 1):
                version = instruction.version - turns * per_turn
                dropped = at(Drop, group, version)
                if step is not None and dropped is not None and step < (-turns, place):
                    lasts.setdefault(group, {})[version] = dropped
    initials = {
        group: Initial(max(versions), max(versions, key=versions.__getitem__)) for group, versions in lasts.items()
    }
    return {group: kept for group, kept in initials.items() if kept.drop}


def lowest(known: Mapping[WeightGroup, Initial], instruction: Instruction) -> int:
    """The lowest micro-batch or update for which an instruction is in a lane; it is there for all from 1 on as well."""
    if isinstance(instruction, Stash | Drop) and instruction.group in known:
        kept = known[instruction.group]
        return kept.stash if isinstance(instruction, Stash) else kept.drop
    return 0


def _turns(header: Header, lane: Body, updates: int, known: Mapping[WeightGroup, Initial]) -> range:
    """The turns of a number of updates that have any instruction, from first to last."""
    per_turn = header.per_turn
    bounds = [
        (first - least - lane.turn * per_turn, last - lane.turn * per_turn, per_turn, updates)
        if of_updates
        else (
            first - lane.turn * header.period,
            last - lane.turn * header.period,
            header.period,
            updates * header.per_update,
        )
        for (first, last, of_updates), least in (
            (extent(instruction), lowest(known, instruction)) for instruction in lane.instructions
        )
    ]
    if not bounds:
        return range(0)
    start = min(-(first // step) for first, _, step, _ in bounds)
    stop = max(-((last - end) // step) for _, last, step, end in bounds)
    return range(start, max(start, stop))


def further(header: Header, micros: Sequence[Micro], count: int) -> tuple[Micro, ...]:
    """The micro-batches below ``count`` of an asynchronous pipe: those at the places in a turn where ``micros`` are."""
    places = {micro % header.period for micro in micros}
    return tuple(Micro(micro) for micro in range(count) if micro % header.period in places)


def later(header: Header, instruction: Instruction, turns: int) -> Instruction:
    """An instruction a number of turns later, in the same slot; versions are at least 0."""
    return moved(instruction, turns * header.period, turns * header.per_turn)


def _in_ring(ring: Ring, recv: Recv, by: int) -> Recv:
    """A receive of a body ``by`` turns later, in the slot of that turn."""
    slot = Slot((recv.slot + by * ring.messages) % ring.slots)
    return Recv(recv.message, recv.source, slot, recv.origin)


def moved(instruction: Instruction, micros: int, updates: int = 0) -> Instruction:
    """An instruction with its micro-batches and updates moved by so many; versions to read or keep are at least 0."""
    later = shifted(instruction, micros, updates)
    if isinstance(later, Compute | Stash | Drop) and later.version is not None:
        return replace(later, version=Version(max(later.version, 0)))
    return later


_PREPARING = (Recv, WaitRecv, WaitSend, WaitAllReduce, Stash, Step)


def _lead(lane: Sequence[Instruction], opening: int) -> int:
    """The number of instructions right before an operation that prepare it."""
    lead = 0
    while lead < opening and isinstance(lane[opening - lead - 1], _PREPARING):
        lead += 1
    return lead


def _rings(lane: Sequence[Instruction], instructions: Sequence[Instruction]) -> dict[Shelf, Ring]:
    messages: dict[Shelf, int] = {}
    slots: dict[Shelf, int] = {}
    for instruction in instructions:
        if isinstance(instruction, Recv):
            messages[shelf(instruction.message)] = messages.get(shelf(instruction.message), 0) + 1
    for instruction in lane:
        if isinstance(instruction, Recv):
            slots[shelf(instruction.message)] = max(slots.get(shelf(instruction.message), 0), instruction.slot + 1)
    return {key: Ring(count, slots[key]) for key, count in messages.items()}


@dataclass(frozen=True, slots=True)
class Margin:
    """The headers of an instance and of its wide form, and by how many turns the wide form moves micro-batches."""

    header: Header
    wide: Header
    turns: int

    def within(self, micro: Micro) -> bool:
        """Whether a micro-batch of the wide schedule belongs to the instance."""
        return 0 <= micro - self.turns * self.header.period < self.header.micro_batches

    def durations(self, duration: Duration) -> Duration:
        """The durations of the wide schedule's operations, which are those of the instance's first turn."""
        known: dict[tuple[Kind, Micro, Stage], int] = {}

        def same(operation: Compute) -> int:
            turn, place = divmod(operation.micros[0], self.header.period)
            key = operation.kind, Micro(place), operation.stage
            if key not in known:
                first = later(self.header, operation, -turn)
                assert isinstance(first, Compute)
                known[key] = duration(first)
            return known[key]

        return same

    def cut(self, lane: Sequence[Instruction]) -> tuple[Instruction, ...]:
        """A wide lane without its margins, micro-batches and versions numbered as in the instance."""
        micros, updates = self.turns * self.header.period, self.turns * self.header.per_turn
        known = self._initial(lane)
        kept: list[Instruction] = []
        for instruction in lane:
            first, last, of_updates = extent(instruction)
            start, count = (updates, self.header.updates) if of_updates else (micros, self.header.micro_batches)
            if (first > start or first - start == lowest(known, instruction)) and last < start + count:
                kept.append(moved(instruction, -micros, -updates))
        return tuple(kept)

    def _initial(self, lane: Sequence[Instruction]) -> dict[WeightGroup, Initial]:
        """The stages whose initial weights are not kept like version 0 of the wide lane."""
        turn = body(self.wide, lane)
        if turn is None:
            return {}
        instructions = tuple(later(self.header, instruction, -self.turns) for instruction in turn.instructions)
        return initial(self.header, Body(turn.turn - self.turns, instructions, turn.rings))


def widened(schedule: Schedule) -> tuple[Schedule, Margin]:
    """The wide form of a schedule whose lanes repeat: its margin is over twice as long as what is under way at once.

    Its versions are those of the steady state, as if there had been updates before the first.
    """
    header = schedule.header
    bodies = [body(header, lane) or Body(0, (), {}) for lane in schedule.lanes]
    margin = 2 * _span(header, bodies) + 2
    turns = -(-header.micro_batches // header.period) + 2 * margin
    wide = replace(
        header,
        micro_batches=turns * header.period,
        updates=turns * header.per_turn,
        pipes=tuple(replace(pipe, micros=further(header, pipe.micros, turns * header.period)) for pipe in header.pipes),
    )
    lanes = [
        unroll(
            wide,
            Body(
                turn.turn + margin, tuple(later(header, instruction, margin) for instruction in turn.instructions), {}
            ),
            wide.updates,
        )
        for turn in bodies
    ]
    return Schedule(wide, tuple(tuple(_computes(lane)) for lane in lanes)), Margin(header, wide, margin)


def _span(header: Header, bodies: Iterable[Body]) -> int:
    """The number of turns over which the micro-batches and versions in one turn of all lanes spread."""
    turns: list[int] = []
    for turn in bodies:
        for instruction in turn.instructions:
            first, last, _ = extent(instruction)
            turns += [first // header.period - turn.turn, last // header.period - turn.turn]
            version = getattr(instruction, "version", None)
            if version is not None:
                turns.append(version // header.per_turn - turn.turn)
    return max(turns, default=0) - min(turns, default=0)


def _computes(lane: Iterable[Instruction]) -> Iterable[Compute]:
    for instruction in lane:
        assert isinstance(instruction, Compute)
        yield instruction


def rings(postings: Iterable[Posting], within: Callable[[Micro], bool]) -> tuple[Slot, ...]:
    """The slot of each posted receive of a lane that repeats: the slots of a shelf are used in turn.

    So the slot of a message follows from the number of the message in its shelf. The first message ``within`` the
    instance has slot 0. A shelf has as many slots as receives are posted from the posting of a message to its last use,
    its own included. Only messages within the instance count, because the margin ends in a drain of its own.
    """
    listed = list(postings)
    numbers: list[tuple[Shelf, int]] = []
    count: Counter[Shelf] = Counter()
    first: dict[Shelf, int] = {}
    shelves: dict[Shelf, list[tuple[int, int]]] = defaultdict(list)
    for (key, before, last_use), posting in zip(_uses(listed), listed, strict=True):
        if within(posting.transfer.message.micros[0]):
            first.setdefault(key, count[key])
            shelves[key].append((before, last_use))
        numbers.append((key, count[key]))
        count[key] += 1
    sizes = {key: _ring(uses) for key, uses in shelves.items()}
    return tuple(Slot((number - first.get(key, 0)) % sizes.get(key, 1)) for key, number in numbers)


def _ring(uses: list[tuple[int, int]]) -> int:
    """The number of slots that a shelf needs if they are used in turn; ``uses`` are in the order of the postings."""
    posted = [before for before, _ in uses]
    return max(bisect_right(posted, last_use) - number for number, (_, last_use) in enumerate(uses))


def _uses(postings: Iterable[Posting]) -> Iterator[tuple[Shelf, int, int]]:
    """The shelf of each posted receive, the place before which it is posted, and the place of its last use."""
    for before, transfer in postings:
        yield shelf(transfer.message), before, transfer.over


def lowered(schedule: Schedule, ahead: int = 1, duration: Duration = lambda _: 1) -> Program:
    """The program of the updates that an asynchronous schedule shows."""
    wide, margin = widened(schedule)
    return Program(schedule.header, tuple(map(margin.cut, _streaming(wide, ahead, duration, margin))))


def _streaming(schedule: Schedule, ahead: int, duration: Duration, margin: Margin) -> Iterator[list[Instruction]]:
    """The lowered lanes of a wide schedule, margins included."""
    traffics = communicate(schedule, ahead)
    updates = update(net_of(schedule), margin.durations(duration))
    for lane, traffic, insertions in zip(schedule.lanes, traffics, updates, strict=True):
        yield _lane(lane, traffic, rings(traffic.postings, margin.within), insertions)


def _lane(
    lane: tuple[Compute, ...], traffic: Traffic, recv_slots: Iterable[Slot], insertions: Insertions
) -> list[Instruction]:
    instructions = [*insertions.after.get(-1, ()), *with_inserted(lane, traffic, recv_slots, insertions, {})]
    instructions += [WaitSend(transfer.message, lane[transfer.produced].origin) for transfer in traffic.unanswered]
    return [*instructions, *insertions.at_end]
