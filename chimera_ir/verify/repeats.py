"""Rule "repeats": the lanes of an asynchronous level repeat, so proofs for the updates shown hold for any number.

A lane repeats if it consists of one of its turns, moved in time, without the instructions about micro-batches and
updates outside the instance (`ir.turns`). All else that the rules check in a single lane (open waits, stashes, slots)
follows from its lines, so it repeats with them.

The state of all workers repeats if it passes this test: play the lanes, cut after a turn of the steady state, and play
them again, cut one turn later; the second run must come exactly one turn further on every worker. Posting never blocks
and no event is undone, so the next turn does the same, and so on. With fewer updates than shown, whole micro-batches
and whole updates are missing; an order in which no wait blocks is still such an order without them.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile, zip_longest

from chimera_ir.diagnostics.catalogue.repeats import BreaksTurn, NoTurn, StateDiffers
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Header, Program, Schedule
from chimera_ir.ir.ops import NOWHERE, Instruction
from chimera_ir.ir.text.printer import line
from chimera_ir.ir.turns import Body, body, by_turn, unroll
from chimera_ir.verify.transport import replay


def repeats(level: Schedule | Program) -> Iterator[Diagnostic]:
    """The lanes that do not repeat, each at its first line that differs from its turn.

    Parameters
    ----------
    level
        Asynchronous; complete and placed.
    """
    for number, lane in enumerate(level.lanes):
        yield from _lane(level.header, Worker(number), lane)


def _lane(header: Header, worker: Worker, lane: Sequence[Instruction]) -> Iterator[Diagnostic]:
    turn = body(header, lane)
    if turn is None:
        yield NoTurn(lane[0].origin if lane else NOWHERE, worker, header.period)
        return
    for instruction, wanted in zip_longest(lane, unroll(header, turn, header.updates)):
        if instruction != wanted:
            origin = (instruction or lane[-1]).origin
            yield BreaksTurn(origin, worker, header.period, _shown(instruction), _shown(wanted))
            return


def _shown(instruction: Instruction | None) -> str:
    return line(instruction) if instruction else "nothing"


def state_repeats(program: Program) -> Iterator[Diagnostic]:
    """The first worker whose state does not repeat with the state of the others.

    Parameters
    ----------
    program
        Asynchronous; without errors by all other rules.
    """
    bodies = [body(program.header, lane) for lane in program.lanes]
    starts = [0 if turn is None else _start(program.header, turn) for turn in bodies]
    lengths = [0 if turn is None else len(turn.instructions) for turn in bodies]
    before = replay(program, starts).places
    after = replay(program, [start + length for start, length in zip(starts, lengths, strict=True)]).places
    for number, length in enumerate(lengths):
        if after[number] - before[number] != length:
            stopped = program.lanes[number][min(after[number], len(program.lanes[number]) - 1)]
            yield StateDiffers(stopped.origin, Worker(number), line(stopped))
            return


def _start(header: Header, turn: Body) -> int:
    """The number of instructions of a lane before its body."""
    return sum(1 for _ in takewhile(lambda entry: entry[0] < turn.turn, by_turn(header, turn, header.updates)))
