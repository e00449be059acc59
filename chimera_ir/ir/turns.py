"""Lanes that repeat: a turn of the steady state, and every other turn as that one moved in time.

The lane of an asynchronous level is a sequence without beginning and end, of which only what is about the micro-batches
and the updates of the instance is there. So warm-up and drain need no description of their own: they are turns of which
a part is left out. A turn takes ``period`` micro-batches; from one to the next every micro-batch moves on by as many,
every version by the updates that they make, and a receive goes round the slots of its shelf.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, assert_never

from chimera_ir.ir.ids import Micro, Slot, Stage, Version
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Drop,
    Instruction,
    Message,
    Recv,
    Send,
    Stash,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
)

Shelf = tuple[Stage, Stage]
"""The slots of the messages between two stages in one direction, on the receiving worker."""


class Ring(NamedTuple):
    """How a shelf is used: ``messages`` a turn, put into ``slots`` slots one after the other, round and round."""

    messages: int
    slots: int


class Extent(NamedTuple):
    """What an instruction is about: the first and last of its micro-batches, or its update twice."""

    first: int
    last: int
    of_updates: bool


class Initial(NamedTuple):
    """Where the initial weights of a stage are stashed and dropped: where versions of these numbers are, 0 or less.

    The first micro-batches read version 0 in place of versions below it. Where some of those are kept for longer than
    version 0 is, the initial weights are kept as they are.
    """

    stash: int
    drop: int


@dataclass(frozen=True, slots=True)
class Body:
    """One turn of a lane in the steady state: the one that begins with micro-batch ``turn * period``."""

    turn: int
    instructions: tuple[Instruction, ...]
    rings: Mapping[Shelf, Ring]


_TALK = (Send, Recv, WaitSend, WaitRecv)


def updates_a_turn(header: Header) -> int:
    """How many updates a turn makes."""
    return header.period // header.per_update


def extent(instruction: Instruction) -> Extent:
    """What an instruction is about: where that is left out, so is the instruction."""
    if isinstance(instruction, _TALK):
        micros = instruction.message.micros
    elif isinstance(instruction, Compute):
        micros = instruction.micros
    elif isinstance(instruction, Stash | Drop):
        return Extent(instruction.version, instruction.version, of_updates=True)
    else:
        return Extent((instruction.version or 0) - 1, (instruction.version or 0) - 1, of_updates=True)
    first = micros[0]
    return Extent(first, first, False) if len(micros) == 1 else Extent(min(micros), max(micros), False)


def body(header: Header, lane: Sequence[Instruction]) -> Body | None:
    """The turn in the middle of an asynchronous lane, from a compute operation to the same one a turn later.

    What is done in preparation of the first operation comes with it. None if the lane has no such turn.
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
    again = moved(lane[opening], header.period, updates_a_turn(header))
    closing = next((i for i in range(opening + 1, len(lane)) if lane[i] == again), None)
    if closing is None:
        return None
    lead = _lead(lane, opening)
    instructions = tuple(lane[opening - lead : closing - lead])
    return Body(turn, instructions, _rings(lane, instructions))


def unroll(header: Header, lane: Body, updates: int) -> Iterator[Instruction]:
    """A lane as it is for so many updates: every turn, without what is about none of their micro-batches.

    No version is below 0: the first micro-batches read the initial weights.
    """
    return (instruction for _, instruction in by_turn(header, lane, updates))


def by_turn(header: Header, lane: Body, updates: int) -> Iterator[tuple[int, Instruction]]:
    """The instructions of `unroll`, each with the number of its turn."""
    per_turn, micro_batches = updates_a_turn(header), updates * header.per_update
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


def initial(header: Header, lane: Body) -> dict[Stage, Initial]:
    """The stages whose initial weights are not kept as version 0 of the steady state would be."""
    per_turn = updates_a_turn(header)
    places = {
        (type(instruction), instruction.stage, instruction.version % per_turn): (instruction.version, place)
        for place, instruction in enumerate(lane.instructions)
        if isinstance(instruction, Step | Stash | Drop) and instruction.version is not None
    }

    def at(kind: type[Step | Stash | Drop], stage: Stage, version: int) -> tuple[int, int] | None:
        """The turn, from this one, of the line about a version, and its place there."""
        line = places.get((kind, stage, version % per_turn))
        return None if line is None else ((version - line[0]) // per_turn, line[1])

    lasts: dict[Stage, dict[int, tuple[int, int]]] = {}
    for place, instruction in enumerate(lane.instructions):
        if not isinstance(instruction, Compute) or instruction.version is None:
            continue
        step = at(Step, instruction.stage, 1)
        for turns in range(-(-instruction.version // per_turn), min(instruction.micros) // header.period + 1):
            version = instruction.version - turns * per_turn
            dropped = at(Drop, instruction.stage, version)
            if step is not None and dropped is not None and step < (-turns, place):
                lasts.setdefault(instruction.stage, {})[version] = dropped
    initials = {
        stage: Initial(max(versions), max(versions, key=versions.__getitem__)) for stage, versions in lasts.items()
    }
    return {stage: kept for stage, kept in initials.items() if kept.drop}


def lowest(known: Mapping[Stage, Initial], instruction: Instruction) -> int:
    """What an instruction that is there is about at least, a micro-batch or an update; then all from 1 on."""
    match instruction:
        case Stash(stage):
            return known[stage].stash if stage in known else 0
        case Drop(stage):
            return known[stage].drop if stage in known else 0
        case _:
            return 0


def _turns(header: Header, lane: Body, updates: int, known: Mapping[Stage, Initial]) -> range:
    """The turns that have something to do if there are so many updates, from first to last."""
    per_turn = updates_a_turn(header)
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


def longer(program: Program, updates: int) -> Program:
    """A program of so many updates that follow one another without a barrier.

    An asynchronous program shows more updates of its stream, or fewer; a synchronous one becomes one long update, in
    which micro-batches and sums are numbered on.

    Raises
    ------
    ValueError
        If an asynchronous program shows no turn of its steady state.
    """
    old = program.header
    count = updates * old.per_update
    if old.asynchronous:
        bodies = [body(old, lane) for lane in program.lanes]
        if None in bodies:
            raise ValueError("the program shows no turn of a steady state")
        pipes = tuple(replace(pipe, micros=further(old, pipe.micros, count)) for pipe in old.pipes)
        header = replace(old, micro_batches=count, updates=updates, pipes=pipes)
        return Program(header, tuple(tuple(unroll(old, turn, updates)) if turn else () for turn in bodies))
    every = range(updates)
    again = [tuple(Micro(m + u * old.per_update) for u in every for m in pipe.micros) for pipe in old.pipes]
    pipes = tuple(replace(pipe, micros=micros) for pipe, micros in zip(old.pipes, again, strict=True))
    return Program(
        replace(old, micro_batches=count, pipes=pipes),
        tuple(tuple(moved(line, u * old.per_update, u) for u in every for line in lane) for lane in program.lanes),
    )


def further(header: Header, micros: Sequence[Micro], count: int) -> tuple[Micro, ...]:
    """The micro-batches of an asynchronous pipe below a number: those that are at the same place in their turn."""
    places = {micro % header.period for micro in micros}
    return tuple(Micro(micro) for micro in range(count) if micro % header.period in places)


def later(header: Header, instruction: Instruction, turns: int) -> Instruction:
    """An instruction so many turns later, in the same slot; versions are not below 0."""
    return moved(instruction, turns * header.period, turns * updates_a_turn(header))


def _in_ring(ring: Ring, recv: Recv, by: int) -> Recv:
    """A receive of a body, so many turns later, in the slot of that turn."""
    slot = Slot((recv.slot + by * ring.messages) % ring.slots)
    return Recv(recv.message, recv.source, slot, recv.origin)


def shelf(message: Message) -> Shelf:
    """Where a message is received."""
    return message.source, message.target


def moved(instruction: Instruction, micros: int, updates: int = 0) -> Instruction:
    """An instruction about micro-batches and updates that are so many later, in the same slot.

    No version that is read or kept is below 0.
    """
    match instruction:
        case Compute(kind, numbers, stage, origin, version):
            read = None if version is None else Version(max(version + updates, 0))
            return Compute(kind, _later(numbers, micros), stage, origin, read)
        case Send(message, to, origin):
            return Send(_of_later(message, micros), to, origin)
        case Recv(message, source, slot, origin):
            return Recv(_of_later(message, micros), source, slot, origin)
        case WaitSend(message, origin) | WaitRecv(message, origin):
            return type(instruction)(_of_later(message, micros), origin)
        case AllReduce(stage, origin, version) | WaitAllReduce(stage, origin, version) | Step(stage, origin, version):
            return type(instruction)(stage, origin, Version((version or 0) + updates))
        case Stash(stage, version, origin) | Drop(stage, version, origin):
            return type(instruction)(stage, Version(max(version + updates, 0)), origin)
        case _:
            assert_never(instruction)


def _of_later(message: Message, by: int) -> Message:
    return Message(_later(message.micros, by), message.source, message.target)


def _later(micros: tuple[Micro, ...], by: int) -> tuple[Micro, ...]:
    return tuple([Micro(micro + by) for micro in micros]) if len(micros) > 1 else (Micro(micros[0] + by),)


_PREPARING = (Recv, WaitRecv, WaitSend, WaitAllReduce, Stash, Step)


def _lead(lane: Sequence[Instruction], opening: int) -> int:
    """How many instructions before an operation prepare it."""
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
