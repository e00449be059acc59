"""What the ranks recorded, line by line against the program: each operation is the one that the lane has there."""

import re
from collections.abc import Iterator

from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import Instruction
from chimera_ir.ir.turns import body, extent, unroll
from chimera_ir.trace.read import BadTrace, Rank, Recorded, Trace
from chimera_ir.trace.spans import Lane, Load, Span, recorded, words


def lanes(trace: Trace) -> tuple[Lane, ...]:
    """Every rank's lane, of a run that ended early as far as it came.

    Raises
    ------
    BadTrace
        If a rank did something else than the program says.
    """
    return tuple(tuple(_lane(trace, rank)) for rank in trace.ranks)


def instructions(program: Program, worker: int, updates: int) -> Iterator[tuple[int, Instruction]]:
    """What a worker does in so many updates, with the update that each instruction serves."""
    header, lane = program.header, program.lanes[worker]
    if not header.asynchronous:
        for update in range(updates if lane else 0):
            yield from ((update, each) for each in lane)
        return
    turn = body(header, lane)
    if turn is None:
        raise BadTrace(f"worker {worker}: the program shows no turn of a steady state")
    for each in unroll(header, turn, updates):
        first, _, of_updates = extent(each)
        yield (first if of_updates else first // header.per_update), each


def _lane(trace: Trace, rank: Rank) -> Iterator[Span]:
    loads: list[Recorded] = []
    operations = iter(rank.operations)
    ahead = next(operations, None)
    for update, instruction in instructions(trace.program, rank.worker, trace.about.updates):
        while ahead is not None and _loads(ahead):
            yield Span(Load(ahead.text), update, ahead.start, ahead.end)
            ahead = next(operations, None)
        if ahead is None:
            _must_have_ended_early(rank, instruction)
            return
        first, *others = recorded(instruction)
        if (ahead.update, ahead.text) != (update, first):
            raise BadTrace(
                f"rank {rank.rank}, update {update}: recorded '{ahead.text}' of update {ahead.update}, where the "
                f"program has '{words(instruction)}'; the trace and {trace.about.scheme} do not belong together"
            )
        start, end = ahead.start, ahead.end
        ahead = next(operations, None)
        for other in others:
            while ahead is not None and _loads(ahead):
                loads.append(ahead)
                ahead = next(operations, None)
            if ahead is None or (ahead.update, ahead.text) != (update, other):
                break
            end = ahead.end
            ahead = next(operations, None)
        yield Span(instruction, update, start, end)
        yield from (Span(Load(each.text), update, each.start, each.end) for each in loads if each.start >= end)
        loads = []
    if ahead is not None:
        raise BadTrace(f"rank {rank.rank}: recorded '{ahead.text}' after the last operation of the program")


def _loads(operation: Recorded) -> bool:
    return _LOAD.fullmatch(operation.text) is not None


_LOAD = re.compile(r"load (?:input|target) m[0-9]{1,18}")


def _must_have_ended_early(rank: Rank, instruction: Instruction) -> None:
    if rank.ended is None:
        raise BadTrace(f"rank {rank.rank}: '{words(instruction)}' and what follows it are missing from its file")
