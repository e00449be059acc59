"""Rule "repeats": all workers repeat their turns in step, so proofs for the updates shown hold for any number.

Every lane of a stream is one turn over and over; the lanes of a plan are first shown to be such turns. What the rules
check in a single lane (open waits, stashes, slots) follows from its lines, so it repeats with the lines.

A test shows that the state of all workers together repeats, too. It plays the lanes up to a cut after a turn of the
steady state, and again up to a cut one turn later. The second run must come exactly one turn further on every worker.
Posting never blocks and no event is undone, so the next turn does the same, and so on.

A program with fewer updates than shown lacks whole micro-batches and whole updates. If their lines are left out of an
order in which no wait blocks, still no wait blocks.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from chimera_ir.diagnostics.catalogue.schedule import BreaksTurn, NoTurn, StateDiffers
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Header, Program, Schedule
from chimera_ir.ir.ops import NOWHERE, Instruction, Operation, singles
from chimera_ir.ir.streams import ProgramStream, turn_in
from chimera_ir.ir.text.printer import line
from chimera_ir.ir.turns import lines_before, unroll
from chimera_ir.verify.transport import replay


def repeats(schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields a diagnostic for each lane that does not repeat one turn, at the first line that breaks the turn.

    The schedule is a complete and placed view of a stream.
    """
    for number, lane in enumerate(schedule.lanes):
        yield from _lane(schedule.header, Worker(number), lane)


def _lane(header: Header, worker: Worker, lane: Sequence[Operation]) -> Iterator[Diagnostic]:
    turn = turn_in(header, singles(lane))
    if turn is None:
        yield NoTurn(lane[0].origin if lane else NOWHERE, worker, header.period // header.parts)
        return
    for instruction, wanted in zip_longest(lane, unroll(header, turn, header.updates)):
        if instruction != wanted:
            origin = (instruction or lane[-1]).origin
            yield BreaksTurn(
                origin, worker, header.period // header.parts, _shown(header, instruction), _shown(header, wanted)
            )
            return


def _shown(header: Header, instruction: Instruction | None) -> str:
    return line(instruction, header) if instruction else "nothing"


def state_repeats(stream: ProgramStream, program: Program) -> Iterator[Diagnostic]:
    """Yields a diagnostic of the first worker that does not get exactly one turn further if the cut is one turn later.

    ``program`` is a view of the stream, which shows all that ever happens and has no errors by all other rules.
    """
    # The steady state is in the middle: before it the pipes fill, after it they run empty.
    middle = program.header.updates // stream.header.per_turn // 2
    starts = [lines_before(stream.header, turn, middle, program.header.updates) for turn in stream.turns]
    lengths = [len(turn.instructions) for turn in stream.turns]
    before = replay(program, starts).places
    after = replay(program, [start + length for start, length in zip(starts, lengths, strict=True)]).places
    for number, length in enumerate(lengths):
        if after[number] - before[number] != length:
            stopped = program.lanes[number][min(after[number], len(program.lanes[number]) - 1)]
            yield StateDiffers(stopped.origin, Worker(number), line(stopped, program.header))
            return
