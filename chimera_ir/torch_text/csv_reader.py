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
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import PurePath
from typing import NamedTuple

from chimera_ir.diagnostics.catalogue import torchcells as say
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.ir.kinds import ACTIVATIONS, GRADIENTS, KINDS, PAIR, Value
from chimera_ir.ir.levels import MAX_MICRO_BATCHES, MAX_STAGES, Header, Pipe, Program, Schedule
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Instruction,
    Message,
    Micro,
    Operation,
    Pair,
    Recv,
    Send,
    Slot,
    Stage,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
    WeightGroup,
    Worker,
    singles,
)
from chimera_ir.ir.text.printer import absolute, numbered_line
from chimera_ir.lower.comm import AHEAD, Posting, Traffic, Transfer, communicate, slots
from chimera_ir.source import Source, Span

# The cells of a schedule of torch.distributed.pipelining: a row for each rank, a cell for each action.
#
#     0F0,0F1,0SEND_F0,,0RECV_B0,0B0        2F0: the forward of micro-batch 0 on stage 2
#     1RECV_F0,1F0,1B0,1SEND_B0             (0F7;7B3)OVERLAP_F_B: a pair
#                                           0WAIT_SEND_F0, 0WAIT_REDUCE_GRAD: waits, since torch 2.15
#
# The kinds F, I, W and B are those of the table. Files from before 2025 write B for I, and BW for B. An empty cell, or
# ``None``, is a column in which the rank does nothing. Columns mean nothing else: the order in a row counts.

MOST_MISTAKES = 50

TRANSFERS: dict[str, tuple[type[Send | Recv], Value]] = {
    "SEND_F": (Send, ACTIVATIONS),
    "RECV_F": (Recv, ACTIVATIONS),
    "SEND_B": (Send, GRADIENTS),
    "RECV_B": (Recv, GRADIENTS),
}
"""The instruction that each action about a message posts, and the value in the message."""

WAITS = {"WAIT_SEND_F": "SEND_F", "WAIT_SEND_B": "SEND_B"}

UNSHARD, RESHARD, REDUCE_GRAD, WAIT_REDUCE_GRAD = "UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD"
REDUCTIONS = (REDUCE_GRAD, WAIT_REDUCE_GRAD)
_ON_WEIGHTS = (UNSHARD, RESHARD, *REDUCTIONS)


@dataclass(frozen=True, slots=True)
class MessageCell:
    """A send, a receive or a wait for a send, as in ``1SEND_F0``; ``stage`` is that of the rank which posts it."""

    word: str
    stage: Stage
    micro: Micro
    origin: Span

    def __str__(self) -> str:
        return f"{self.stage}{self.word}{self.micro}"


@dataclass(frozen=True, slots=True)
class WeightsCell:
    """An action of FSDP on the weights or gradients of a stage, as in ``1UNSHARD``."""

    word: str
    stage: Stage
    origin: Span

    def __str__(self) -> str:
        return f"{self.stage}{self.word}"


Cell = Operation | MessageCell | WeightsCell


class _Action(NamedTuple):
    """An action as written: ``word`` is the letter of a kind, in older files maybe of another, or a verb (SEND_F)."""

    stage: int
    word: str
    micro: int
    span: Span


_Actions = tuple[_Action] | tuple[_Action, _Action]

_CELL = re.compile(r"[^,\n\s](?:[^,\n]*[^,\n\s])?")
_QUOTED = re.compile(r'"\s*([^"]*?)\s*"')
_OF_MICROS = "|".join((*WAITS, *TRANSFERS, "BW", "F", "I", "W", "B"))
_ACTION = re.compile(rf"([0-9]+)(?:({'|'.join(_ON_WEIGHTS)})|({_OF_MICROS})([0-9]*))")
_OVERLAP = re.compile(r"\(\s*([^;()]*?)\s*;\s*([^;()]*?)\s*\)OVERLAP_F_B")
_OF_BEFORE_2025 = {"B": "I", "BW": "B"}
_DIGITS = 10


def count_cells(text: str) -> int:
    """The number of cells of a text that are not empty."""
    return sum(1 for _ in _CELL.finditer(text))


def rows_of(source: Source) -> list[list[Cell]]:
    """The cells of each row that are not empty; raises `Rejected` with all malformed cells, or if there are none."""
    mistakes: list[Diagnostic] = []
    rows, start = list[list[_Actions]](), 0
    for text in source.text.split("\n"):
        rows.append([*_read(text, start, mistakes)])
        start += len(text) + 1
    if mistakes:
        raise Rejected(mistakes[:MOST_MISTAKES])
    while rows and not rows[-1]:
        del rows[-1]
    if not rows:
        raise Rejected([say.NoCells(Span(0, 0))])
    letters = _letters([action for row in rows for cell in row for action in cell])
    return [[_cell(cell, letters) for cell in row] for row in rows]


def _read(row: str, start: int, mistakes: list[Diagnostic]) -> Iterator[_Actions]:
    for match in _CELL.finditer(row):
        text, place = match[0], start + match.start()
        if quoted := _QUOTED.fullmatch(text):
            text, place = quoted[1], place + quoted.start(1)
        if text in ("", "None"):
            continue
        overlap = _OVERLAP.fullmatch(text)
        spans = [overlap.span(1), overlap.span(2)] if overlap else [(0, len(text))]
        try:
            first, *others = [_action(text[a:b], place + a) for a, b in spans]
            if others and {first.word, others[0].word} != {kind.letter for kind in PAIR.kinds}:
                raise Rejected([say.PairOfOthers(Span(place, place + len(text)), text)])
        except Rejected as rejected:
            mistakes.extend(rejected.diagnostics)
        else:
            yield (first, others[0]) if others else (first,)


def _action(text: str, start: int) -> _Action:
    """Reads one action, which begins at ``start`` in the file; raises `Rejected` for any other text."""
    span, match = Span(start, start + len(text)), _ACTION.match(text)
    if match is None:
        raise Rejected([say.MalformedCell(span, text)])
    if match[3] and not match[4]:
        raise Rejected([say.MicroUnsaid(span, text)])
    if match.end() < len(text):
        raise Rejected([say.TrailingText(span, text, match[0])])
    for what, number, limit in (("stage", match[1], MAX_STAGES), ("micro-batch", match[4] or "0", MAX_MICRO_BATCHES)):
        if len(number) > _DIGITS or int(number) >= limit:
            raise Rejected([say.NumberTooHigh(span, what, number, 0, limit - 1)])
    return _Action(int(match[1]), match[2] or match[3], int(match[4] or 0), span)


def _letters(actions: list[_Action]) -> dict[str, str]:
    """Letters of an older file to those of today's kinds; raises `Rejected` if both notations occur."""
    first = {action.word: action for action in reversed(actions)}
    if "BW" in first and "I" in first:
        raise Rejected([say.NotationsMixed(first["BW"].span, first["I"].span)])
    return _OF_BEFORE_2025 if "BW" in first or ("W" in first and "I" not in first) else {}


def _cell(actions: _Actions, letters: dict[str, str]) -> Cell:
    (stage, word, micro, span), *others = actions
    if word in TRANSFERS or word in WAITS:
        return MessageCell(word, Stage(stage), Micro(micro), span)
    if word in _ON_WEIGHTS:
        return WeightsCell(word, Stage(stage), span)
    parts = [
        Compute(KINDS[letters.get(action.word, action.word)], (Micro(action.micro),), Stage(action.stage), action.span)
        for action in actions
    ]
    if not others:
        return parts[0]
    forward, backward = sorted(parts, key=lambda part: PAIR.kinds.index(part.kind))
    return Pair(forward, backward, Span(min(span, others[0].span).start, max(span, others[0].span).end))


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
    """Cells at which FSDP would fail or lose gradients; a stage that is never unsharded need not be."""
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
    """The instructions of a rank: those of the file, with waits and sums around its operations."""
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
    """The instructions in a row; a slot (buffer) is free again after the last use of its message in ``traffic``."""
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
