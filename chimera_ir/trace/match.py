"""Lanes of the ranks: their recorded operations, each matched with the program's instruction at its place."""

import re
from collections.abc import Iterator

from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import Instruction
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.ir.turns import extent, unroll
from chimera_ir.trace.spans import Lane, LaneSpan, Load, recorded, words
from chimera_ir.trace.trace_files import BadTrace, Rank, RecordedOperation, Trace


def lanes(trace: Trace) -> tuple[Lane, ...]:
    """Lanes of all ranks, as far as recorded; raises `BadTrace` if a rank did not do what the program says."""
    return tuple(tuple(_lane(trace, rank)) for rank in trace.ranks)


def instructions(program: Program | ProgramStream, worker: int, updates: int) -> Iterator[tuple[int, Instruction]]:
    """Yields the instructions of a worker in ``updates`` updates, each with the update that it serves."""
    header = program.header
    if isinstance(program, Program):
        lane = program.lanes[worker]
        for update in range(updates if lane else 0):
            yield from ((update, instruction) for instruction in lane)
        return
    for instruction in unroll(header, program.turns[worker], updates):
        first, _, of_updates = extent(instruction)
        yield (first if of_updates else first // header.per_update), instruction


def _lane(trace: Trace, rank: Rank) -> Iterator[LaneSpan]:
    """Yields a rank's recorded operations with the instructions that they match, and its loads of data."""
    loads: list[RecordedOperation] = []
    operations = iter(rank.operations)
    ahead = next(operations, None)
    for update, instruction in instructions(trace.program, rank.worker, trace.about.updates):
        # Loading data is no instruction: it is recorded wherever it happens.
        while ahead is not None and _loads(ahead):
            yield LaneSpan(Load(ahead.text), update, ahead.start, ahead.end)
            ahead = next(operations, None)
        if ahead is None:
            if rank.ended is None:
                missing = f"'{words(instruction)}' and what follows it are missing from its file"
                raise BadTrace(f"rank {rank.rank}: {missing}")
            return
        first_text, *other_texts = recorded(instruction)
        if (ahead.update, ahead.text) != (update, first_text):
            raise BadTrace(
                f"rank {rank.rank}, update {update}: recorded '{ahead.text}' of update {ahead.update}, where the "
                f"program has '{words(instruction)}'; the trace and {trace.about.scheme} do not belong together"
            )
        start, end = ahead.start, ahead.end
        ahead = next(operations, None)
        # An operation over several micro-batches is recorded one by one, perhaps with loading in between.
        for text in other_texts:
            while ahead is not None and _loads(ahead):
                loads.append(ahead)
                ahead = next(operations, None)
            if ahead is None or (ahead.update, ahead.text) != (update, text):
                break
            end = ahead.end
            ahead = next(operations, None)
        yield LaneSpan(instruction, update, start, end)
        yield from (LaneSpan(Load(load.text), update, load.start, load.end) for load in loads if load.start >= end)
        loads = []
    if ahead is not None:
        raise BadTrace(f"rank {rank.rank}: recorded '{ahead.text}' after the last operation of the program")


def _loads(operation: RecordedOperation) -> bool:
    return _LOAD.fullmatch(operation.text) is not None


_LOAD = re.compile(r"load (?:input|target) m[0-9]{1,18}")
