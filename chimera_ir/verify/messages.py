"""Rule "messages": every hand-over between workers is sent and received once, and both ends wait for it.

The send comes after the producer, the receive before the consumer. This rule checks lane by lane, so that the rule
"channels" can replay the lanes against each other.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, assert_never

from chimera_ir.diagnostics.catalogue.program import (
    MisplacedLine,
    MissingLine,
    RedundantLine,
    UnknownMessage,
    WrongPeer,
)
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow.flow import ABSENT, Flow, crossing
from chimera_ir.ir.ids import Micro, Slot, Worker
from chimera_ir.ir.levels import Lines, Program
from chimera_ir.ir.ops import Compute, Instruction, Message, Pair, Recv, Send, Talk, WaitRecv, WaitSend
from chimera_ir.ir.text.printer import line, message_text
from chimera_ir.verify.index import key, receiver, sender
from chimera_ir.verify.wording import content


class HandOver(NamedTuple):
    """A message that the program needs: its `key`, the worker that sends it and the worker that receives it."""

    number: int
    start: Worker
    end: Worker


@dataclass(frozen=True, slots=True)
class MessagePlaces:
    """The places of the four lines of each message, in the sender's lane and in the receiver's, by `key`.

    ``expected`` are the messages that the program needs, in the order of the lanes that send. ``foreign`` has the
    reason, by worker and place, why a line is about no message of its worker. ``suspect`` are the worker and place of
    all lines with a possible mistake: foreign lines, repeated lines, and lines about the wrong peer.
    """

    sent: "array[int]"
    retired: "array[int]"
    posted: "array[int]"
    arrived: "array[int]"
    expected: dict[Message, HandOver]
    foreign: dict[tuple[Worker, int], str]
    suspect: list[tuple[Worker, int]]

    def of(self, instruction: Talk) -> "array[int]":
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
            case _:
                assert_never(instruction)


def places(program: Program, cells: Flow) -> MessagePlaces:
    """The places of the first line of each kind for each message, without lines about no message of their worker."""
    absent = array("q", [ABSENT]) * (2 * program.header.stages * program.header.micro_batches)
    places = MessagePlaces(absent[:], absent[:], absent[:], absent[:], _expected(program), {}, [])
    for number, parts in enumerate(program.parts):
        worker = Worker(number)
        to, source = [send.to for send in parts.sends.lines], [recv.source for recv in parts.recvs.lines]
        _enter(program, cells, places, worker, parts.sends, places.sent, to, at_start=True)
        _enter(program, cells, places, worker, parts.wait_sends, places.retired, repeat(None), at_start=True)
        _enter(program, cells, places, worker, parts.recvs, places.posted, source, at_start=False)
        _enter(program, cells, places, worker, parts.wait_recvs, places.arrived, repeat(None), at_start=False)
    places.suspect.sort()
    return places


def _enter(
    program: Program,
    cells: Flow,
    places: MessagePlaces,
    worker: Worker,
    lines: Lines[Talk],
    where: "array[int]",
    peers: Iterable[Worker | None],
    *,
    at_start: bool,
) -> None:
    """Enters the places of one kind of lines; ``peers`` has the worker that each line names, or None."""
    expected = places.expected
    for (place, instruction), peer in zip(lines, peers, strict=False):
        hand_over = expected.get(instruction.message)
        if hand_over is not None:
            message, start, end = hand_over
            meant_worker, meant_peer = (start, end) if at_start else (end, start)
            meant = meant_worker == worker and (peer is None or peer == meant_peer)
        # Nearly all lines are right: only the others pay for the search for a reason.
        if hand_over is None or not meant:
            places.suspect.append((worker, place))
            reason = _foreign(program, cells, worker, instruction)
            if reason:
                places.foreign[worker, place] = reason
                continue
            message = key(program.header, instruction.message)
        if where[message] == ABSENT:
            where[message] = place
        else:
            places.suspect.append((worker, place))


def _expected(program: Program) -> dict[Message, HandOver]:
    """Every message that the program needs, in the order of the lanes that send."""
    expected: dict[Message, HandOver] = {}
    for number, parts in enumerate(program.parts):
        worker = Worker(number)
        for _, message, end in crossing(program.header, worker, parts.computes):
            expected[message] = HandOver(key(program.header, message), worker, end)
    return expected


def messages(program: Program, cells: Flow, places: MessagePlaces) -> Iterator[Diagnostic]:
    """Yields lines that are unknown, redundant, about the wrong peer, missing or misplaced.

    Parameters
    ----------
    program
        Its operations complete and placed, and grouped the same way on all stages.
    cells, places
        The places of its operations and of its messages.
    """
    for worker, place in places.suspect:
        instruction = program.lanes[worker][place]
        if isinstance(instruction, Talk):
            yield from _line(program, worker, place, instruction, places)
    for message, (number, start, _) in places.expected.items():
        sent, posted, arrived = places.sent[number], places.posted[number], places.arrived[number]
        in_order = ABSENT < cells.producer(message) < sent < places.retired[number]
        if not (in_order and ABSENT < posted < arrived < cells.consumer(message)):
            yield from _hand_over(program, cells, places, start, message)


def _foreign(program: Program, cells: Flow, worker: Worker, instruction: Talk) -> str:
    """The reason why a line is about no message of its worker; empty if it is about one."""
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
    maker = program.lanes[start][cells.producer(message)]
    micros = _handed_on_with(maker, message)
    if micros != message.micros:
        right = Message(micros, message.source, message.target)
        return f"one message holds all that `{line(maker)}` makes: `{message_text(right)}`"
    sends = isinstance(instruction, Send | WaitSend)
    if sends and start != worker:
        return f"worker {start} sends it"
    if not sends and end != worker:
        return f"worker {end} receives it"
    return ""


def _handed_on_with(maker: Instruction, message: Message) -> tuple[Micro, ...]:
    """The micro-batches that one message must hold: those that ``maker`` hands on together with the message's first.

    If ``maker`` does not make the message's value, they are the micro-batches that the message has.
    """
    parts = maker.parts if isinstance(maker, Compute | Pair) else ()
    handed_on = (
        part.micros
        for part in parts
        if message.micros[0] in part.micros
        and part.stage == message.source
        and any(value.towards == message.target - message.source for value in part.kind.hands_on)
    )
    return next(handed_on, message.micros)


def _line(
    program: Program, worker: Worker, place: int, instruction: Talk, places: MessagePlaces
) -> Iterator[Diagnostic]:
    if (worker, place) in places.foreign:
        yield UnknownMessage(instruction.origin, worker, line(instruction), places.foreign[worker, place])
        return
    header, message = program.header, instruction.message
    first = places.of(instruction)[key(header, message)]
    if first != place:
        done = {Send: "already sent", Recv: "already received"}.get(type(instruction), "already waited for")
        other = program.lanes[worker][first].origin
        yield RedundantLine(instruction.origin, worker, line(instruction), f"{content(message)} are {done}", (other,))
    if isinstance(instruction, Send) and instruction.to != receiver(header, message):
        right = receiver(header, message)
        yield WrongPeer(instruction.origin, worker, line(instruction), instruction.to, right, message.target)
    if isinstance(instruction, Recv) and instruction.source != sender(header, message):
        right = sender(header, message)
        yield WrongPeer(instruction.origin, worker, line(instruction), instruction.source, right, message.source)


def _hand_over(
    program: Program, cells: Flow, places: MessagePlaces, start: Worker, message: Message
) -> Iterator[Diagnostic]:
    number = key(program.header, message)
    sent, retired = places.sent[number], places.retired[number]
    posted, arrived = places.posted[number], places.arrived[number]
    if ABSENT in (sent, retired, posted, arrived):
        yield from _missing(program, cells, places, message)
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
    first, second = program.lanes[worker][early], program.lanes[worker][late]
    return MisplacedLine(first.origin, worker, line(first), line(second), second.origin, reason)


def _missing(program: Program, cells: Flow, places: MessagePlaces, message: Message) -> Iterator[Diagnostic]:
    number = key(program.header, message)
    start, end = sender(program.header, message), receiver(program.header, message)
    operation, user = program.lanes[start][cells.producer(message)], program.lanes[end][cells.consumer(message)]
    used = user.origin
    needs = f"worker {end} needs {content(message)} for `{line(user)}`"
    gets = f"`{line(user)}` needs {content(message)} (worker {start})"
    if places.sent[number] == ABSENT:
        lost = line(Send(message, end))
        yield MissingLine(operation.origin, start, lost, needs, f"after `{line(operation)}`")
    elif places.retired[number] == ABSENT:
        origin = program.lanes[start][places.sent[number]].origin
        lost = line(WaitSend(message))
        reason = "nothing waits for this send, so its tensors are never known to be free"
        yield MissingLine(origin, start, lost, reason, f"below `{line(Send(message, end))}`")
    if places.posted[number] == ABSENT:
        slot = Slot(0)
        lost = line(Recv(message, start, slot))
        yield MissingLine(used, end, lost, gets, f"before `{line(user)}`, into a slot that is free")
    elif places.arrived[number] == ABSENT:
        yield MissingLine(used, end, line(WaitRecv(message)), gets, f"before `{line(user)}`")
