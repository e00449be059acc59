"""The wide form of an asynchronous schedule, with further turns on both sides of each lane, and the way back."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from chimera_ir.ir.ids import Micro, Stage
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute, Instruction, Recv, Send, WaitRecv, WaitSend
from chimera_ir.ir.turns import (
    Body,
    Initial,
    body,
    extent,
    further,
    initial,
    later,
    lowest,
    moved,
    unroll,
    updates_a_turn,
)
from chimera_ir.lower.sync import Duration

_TALK = (Send, Recv, WaitSend, WaitRecv)


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
        known: dict[tuple[type[Compute], Micro, Stage], int] = {}

        def same(operation: Compute) -> int:
            turn, place = divmod(operation.micros[0], self.header.period)
            key = type(operation), Micro(place), operation.stage
            if key not in known:
                first = later(self.header, operation, -turn)
                assert isinstance(first, Compute)
                known[key] = duration(first)
            return known[key]

        return same

    def cut(self, lane: Sequence[Instruction]) -> tuple[Instruction, ...]:
        """A wide lane without its margins, micro-batches and versions numbered as in the instance."""
        micros, updates = self.turns * self.header.period, self.turns * updates_a_turn(self.header)
        known = self._initial(lane)
        kept: list[Instruction] = []
        for instruction in lane:
            first, last, of_updates = extent(instruction)
            start, count = (updates, self.header.updates) if of_updates else (micros, self.header.micro_batches)
            if (first > start or first - start == lowest(known, instruction)) and last < start + count:
                kept.append(moved(instruction, -micros, -updates))
        return tuple(kept)

    def _initial(self, lane: Sequence[Instruction]) -> dict[Stage, Initial]:
        """The stages whose initial weights are not kept like version 0 of the wide lane."""
        turn = body(self.wide, lane)
        if turn is None:
            return {}
        instructions = tuple(later(self.header, instruction, -self.turns) for instruction in turn.instructions)
        return initial(self.header, Body(turn.turn - self.turns, instructions, turn.rings))


@dataclass(frozen=True, slots=True)
class Middle:
    """The middle half of an asynchronous instance, which is in its steady state."""

    header: Header

    def within(self, micro: Micro) -> bool:
        """Whether a micro-batch belongs to the middle half."""
        return self.header.micro_batches <= 4 * micro < 3 * self.header.micro_batches

    def keeps(self, instruction: Instruction) -> bool:
        """Whether an instruction is not about a message, or about one of the middle half."""
        return not isinstance(instruction, _TALK) or self.within(instruction.message.micros[0])


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
        updates=turns * updates_a_turn(header),
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
                turns.append(version // updates_a_turn(header) - turn.turn)
    return max(turns, default=0) - min(turns, default=0)


def _computes(lane: Iterable[Instruction]) -> Iterable[Compute]:
    for instruction in lane:
        assert isinstance(instruction, Compute)
        yield instruction
