"""Rule "messages": every hand-over between workers is sent after its producer and received before its consumer, once
each, and both ends wait for it.

What this rule establishes lane by lane lets the rule "channels" replay the lanes against each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from chimera_ir.diagnostics.catalogue.program import (
    MisplacedLine,
    MissingLine,
    RedundantLine,
    UnknownMessage,
    WrongPeer,
)
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.ids import Slot, Stage, Worker
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import (
    Backward,
    Forward,
    Message,
    Recv,
    Send,
    Talk,
    WaitRecv,
    WaitSend,
)
from chimera_ir.ir.text.printer import line
from chimera_ir.ir.text.printer import message as line_of
from chimera_ir.verify.index import ABSENT, Cells, key, receiver, sender
from chimera_ir.verify.words import content


@dataclass(frozen=True, slots=True)
class Places:
    """The places of a message's four lines: in the sender's lane and in the receiver's, by `key`.

    ``foreign`` says, by worker and place, why a line is about no message of its worker; ``suspect`` are the lines,
    again by worker and place, of which there is something to say: those, second ones, and ones about the wrong peer.
    ``expected`` are the messages that the program needs.
    """

    sent: list[int]
    retired: list[int]
    posted: list[int]
    arrived: list[int]
    foreign: dict[tuple[Worker, int], str]
    suspect: list[tuple[Worker, int]]
    expected: "dict[int, HandOver]"

    def of(self, instruction: Talk) -> list[int]:
        """The places of the lines of one kind."""
        match instruction:
            case Send():
                return self.sent
            case WaitSend():
                return self.retired
            case Recv():
                return self.posted
            case WaitRecv():
                return self.arrived


def places(program: Program, cells: Cells) -> Places:
    """Where the first line of each kind for each message stands, without lines about no message of their worker."""
    header = program.header
    size = 2 * header.stages * header.micro_batches
    found = Places([ABSENT] * size, [ABSENT] * size, [ABSENT] * size, [ABSENT] * size, {}, [], _expected(program))
    of_kind = {Send: found.sent, WaitSend: found.retired, Recv: found.posted, WaitRecv: found.arrived}
    for number, parts in enumerate(program.parts):
        worker = Worker(number)
        for place, instruction in parts.messages:
            message = key(header, instruction.message) if instruction.message.micros else ABSENT
            hand_over = found.expected.get(message)
            if hand_over is None or not hand_over.is_meant(instruction, worker):
                found.suspect.append((worker, place))
                reason = _foreign(program, cells, worker, instruction)
                if reason:
                    found.foreign[worker, place] = reason
                    continue
            where = of_kind[type(instruction)]
            if where[message] == ABSENT:
                where[message] = place
            else:
                found.suspect.append((worker, place))
    return found


class HandOver(NamedTuple):
    """A message that the program needs, and the operation that produces it."""

    message: Message
    start: Worker
    end: Worker
    producer: Forward | Backward

    def is_meant(self, line: Talk, worker: Worker) -> bool:
        """Whether a line on a worker about a message of this `key` is about this one, and names the right peer."""
        if line.message.micros != self.message.micros or line.message.target != self.message.target:
            return False
        if isinstance(line, Send):
            return worker == self.start and line.to == self.end
        if isinstance(line, Recv):
            return worker == self.end and line.source == self.start
        return worker == (self.start if isinstance(line, WaitSend) else self.end)


def _expected(program: Program) -> dict[int, HandOver]:
    """Every message that the program needs, by its `key`, in the order of the lanes that send."""
    header = program.header
    found: dict[int, HandOver] = {}
    for number, parts in enumerate(program.parts):
        for _, operation in parts.computes:
            target = operation.stage + 1 if isinstance(operation, Forward) else operation.stage - 1
            if 0 <= target < header.stages:
                end = header.worker(operation.micros[0], Stage(target))
                if end != number:
                    message = Message(operation.micros, operation.stage, Stage(target))
                    found[key(header, message)] = HandOver(message, Worker(number), end, operation)
    return found


def messages(program: Program, cells: Cells, found: Places) -> Iterator[Diagnostic]:
    """Lines that are unknown, redundant, about the wrong peer, missing or misplaced.

    Parameters
    ----------
    program
        Its operations complete and placed, and grouped alike.
    cells, found
        Its places.
    """
    for worker, place in found.suspect:
        instruction = program.lanes[worker][place]
        if isinstance(instruction, Talk):
            yield from _line(program, worker, place, instruction, found)
    for number, hand_over in found.expected.items():
        message = hand_over.message
        sent, posted, arrived = found.sent[number], found.posted[number], found.arrived[number]
        in_order = ABSENT < cells.producer(message) < sent < found.retired[number]
        if not (in_order and ABSENT < posted < arrived < cells.consumer(message)):
            yield from _hand_over(program, cells, found, hand_over.start, hand_over.producer, message)


def _foreign(program: Program, cells: Cells, worker: Worker, instruction: Talk) -> str:
    """Why a line is about no message of its worker, or nothing."""
    header, message = program.header, instruction.message
    known = message.micros and all(0 <= micro < header.micro_batches for micro in message.micros)
    if not (known and min(message.source, message.target) >= 0):
        return "there is no such micro-batch or stage"
    if max(message.source, message.target) >= header.stages:
        return f"there is no stage {max(message.source, message.target)}"
    if abs(message.source - message.target) != 1:
        return f"stages {message.source} and {message.target} are not neighbours"
    start, end = sender(header, message), receiver(header, message)
    if start == end:
        return f"both stages of this micro-batch are on worker {start}, where no message is needed"
    made = program.lanes[start][cells.producer(message)]
    if isinstance(made, Forward | Backward) and made.micros != message.micros:
        right = Message(made.micros, message.source, message.target)
        return f"one message holds all that `{line(made)}` makes: `{line_of(right)}`"
    sends = isinstance(instruction, Send | WaitSend)
    if sends and start != worker:
        return f"worker {start} sends it"
    if not sends and end != worker:
        return f"worker {end} receives it"
    return ""


def _line(program: Program, worker: Worker, place: int, each: Talk, found: Places) -> Iterator[Diagnostic]:
    if (worker, place) in found.foreign:
        yield UnknownMessage(each.origin, worker, line(each), found.foreign[worker, place])
        return
    first = found.of(each)[key(program.header, each.message)]
    if first != place:
        what = {Send: "already sent", Recv: "already received"}.get(type(each), "already waited for")
        other = program.lanes[worker][first].origin
        yield RedundantLine(each.origin, worker, line(each), f"{content(each.message)} are {what}", (other,))
    if isinstance(each, Send) and each.to != receiver(program.header, each.message):
        right = receiver(program.header, each.message)
        yield WrongPeer(each.origin, worker, line(each), each.to, right, each.message.target)
    if isinstance(each, Recv) and each.source != sender(program.header, each.message):
        right = sender(program.header, each.message)
        yield WrongPeer(each.origin, worker, line(each), each.source, right, each.message.source)


def _hand_over(
    program: Program, cells: Cells, found: Places, start: Worker, operation: Forward | Backward, message: Message
) -> Iterator[Diagnostic]:
    number = key(program.header, message)
    sent, retired = found.sent[number], found.retired[number]
    posted, arrived = found.posted[number], found.arrived[number]
    if ABSENT in (sent, retired, posted, arrived):
        yield from _missing(program, cells, found, operation, message)
    end = receiver(program.header, message)
    made, used = cells.producer(message), cells.consumer(message)
    if sent != ABSENT and sent < made:
        yield _misplaced(program, start, sent, made, f"{content(message)} are not there yet")
    if sent != ABSENT and retired != ABSENT and retired < sent:
        yield _misplaced(program, start, retired, sent, "waits for what is not sent yet")
    if posted != ABSENT and arrived != ABSENT and arrived < posted:
        yield _misplaced(program, end, arrived, posted, "waits for a receive that is not posted yet")
    if arrived != ABSENT and used < arrived:
        yield _misplaced(program, end, used, arrived, f"{content(message)} may not be there yet")


def _misplaced(program: Program, worker: Worker, early: int, late: int, reason: str) -> Diagnostic:
    one, two = program.lanes[worker][early], program.lanes[worker][late]
    return MisplacedLine(one.origin, worker, line(one), line(two), two.origin, reason)


def _missing(
    program: Program, cells: Cells, found: Places, operation: Forward | Backward, message: Message
) -> Iterator[Diagnostic]:
    number = key(program.header, message)
    start, end = sender(program.header, message), receiver(program.header, message)
    user = program.lanes[end][cells.consumer(message)]
    used = user.origin
    needs = f"worker {end} needs {content(message)} for `{line(user)}`"
    gets = f"`{line(user)}` needs {content(message)} (worker {start})"
    if found.sent[number] == ABSENT:
        lost = line(Send(message, end))
        yield MissingLine(operation.origin, start, lost, needs, f"after `{line(operation)}`")
    elif found.retired[number] == ABSENT:
        origin = program.lanes[start][found.sent[number]].origin
        lost = line(WaitSend(message))
        reason = "nothing waits for this send, so its tensors are never known to be free"
        yield MissingLine(origin, start, lost, reason, f"below `{line(Send(message, end))}`")
    if found.posted[number] == ABSENT:
        slot = Slot(0)
        lost = line(Recv(message, start, slot))
        yield MissingLine(used, end, lost, gets, f"before `{line(user)}`, into a slot that is free")
    elif found.arrived[number] == ABSENT:
        yield MissingLine(used, end, line(WaitRecv(message)), gets, f"before `{line(user)}`")
