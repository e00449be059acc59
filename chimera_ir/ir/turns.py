"""Lanes that repeat: a turn of the steady state, and every other turn as that turn moved in time.

The lane of an asynchronous level is a part of an endless sequence: the instructions about the micro-batches and updates
of the instance. So warm-up and drain need no description of their own: they are turns with some instructions left out.
A turn takes ``period`` micro-batches. From each turn to the next, micro-batches move on by ``period``, versions by the
updates that so many micro-batches make, and receives go round the slots of their shelf.
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
    """The use of a shelf: ``messages`` per turn, which take the ``slots`` slots in turn, round and round."""

    messages: int
    slots: int


class Extent(NamedTuple):
    """The first and last micro-batch that an instruction is about, or its update twice."""

    first: int
    last: int
    of_updates: bool


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


_TALK = (Send, Recv, WaitSend, WaitRecv)


def updates_a_turn(header: Header) -> int:
    """The number of updates that a turn makes."""
    return header.period // header.per_update


def extent(instruction: Instruction) -> Extent:
    """The micro-batches or the update of an instruction, which is left out where these are not in the instance."""
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
    again = moved(lane[opening], header.period, updates_a_turn(header))
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
    """The stages whose initial weights are not kept like version 0 of the steady state."""
    per_turn = updates_a_turn(header)
    places = {
        (type(instruction), instruction.stage, instruction.version % per_turn): (instruction.version, place)
        for place, instruction in enumerate(lane.instructions)
        if isinstance(instruction, Step | Stash | Drop) and instruction.version is not None
    }

    def at(kind: type[Step | Stash | Drop], stage: Stage, version: int) -> tuple[int, int] | None:
        """The turn of the line about a version, counted from the body's turn, and the line's place in it."""
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
    """The lowest micro-batch or update for which an instruction is in a lane; it is there for all from 1 on as well."""
    match instruction:
        case Stash(stage):
            return known[stage].stash if stage in known else 0
        case Drop(stage):
            return known[stage].drop if stage in known else 0
        case Compute() | Send() | Recv() | WaitSend() | WaitRecv() | AllReduce() | WaitAllReduce() | Step():
            return 0
        case _:
            assert_never(instruction)


def _turns(header: Header, lane: Body, updates: int, known: Mapping[Stage, Initial]) -> range:
    """The turns of a number of updates that have any instruction, from first to last."""
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
    """A program of a number of updates that follow one another without a barrier.

    An asynchronous program then shows more updates of its stream, or fewer. A synchronous program becomes one long
    update, in which the numbers of micro-batches and sums continue.

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
    """The micro-batches below ``count`` of an asynchronous pipe: those at the places in a turn where ``micros`` are."""
    places = {micro % header.period for micro in micros}
    return tuple(Micro(micro) for micro in range(count) if micro % header.period in places)


def later(header: Header, instruction: Instruction, turns: int) -> Instruction:
    """An instruction a number of turns later, in the same slot; versions are at least 0."""
    return moved(instruction, turns * header.period, turns * updates_a_turn(header))


def _in_ring(ring: Ring, recv: Recv, by: int) -> Recv:
    """A receive of a body ``by`` turns later, in the slot of that turn."""
    slot = Slot((recv.slot + by * ring.messages) % ring.slots)
    return Recv(recv.message, recv.source, slot, recv.origin)


def shelf(message: Message) -> Shelf:
    """The shelf that a message is received into."""
    return message.source, message.target


def moved(instruction: Instruction, micros: int, updates: int = 0) -> Instruction:
    """An instruction with its micro-batches and updates moved by so many, in the same slot.

    A version that is read or kept is at least 0.
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
