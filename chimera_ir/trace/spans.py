"""Spans: what a rank did from one time to another, recorded or predicted."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, assert_never

from chimera_ir.ir import ops
from chimera_ir.ir.ids import Stage
from chimera_ir.ir.kinds import COSTED
from chimera_ir.ir.levels import Header
from chimera_ir.ir.text.printer import absolute, group_name, line, message_text, numbered_line
from chimera_ir.picture.words import shown_micro


class Activity(StrEnum):
    """Activity that takes a rank's time and computes nothing."""

    RECV = "wait for a message"
    SEND = "wait for a send"
    SUM = "wait for a sum"
    MOVE = "wait for the host"
    STEP = "step"
    POST = "posting"
    LOAD = "loading data"
    BETWEEN = "between operations"
    FLUSH = "flush"


BUSY = tuple(kind.noun for kind in COSTED.values())
"""Activities that compute: the nouns of the kinds of operations."""


@dataclass(frozen=True, slots=True)
class Load:
    """Loading of a micro-batch's inputs or targets. It takes time, although no line of the program stands for it."""

    text: str


class LaneSpan(NamedTuple):
    """An operation of a rank, from ``start`` to ``end`` in nanoseconds; ``update`` is the update that it belongs to."""

    operation: ops.Instruction | Load
    update: int
    start: int
    end: int


Lane = tuple[LaneSpan, ...]
"""Spans of a rank in order; no two overlap."""


class UpdateWindow(NamedTuple):
    """The time that one update takes on one lane: from ``start`` to ``end``, in nanoseconds."""

    start: int
    end: int


def activity(operation: ops.Instruction | Load) -> str:
    """Returns what a rank does in an operation: the noun of its kind if it computes (`BUSY`), else an `Activity`."""
    match operation:
        case ops.Compute() | ops.Pair():
            return operation.kind.noun
        case ops.WaitRecv():
            return Activity.RECV
        case ops.WaitSend():
            return Activity.SEND
        case ops.WaitAllReduce():
            return Activity.SUM
        case ops.WaitMove():
            return Activity.MOVE
        case ops.Step() | ops.Stash() | ops.Drop():
            return Activity.STEP
        case ops.Send() | ops.Recv() | ops.AllReduce():
            return Activity.POST
        case Load():
            return Activity.LOAD
        case _:
            assert_never(operation)


def cause(header: Header, operation: ops.Instruction | Load) -> str:
    """Cause of a wait: the message or sum that it waits for; empty for other operations."""
    match operation:
        case ops.WaitRecv(message=message):
            return f"messages from worker {_worker(header, message.micros[0], message.source)}"
        case ops.WaitSend(message=message):
            return f"sends to worker {_worker(header, message.micros[0], message.target)}"
        case ops.WaitAllReduce(group=group):
            return f"the sum of {group_name(group)}"
        case ops.WaitMove(kind, stage=stage):
            return f"the {kind.noun} of stage {stage}"
        case (
            ops.Compute()
            | ops.Pair()
            | ops.Send()
            | ops.Recv()
            | ops.AllReduce()
            | ops.Step()
            | ops.Stash()
            | ops.Drop()
            | Load()
        ):
            return ""
        case _:
            assert_never(operation)


def awaited_worker(header: Header, operation: ops.Instruction) -> int:
    """Returns the worker at the other end of the message that an instruction waits for; -1 for any other one."""
    if not isinstance(operation, ops.WaitRecv | ops.WaitSend):
        return -1
    message = operation.message
    stage = message.source if isinstance(operation, ops.WaitRecv) else message.target
    return _worker(header, message.micros[0], stage)


def _worker(header: Header, micro: int, stage: Stage) -> int:
    return int(header.worker(shown_micro(header, micro), stage))


def words(operation: ops.Instruction | Load, header: Header) -> str:
    """An operation in the words of schedule.sir, with the slices of its header."""
    return operation.text if isinstance(operation, Load) else line(operation, header)


def recorded(instruction: ops.Instruction) -> Iterator[str]:
    """Yields the texts under which a rank records an instruction.

    A forward or a backward over several micro-batches, and a wait for a move, have a text for each micro-batch; other
    instructions have one text. Ranks number slices through, as if each were a micro-batch.
    """
    counted = absolute(1)
    match instruction:
        case ops.Compute(kind, micros, stage):
            yield from (f"{kind.letter} m{micro} s{stage}" for micro in micros)
        case ops.WaitMove(kind, micros, stage):
            yield from (f"wait {kind.letter} m{micro} s{stage}" for micro in micros)
        case ops.Pair(forward, backward):
            yield " & ".join(next(recorded(single)) for single in (forward, backward))
        case ops.Send(message) | ops.Recv(message):
            verb = "send" if isinstance(instruction, ops.Send) else "recv"
            yield f"{verb} {message_text(_first(message), counted)}"
        case ops.WaitSend(message) | ops.WaitRecv(message):
            yield numbered_line(replace(instruction, message=_first(message)), counted)
        case ops.AllReduce() | ops.WaitAllReduce() | ops.Step():
            yield numbered_line(replace(instruction, version=None), counted)
        case ops.Stash() | ops.Drop():
            yield numbered_line(instruction, counted)
        case _:
            assert_never(instruction)


def _first(message: ops.Message) -> ops.Message:
    """Returns a message with only the first of its micro-batches, which is how ranks record a message."""
    return message._replace(micros=message.micros[:1])


def ends(lane: Iterable[LaneSpan]) -> dict[int, int]:
    """Maps each update to the time at which it ends on a lane: the end of its last optimizer step there.

    Updates without a step on the lane are left out.
    """
    ends: dict[int, int] = {}
    for span in lane:
        if isinstance(span.operation, ops.Step):
            ends[span.update] = max(span.end, ends.get(span.update, span.end))
    return ends
