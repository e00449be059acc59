"""Lanes of the ranks: their recorded operations, each matched with the program's instruction at its place."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice, takewhile
from operator import ge

from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import Instruction
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.ir.turns import served_update, unroll
from chimera_ir.trace.trace_files import BadTrace, Lane, LaneSpan, Load, Rank, RecordedOperation, Trace, recorded, words


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
        yield served_update(header, instruction), instruction


def ahead(trace: Trace, rank: Rank, lane: Lane) -> Iterator[tuple[int, Instruction]]:
    """Yields the instructions that a rank still had to run after its recorded ``lane``, each with its update."""
    done = sum(not isinstance(span.operation, Load) for span in lane)
    return islice(instructions(trace.program, rank.worker, trace.about.updates), done, None)


def whole_updates(trace: Trace, lanes: Sequence[Lane]) -> int:
    """Number of updates of which every rank recorded every operation."""
    # A lane alternates between at most as many updates as there are workers.
    everything, workers = trace.about.updates, trace.header.workers
    firsts = []
    for rank, lane in zip(trace.ranks, lanes, strict=True):
        rest = (update for update, _ in ahead(trace, rank, lane))
        first = next(rest, everything)
        firsts.append(min([first, *takewhile(partial(ge, first + workers), rest)]))
    return min(firsts)


def _lane(trace: Trace, rank: Rank) -> Iterator[LaneSpan]:
    """Yields a rank's recorded operations with the instructions that they match, and its loads of data."""
    loads: list[RecordedOperation] = []
    operations = iter(rank.operations)
    following = next(operations, None)
    for update, instruction in instructions(trace.program, rank.worker, trace.about.updates):
        # Loading data is no instruction: it is recorded wherever it happens.
        while following is not None and _loads(following):
            yield LaneSpan(Load(following.text), update, following.start, following.end)
            following = next(operations, None)
        if following is None:
            if rank.ended is None:
                missing = f"'{words(instruction, trace.header)}' and what follows it are missing from its file"
                raise BadTrace(f"rank {rank.rank}: {missing}")
            return
        first_text, *other_texts = recorded(instruction)
        if (following.update, following.text) != (update, first_text):
            raise BadTrace(
                f"rank {rank.rank}, update {update + 1}: recorded '{following.text}' of update {following.update + 1}, "
                f"where the program has '{words(instruction, trace.header)}'; "
                f"the trace and {trace.about.scheme} do not belong together"
            )
        start, end = following.start, following.end
        following = next(operations, None)
        # An operation over several micro-batches is recorded one by one, perhaps with loading in between.
        for text in other_texts:
            while following is not None and _loads(following):
                loads.append(following)
                following = next(operations, None)
            if following is None or (following.update, following.text) != (update, text):
                break
            end = following.end
            following = next(operations, None)
        yield LaneSpan(instruction, update, start, end)
        yield from (LaneSpan(Load(load.text), update, load.start, load.end) for load in loads if load.start >= end)
        loads = []
    if following is not None:
        raise BadTrace(f"rank {rank.rank}: recorded '{following.text}' after the last operation of the program")


def _loads(operation: RecordedOperation) -> bool:
    return _LOAD.fullmatch(operation.text) is not None


_LOAD = re.compile(r"load (?:input|target) m[0-9]{1,18}")
