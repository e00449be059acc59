"""Lanes as pieces, of which some are loops; and programs at any number of micro-batches, made from a short one.

A lane of a long update is a warm-up, many turns, and a drain. If it is known where further turns may be put into the
lanes of a short program, its *window*, then the lanes of the long program are those of the window, with more rounds of
one loop in each, and with other numbers of micro-batches:

    window                                 program of 1,000 micro-batches
      F m0 s0                                F m0 s0
      for m in 1..4: F m s0, B m-1 s0        for m in 1..1000: F m s0, B m-1 s0
      B m3 s0                                B m999 s0
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar, cast

from chimera_ir.ir import ops
from chimera_ir.ir.levels import Header, OneLine, Program
from chimera_ir.ir.ops import Micro, Recv, Slot
from chimera_ir.ir.turns import Ring, Shelf, renumbered, shelf, shifted

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Straight:
    """A piece of a lane without a loop: instructions one after the other."""

    instructions: tuple[ops.Instruction, ...]

    @property
    def length(self) -> int:
        """The number of instructions."""
        return len(self.instructions)


@dataclass(frozen=True, slots=True)
class Loop:
    """A piece of a lane that repeats ``rounds`` times; ``instructions`` are those of the first round.

    In each further round all micro-batches are ``step`` later. ``rings`` has, by its message in the first round, the
    ring of each receive: the circle of slots that it takes, one in each round.
    """

    instructions: tuple[ops.Instruction, ...]
    rounds: int
    step: int
    rings: Mapping[ops.Message, Ring]

    @property
    def length(self) -> int:
        """The number of instructions of all rounds."""
        return self.rounds * len(self.instructions)

    def in_round(self, number: int) -> Iterator[ops.Instruction]:
        """The instructions of a round."""
        for instruction in self.instructions:
            line = shifted(instruction, number * self.step) if number else instruction
            if type(line) is Recv:
                slot = self.rings[cast("Recv", instruction).message].later(line.slot, number)
                line = Recv(line.message, line.source, slot, line.origin)
            yield line


Piece = Straight | Loop


def unrolled(piece: Piece) -> Iterator[ops.Instruction]:
    """The instructions of a piece, one after the other."""
    if isinstance(piece, Straight):
        return iter(piece.instructions)
    return chain.from_iterable(piece.in_round(number) for number in range(piece.rounds))


def is_in(piece: Piece, lane: Sequence[ops.Instruction]) -> bool:
    """Whether a lane has just the instructions of a piece; as `unrolled` shows, without making these."""
    if isinstance(piece, Straight):
        return piece.instructions == tuple(lane)
    length = len(piece.instructions)
    return len(lane) == piece.length and all(
        _is_later(piece.instructions[place % length], line, piece, place // length) for place, line in enumerate(lane)
    )


def _is_later(first: ops.Instruction, line: ops.Instruction, loop: Loop, number: int) -> bool:
    by = number * loop.step
    facts: tuple[tuple[object, ...], tuple[object, ...]]
    match first, line:
        case ops.Compute(), ops.Compute():
            facts = (first.kind, first.stage, first.version), (line.kind, line.stage, line.version)
        case ops.Send(), ops.Send():
            facts = (first.message.edge, first.to), (line.message.edge, line.to)
        case ops.Recv(), ops.Recv():
            slot = loop.rings[first.message].later(first.slot, number)
            facts = (first.message.edge, first.source, slot), (line.message.edge, line.source, line.slot)
        case ops.WaitSend(), ops.WaitSend():
            facts = (first.message.edge,), (line.message.edge,)
        case ops.WaitRecv(), ops.WaitRecv():
            facts = (first.message.edge,), (line.message.edge,)
        case _:
            return shifted(first, by) == line
    return facts[0] == facts[1] and [micro + by for micro in micros_of(first)] == [*micros_of(line)]


def micros_of(instruction: ops.Instruction) -> tuple[Micro, ...]:
    """The micro-batches that an instruction is about; none of a line about sums, steps and versions."""
    return _MICROS[type(instruction)](instruction)


_MICROS: Mapping[type, Callable[[Any], tuple[Micro, ...]]] = {
    **dict.fromkeys((ops.Send, ops.Recv, ops.WaitSend, ops.WaitRecv), lambda talk: talk.message.micros),
    **dict.fromkeys((ops.Compute, ops.WaitMove), lambda step: step.micros),
    ops.Pair: lambda pair: (*pair.forward.micros, *pair.backward.micros),
    **dict.fromkeys((ops.AllReduce, ops.WaitAllReduce, ops.Step, ops.Stash, ops.Drop), lambda _: ()),
}


SlotsLater = Mapping[Shelf, Mapping[Slot, Slot]]
"""For each shelf, the slot that a receive takes one turn after another receive has taken a slot: a permutation."""


def after_turns(slots: SlotsLater, turns: int) -> SlotsLater:
    """As `SlotsLater`, but for several turns."""
    return {key: _power(later, turns) for key, later in slots.items()}


def _power(later: Mapping[Slot, Slot], times: int) -> Mapping[Slot, Slot]:
    result = {slot: slot for slot in later}
    while times:
        if times % 2:
            result = {slot: later[other] for slot, other in result.items()}
        later, times = {slot: later[other] for slot, other in later.items()}, times // 2
    return result


@dataclass(frozen=True)
class Insertion:
    """Where ``count`` further turns are put into a short program, its window, so that it becomes one for ``header``.

    ``cuts[w]`` are the places in the lane of worker w between which a turn lies; the further ones come after it. A turn
    takes ``step`` micro-batches of each pipe. ``slots[w]`` says how the receives of worker w move on in a turn.
    """

    header: Header
    count: int
    step: int
    cuts: tuple[tuple[int, int], ...]
    slots: tuple[SlotsLater, ...]


class LoopedLane(NamedTuple):
    """A lane as pieces, of which the one at place ``at`` is the loop with the turns."""

    pieces: tuple[Piece, ...]
    at: int


@dataclass(frozen=True, slots=True)
class RolledLane:
    """A lane as pieces; the one at place ``at`` is the loop that has got further turns.

    The first of these turns begins after ``begun`` rounds of the loop, or within the last of them. They take
    ``further`` rounds, each of them ``turn``.
    """

    pieces: tuple[Piece, ...]
    at: int
    begun: int
    further: int
    turn: int

    @property
    def loop(self) -> Loop:
        """The loop with the turns."""
        loop = self.pieces[self.at]
        assert isinstance(loop, Loop)
        return loop

    def rounds(self, least: int = 0) -> tuple[range, range]:
        """The rounds of the loop at its beginning, at ``least`` that many, and those after rounds of whole turns."""
        begun = self.begun + max(0, -(-(least - self.begun) // self.turn)) * self.turn
        every = range(self.loop.rounds)
        return every[:begun], every[max(begun, self.begun + self.further) :]

    def of_window(self, shown: Sequence[T]) -> list[T]:
        """Of something for each instruction that `shown` has with any ``least``, that for those of the window."""
        before = sum(piece.length for piece in self.pieces[: self.at]) + self.begun * len(self.loop.instructions)
        window = sum(piece.length for piece in self.pieces) - self.further * len(self.loop.instructions)
        return [*shown[:before], *shown[len(shown) - (window - before) :]]

    def shown(self, least: int = 0) -> Iterator[ops.Instruction]:
        """The instructions, with those `rounds` alone of the loop; by default, those of the window."""
        for place, piece in enumerate(self.pieces):
            if place == self.at:
                yield from chain.from_iterable(map(self.loop.in_round, chain(*self.rounds(least))))
            else:
                yield from unrolled(piece)


@dataclass(frozen=True, repr=False)
class RolledProgram(OneLine):
    """A program with a flush, its lanes as pieces."""

    header: Header
    lanes: tuple[RolledLane, ...]

    @property
    def unrolled(self) -> Program:
        """The program with all instructions of every round."""
        lanes = (tuple(chain.from_iterable(map(unrolled, lane.pieces))) for lane in self.lanes)
        return Program(self.header, tuple(lanes))

    @property
    def beginning(self) -> Program:
        """The beginning of each lane, until the further turns begin."""
        return Program(
            self.header,
            tuple(
                (
                    *chain.from_iterable(map(unrolled, lane.pieces[: lane.at])),
                    *chain.from_iterable(map(lane.loop.in_round, range(lane.begun))),
                )
                for lane in self.lanes
            ),
        )


class _Numbering:
    """Gives the instructions of a window the numbers that they have in the program with further turns.

    ``turns`` is how many turns come before them in addition.
    """

    def __init__(self, window: Header, insertion: Insertion, turns: int) -> None:
        self._shift = turns * insertion.step
        self._pipes = [pipe.micros for pipe in insertion.header.pipes]
        self._places = {m: (n, place) for n, pipe in enumerate(window.pipes) for place, m in enumerate(pipe.micros)}

    def instruction(self, instruction: ops.Instruction, slots: SlotsLater) -> ops.Instruction:
        """An instruction; a receive takes the slot that comes in the place of its own (`after_turns`)."""
        if not micros_of(instruction):
            return instruction
        line = renumbered(instruction, lambda micros: tuple([self._number(micro) for micro in micros]))
        return replace(line, slot=slots[shelf(line.message)][line.slot]) if isinstance(line, Recv) else line

    def piece(self, piece: Piece, slots: SlotsLater, further: int = 0) -> Piece | None:
        """A piece, with ``further`` rounds if it is a loop; None if the numbers of its rounds do not stay alike."""
        if isinstance(piece, Straight):
            return Straight(tuple([self.instruction(line, slots) for line in piece.instructions]))
        if not all(self._goes_on(micro, piece, further) for line in piece.instructions for micro in micros_of(line)):
            return None
        lines, rings = [self.instruction(line, slots) for line in piece.instructions], dict[ops.Message, Ring]()
        for old, new in zip(piece.instructions, lines, strict=True):
            if isinstance(old, Recv) and isinstance(new, Recv):
                ring, others = piece.rings[old.message], slots[shelf(old.message)]
                rounds = range(min(piece.rounds, ring.slots))
                if any(others[ring.later(old.slot, n)] != ring.later(new.slot, n) for n in rounds):
                    return None
                rings[new.message] = ring
        return Loop(tuple(lines), piece.rounds + further, piece.step, rings)

    def _number(self, micro: Micro) -> Micro:
        pipe, place = self._places[micro]
        return self._pipes[pipe][place + self._shift]

    def _goes_on(self, micro: Micro, loop: Loop, further: int) -> bool:
        """Whether as many micro-batches as the loop has rounds follow one of the first round, by the loop's step."""
        pipe, place = self._places[micro]
        _, following = self._places.get(Micro(micro + loop.step), (pipe, place))
        rounds, by = loop.rounds + further, following - place
        first = place + self._shift
        numbers = self._pipes[pipe][first : first + rounds * by : by] if by > 0 else ()
        start = self._pipes[pipe][first]
        return numbers == tuple(range(start, start + rounds * loop.step, loop.step))


def with_turns(window: Program, lanes: Sequence[LoopedLane], insertion: Insertion) -> RolledProgram | None:
    """The program for the header of an insertion, from the lanes of the window as pieces.

    The result is None if the loop of a lane does not span the turn at its cuts, or its numbers do not go on as they do
    in the window.
    """
    before, after = _Numbering(window.header, insertion, 0), _Numbering(window.header, insertion, insertion.count)
    rolled: list[RolledLane] = []
    for (pieces, at), (start, end), slots in zip(lanes, insertion.cuts, insertion.slots, strict=True):
        loop, low = pieces[at], sum(piece.length for piece in pieces[:at])
        if not isinstance(loop, Loop) or low > start or low + loop.length < end:
            return None
        turn, rest = divmod(end - start, len(loop.instructions))
        further, same, moved = turn * insertion.count, after_turns(slots, 0), after_turns(slots, insertion.count)
        lane = [
            *(before.piece(piece, same) for piece in pieces[:at]),
            before.piece(loop, same, further) if _move_on(loop, turn, slots) else None,
            *(after.piece(piece, moved) for piece in pieces[at + 1 :]),
        ]
        known = [piece for piece in lane if piece is not None]
        # No other loop is as long, so that the number of its rounds tells this one from all others.
        sizes = [(piece.rounds, piece.step) for piece in known if isinstance(piece, Loop)]
        if rest or len(known) < len(lane) or sizes.count((loop.rounds + further, loop.step)) > 1:
            return None
        begun = -(-(end - low) // len(loop.instructions))
        rolled.append(RolledLane(tuple(known), at, begun, further, turn))
    return RolledProgram(insertion.header, tuple(rolled))


def _move_on(loop: Loop, turn: int, slots: SlotsLater) -> bool:
    """Whether the receives of a loop take the slots that come one turn later after ``turn`` rounds."""
    receives = ((ring, slots[shelf(message)], message) for message, ring in loop.rings.items())
    first = {line.message: line.slot for line in loop.instructions if isinstance(line, Recv)}
    return all(
        later[ring.later(first[message], number)] == ring.later(first[message], number + turn)
        for ring, later, message in receives
        for number in range(ring.slots)
    )
