"""Reads a schedule of torch.distributed.pipelining as a level: its compute order alone is a schedule, a file with
messages a program.

    0F0,0SEND_F0,0RECV_B0,0B0       worker 0:                        worker 1:
    1RECV_F0,1F0,1B0,1SEND_B0         F m0 s0                          recv m0 s0->s1 from w0 into 0
                                      send m0 s0->s1 to w1             wait recv m0 s0->s1
                                      recv m0 s1->s0 from w1 into 0    F m0 s1
                                      wait recv m0 s1->s0              B m0 s1
                                      wait send m0 s0->s1              all_reduce s1
                                      B m0 s0                          send m0 s1->s0 to w0
                                      all_reduce s0                    wait send m0 s1->s0
                                      wait all_reduce s0               wait all_reduce s1
                                      step s0                          step s1

Sends and receives are posted where the file has them. An operation waits for what it reads, as it does in torch; a send
is waited for where the file says so (WAIT_SEND_F, since torch 2.15), or when a message proves that it is over, as in
`lower.comm`. torch gives messages no tags, so they are matched by their order between two ranks: this is the transport
of in-order queues, and the rule "channels" compares the orders. The sum of a stage's gradients is launched after its
last gradients, that of tied stages at the end; it is waited for at WAIT_REDUCE_GRAD, or at the end.

A file does not say how many stages and micro-batches there are, nor where the stages are: a stage is on the rank that
computes it, and the highest numbers are the last ones. The text may come from anywhere: whatever its content, the
result is a level or diagnostics.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import PurePath

from chimera_ir.diagnostics.catalogue import torchcells as say
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.ir.ids import Micro, Slot, Stage, WeightGroup, Worker
from chimera_ir.ir.kinds import Value
from chimera_ir.ir.levels import Header, Pipe, Program, Schedule
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Instruction,
    Message,
    Operation,
    Pair,
    Recv,
    Send,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
    singles,
)
from chimera_ir.ir.text.printer import absolute, numbered_line
from chimera_ir.lower.buffers import slots
from chimera_ir.lower.comm import AHEAD, Posting, Traffic, Transfer, communicate
from chimera_ir.source import Source, Span
from chimera_ir.torch_text.cells import (
    REDUCE_GRAD,
    REDUCTIONS,
    TRANSFERS,
    UNSHARD,
    WAIT_REDUCE_GRAD,
    WAITS,
    Cell,
    MessageCell,
    WeightsCell,
    rows_of,
)

_Line = Operation | Send | Recv | WaitSend | WaitAllReduce
"""An instruction that a cell stands for; the other ones follow from it."""


def parse(source: Source, ties: Callable[[int], tuple[WeightGroup, ...]] = lambda _: ()) -> Schedule | Program:
    """The level that a file describes; the origin of every operation and message is its cell.

    ``ties`` returns the groups of stages that share parameters, which no file says, for a number of stages.

    Raises `Rejected` with all malformed cells; if there are none, with the stages that have no place or several; if
    there are none either, with the cells about messages or weights that cannot stand there.
    """
    rows = rows_of(source)
    operations = [[cell for cell in row if isinstance(cell, Compute | Pair)] for row in rows]
    header = _header(source, rows, operations)
    header = replace(header, ties=ties(header.stages))
    schedule = Schedule(header, tuple(map(tuple, operations)))
    mistakes = [mistake for row in rows for mistake in (*_misplaced(header, row), *_upkeep(row))]
    if mistakes:
        raise Rejected(mistakes)
    talks = any(isinstance(cell, MessageCell) for row in rows for cell in row)
    # Fewer operations than a forward and a backward of each micro-batch on each stage: the rule "complete" says which
    # are missing. To look for them in messages would take memory in proportion to the highest numbers of the file.
    operations_due = 2 * header.stages * header.micro_batches
    return program_of(schedule, rows) if talks and len(singles(chain(*operations))) >= operations_due else schedule


def program_of(schedule: Schedule, rows: Sequence[Sequence[Cell]]) -> Program:
    """The program that torch runs for rows with the operations of a schedule and their messages."""
    lanes = zip(rows, communicate(schedule, AHEAD), strict=True)
    return Program(schedule.header, tuple(tuple(_lane(schedule.header, w, *lane)) for w, lane in enumerate(lanes)))


def _header(source: Source, rows: Sequence[Sequence[Cell]], lanes: Sequence[Sequence[Operation]]) -> Header:
    """The header of a file; raises `Rejected` unless every rank computes, and every stage is on one rank."""
    ranks: dict[Stage, tuple[int, Span]] = {}
    mistakes: list[Diagnostic] = []
    for rank, lane in enumerate(lanes):
        if not lane:
            start = source.offset(rank + 1, 1)
            mistakes.append(say.EmptyRow(Span(start, start + len(source.line(rank + 1))), rank))
        for stage, operation in {part.stage: part for part in reversed(singles(lane))}.items():
            first_rank, span = ranks.setdefault(stage, (rank, operation.origin))
            if first_rank != rank:
                mistakes.append(say.StageTwice(operation.origin, stage, rank, span, first_rank))
    if mistakes:
        raise Rejected(mistakes)
    last = max(ranks)
    missing = next((stage for stage in range(last) if stage not in ranks), None)
    if missing is not None:
        raise Rejected([say.StageNowhere(ranks[last][1], missing, last)])
    micro_batches = 1 + max(micro for lane in lanes for part in singles(lane) for micro in part.micros)
    pipe = Pipe(
        "down", tuple(Worker(ranks[Stage(s)][0]) for s in range(last + 1)), tuple(map(Micro, range(micro_batches)))
    )
    name = re.sub(r"\W", "_", PurePath(source.name).stem, flags=re.ASCII)
    return Header(
        scheme=name if name[:1].isalpha() else f"_{name}",
        parameters=(("D", last + 1), ("N", micro_batches)),
        workers=len(rows),
        stages=last + 1,
        micro_batches=micro_batches,
        pipes=(pipe,),
    )


def _misplaced(header: Header, row: Sequence[Cell]) -> Iterator[Diagnostic]:
    """Yields the messages that cannot be where they are.

    They have no stage at one of their ends, are received after they are read, or are waited for while they are not on
    their way. A file with waits for sends has one for each send.
    """
    read: dict[tuple[Value, Stage, Micro], Compute] = {}
    sent: dict[str, MessageCell] = {}
    for cell in row:
        if isinstance(cell, Compute | Pair):
            read |= {(value, part.stage, part.micros[0]): part for part in cell.parts for value in part.kind.reads}
        elif isinstance(cell, MessageCell) and cell.word in WAITS:
            if sent.pop(str(replace(cell, word=WAITS[cell.word])), None) is None:
                yield say.NothingSent(cell.origin, str(cell), header.stages - 1)
        elif isinstance(cell, MessageCell):
            post, value = TRANSFERS[cell.word]
            sent |= {str(cell): cell} if post is Send else {}
            if not (cell.stage < header.stages and _others(header, cell)):
                yield say.NothingBeyond(cell.origin, str(cell), header.stages - 1)
            elif post is Recv and (part := read.get((value, cell.stage, cell.micro))):
                yield say.ReceivedTooLate(cell.origin, str(cell), numbered_line(part, absolute(1)), part.origin)
    if any(isinstance(cell, MessageCell) and cell.word in WAITS for cell in row):
        yield from (say.NeverWaitedFor(cell.origin, str(cell), header.stages - 1) for cell in sent.values())


def _others(header: Header, cell: MessageCell) -> tuple[Stage, ...]:
    """The stages at the other end of a message: they read the value of a send, or make the value of a receive."""
    post, value = TRANSFERS[WAITS.get(cell.word, cell.word)]
    return (header.readers if post is Send else header.makers)(value, cell.stage)


def _upkeep(row: Sequence[Cell]) -> Iterator[Diagnostic]:
    """Yields the cells at which FSDP would fail or lose gradients.

    Only stages that the row unshards anywhere have to be unsharded where they compute.
    """
    parts = [part for cell in row if isinstance(cell, Compute | Pair) for part in cell.parts]
    sums = {part.stage: part for part in parts if part.kind.sums}
    states = {cell.stage: False for cell in row if isinstance(cell, WeightsCell) and cell.word not in REDUCTIONS}
    held, summed = {part.stage for part in parts}, set[Compute]()
    for cell in row:
        if isinstance(cell, Compute | Pair):
            summed.update(cell.parts)
            for part in cell.parts:
                if not states.get(part.stage, True):
                    yield say.ComputedSharded(part.origin, numbered_line(part, absolute(1)), part.stage)
        elif isinstance(cell, WeightsCell):
            where = cell.origin, str(cell), cell.stage
            if cell.stage not in held:
                yield say.StrangersWeights(*where)
            elif cell.word == REDUCE_GRAD:
                last = sums.pop(cell.stage, None)
                if last not in summed:
                    yield say.WrongReduction(*where)
            elif cell.word == WAIT_REDUCE_GRAD:
                continue
            elif states[cell.stage] == (cell.word == UNSHARD):
                yield (say.UnshardedTwice if states[cell.stage] else say.WrongUpkeep)(*where)
            else:
                states[cell.stage] = not states[cell.stage]
    reductions = [cell for cell in row if isinstance(cell, WeightsCell) and cell.word in REDUCTIONS]
    if any(cell.word == WAIT_REDUCE_GRAD for cell in reductions):
        # From torch 2.15 on a rank has one reduction at a time, and waits for it before the next one.
        for number, cell in enumerate(reductions):
            if cell.word != REDUCTIONS[number % 2] or cell.stage != reductions[number // 2 * 2].stage:
                yield say.ReductionOutOfTurn(cell.origin, str(cell), cell.stage)
                return
        if len(reductions) % 2:
            yield say.ReductionOutOfTurn(reductions[-1].origin, str(reductions[-1]), reductions[-1].stage)


def _lane(header: Header, worker: int, row: Sequence[Cell], traffic: Traffic) -> Iterator[Instruction]:
    """Yields the instructions of a rank: those of the file, with waits and sums around its operations.

    ``traffic`` has the messages that are received, or known to be over, before each of the rank's operations.
    """
    sums = {
        part.stage: cell for cell in row if isinstance(cell, Compute | Pair) for part in cell.parts if part.kind.sums
    }
    launched, sent, late, place = list[WeightGroup](), set[Message](), list[Transfer](), 0
    lines = _of_file(header, row, traffic)
    waited = {line.message for line in lines if isinstance(line, WaitSend)}
    reduced = {line.group for line in lines if isinstance(line, WaitAllReduce)}
    for instruction in lines:
        if not isinstance(instruction, Compute | Pair):
            sent |= {instruction.message} if isinstance(instruction, Send) else set()
            yield instruction
            continue
        yield from (WaitRecv(transfer.message, instruction.origin) for transfer in traffic.received.get(place, ()))
        for transfer in traffic.retired.get(place, ()):
            if transfer.message in waited:
                continue
            # A message that leaves after its answer: the rule "channels" finds that the lane stops here.
            if transfer.message in sent:
                yield WaitSend(transfer.message, instruction.origin)
            else:
                late.append(transfer)
        yield instruction
        for stage in {part.stage: None for part in instruction.parts if sums.get(part.stage) is instruction}:
            launched.append((stage,))
            yield AllReduce((stage,), instruction.origin)
        place += 1
    end = row[-1].origin
    unanswered = [transfer for transfer in traffic.unanswered if transfer.message not in waited]
    yield from (WaitSend(transfer.message, end) for transfer in (*late, *unanswered))
    tied = [group for group in header.groups_of[worker] if len(group) > 1]
    yield from (AllReduce(group, end) for group in tied)
    for group in (*launched, *tied):
        if group not in reduced:
            yield WaitAllReduce(group, end)
        yield Step(group, end)


def _of_file(header: Header, row: Sequence[Cell], traffic: Traffic) -> list[_Line]:
    """The instructions of a rank that its row has, where receives have slots (buffers).

    ``traffic`` has the last operation that uses each message; after it the message's slot is free for another message.
    """
    needed = {transfer.message: transfer for transfer in chain.from_iterable(traffic.received.values())}
    lane: list[_Line] = []
    postings: list[Posting] = []
    place = 0
    for cell in row:
        if isinstance(cell, MessageCell):
            post, value = TRANSFERS[WAITS.get(cell.word, cell.word)]
            (other,) = _others(header, cell)
            peer = header.pipes[0].workers[other]
            if post is Send:
                message = Message((cell.micro,), cell.stage, other, value)
                waits = cell.word in WAITS
                lane.append(WaitSend(message, cell.origin) if waits else Send(message, peer, cell.origin))
                continue
            message = Message((cell.micro,), other, cell.stage, value)
            lane.append(Recv(message, peer, Slot(0), cell.origin))
            unread = Transfer(message, peer, peer, place, place, place)
            postings.append(Posting(place, needed.get(message, unread)))
        elif not isinstance(cell, WeightsCell):
            lane.append(cell)
            place += 1
        elif cell.word == WAIT_REDUCE_GRAD and not header.ties:
            lane.append(WaitAllReduce((cell.stage,), cell.origin))
    numbers = iter(slots(postings))
    return [replace(line, slot=next(numbers)) if isinstance(line, Recv) else line for line in lane]
