"""Rule "messages": every value for another worker is sent and received once, and both workers wait for the transfer.

The send comes after the operation that makes the value, the receive and its wait before the operation that reads it.
This rule checks each lane by itself, before the rule "channels" plays all lanes together.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from chimera_ir.diagnostics.catalogue import lanes as say
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow.flow import ABSENT, Flow, crossing
from chimera_ir.ir.ids import Micro, Slot, Worker
from chimera_ir.ir.lane_parts import Lines
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import Compute, Instruction, Message, Pair, Recv, Send, Talk, WaitRecv, WaitSend
from chimera_ir.ir.text.printer import absolute, line, message_text
from chimera_ir.source import Span
from chimera_ir.verify.index import key, receiver, sender
from chimera_ir.verify.wording import content


class HandOver(NamedTuple):
    """A message that the program needs, with its ``number`` (`key`), from worker ``start`` to worker ``end``."""

    number: int
    start: Worker
    end: Worker


@dataclass(frozen=True, slots=True)
class MessagePlaces:
    """Places in lanes at which each message is sent, received and waited for, and lines that may be wrong.

    Four lists have a place for each message, at the message's `key`: ``sent`` of the send, ``posted`` of the receive,
    ``retired`` of the wait for the send, ``arrived`` of the wait for the receive. `ABSENT` stands for a missing line.
    ``expected`` has the messages that the program needs, in the order of the lanes that send. ``foreign`` has, by
    worker and place, the diagnostics of lines about messages that their worker neither sends nor receives. ``suspect``
    has worker and place of every line that may be wrong: foreign lines, repeated lines, and lines that name the wrong
    worker.
    """

    sent: "array[int]"
    retired: "array[int]"
    posted: "array[int]"
    arrived: "array[int]"
    expected: dict[Message, HandOver]
    foreign: dict[tuple[Worker, int], Diagnostic]
    suspect: list[tuple[Worker, int]]


def places(program: Program, cells: Flow) -> MessagePlaces:
    """Finds the first line of each type for each message; a line about a message between other workers does not count.

    The types are send, receive, wait for a send, wait for a receive.
    """
    absent = array("q", [ABSENT]) * (len(program.header.edges) * program.header.micro_batches)
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
    """Notes the places of ``lines`` in the list ``where`` of ``places``, and the lines that may be wrong.

    All lines have one type and are in the lane of ``worker``. ``peers`` has the worker that each line names, or None if
    lines of this type name none. ``at_start`` says that lines of this type belong in the sender's lane.
    """
    expected = places.expected
    for (place, instruction), peer in zip(lines, peers, strict=False):
        hand_over = expected.get(instruction.message)
        if hand_over is not None:
            message, start, end = hand_over
            meant_worker, meant_peer = (start, end) if at_start else (end, start)
            meant = meant_worker == worker and (peer is None or peer == meant_peer)
        # Nearly all lines are right: only the others pay for the search for a mistake.
        if hand_over is None or not meant:
            places.suspect.append((worker, place))
            mistake = _foreign(program, cells, worker, instruction)
            if mistake is not None:
                places.foreign[worker, place] = mistake
                continue
            message = key(program.header, instruction.message)
        if where[message] == ABSENT:
            where[message] = place
        else:
            places.suspect.append((worker, place))


def _expected(program: Program) -> dict[Message, HandOver]:
    """Maps every message that the program needs to its hand-over, in the order of the lanes that send."""
    expected: dict[Message, HandOver] = {}
    for number, parts in enumerate(program.parts):
        worker = Worker(number)
        for _, message, end in crossing(program.header, worker, parts.computes):
            expected[message] = HandOver(key(program.header, message), worker, end)
    return expected


def messages(program: Program, cells: Flow, places: MessagePlaces) -> Iterator[Diagnostic]:
    """Yields diagnostics of lines for messages: unknown, redundant, about the wrong peer, missing or misplaced.

    The operations of the program are complete and placed, and grouped the same way on all stages. ``cells`` is the flow
    of the program (`index.cells`), ``places`` has the places of its messages (`places`).
    """
    for worker, place in places.suspect:
        instruction = program.lanes[worker][place]
        if isinstance(instruction, Talk):
            yield from _line(program, worker, place, instruction, places)
    for message, (number, _, _) in places.expected.items():
        sent, posted, arrived = places.sent[number], places.posted[number], places.arrived[number]
        in_order = ABSENT < cells.producer(message) < sent < places.retired[number]
        if not (in_order and ABSENT < posted < arrived < cells.consumer(message)):
            yield from _hand_over(program, cells, places, message)


def _foreign(program: Program, cells: Flow, worker: Worker, instruction: Talk) -> Diagnostic | None:
    """The mistake of a line about a message that its worker neither sends nor receives; None for any other line."""
    header, message = program.header, instruction.message
    where = instruction.origin, worker, line(instruction, program.header)
    numbered = message.micros and all(0 <= micro < header.micro_batches for micro in message.micros)
    if not (numbered and min(message.source, message.target) >= 0):
        return say.UnknownMessage(*where)
    if max(message.source, message.target) >= header.stages:
        return say.NoStageOfMessage(*where, max(message.source, message.target))
    if message.edge not in header.edges:
        return say.NotNeighbours(*where, message.source, message.target)
    start, end = sender(header, message), receiver(header, message)
    if start == end:
        return say.WithinWorker(*where, start)
    maker = program.lanes[start][cells.producer(message)]
    micros = _handed_on_with(maker, message)
    if micros != message.micros:
        return say.PartOfMessage(
            *where,
            line(maker, program.header),
            message_text(message._replace(micros=micros), absolute(program.header.slices)),
        )
    peer, verb = (start, "sends") if isinstance(instruction, Send | WaitSend) else (end, "receives")
    return None if peer == worker else say.MessageElsewhere(*where, peer, verb)


def _handed_on_with(maker: Instruction, message: Message) -> tuple[Micro, ...]:
    """Returns the micro-batches that ``maker`` hands on together with the first micro-batch of a message.

    If ``maker`` does not make the message's value, the result is the micro-batches of the message itself.
    """
    parts = maker.parts if isinstance(maker, Compute | Pair) else ()
    handed_on = (
        part.micros
        for part in parts
        if message.micros[0] in part.micros and part.stage == message.source and message.value in part.kind.makes
    )
    return next(handed_on, message.micros)


def _line(
    program: Program, worker: Worker, place: int, instruction: Talk, places: MessagePlaces
) -> Iterator[Diagnostic]:
    if (worker, place) in places.foreign:
        yield places.foreign[worker, place]
        return
    header, message = program.header, instruction.message
    where = instruction.origin, worker, line(instruction, program.header)
    columns: dict[type[Talk], array[int]] = {
        Send: places.sent,
        WaitSend: places.retired,
        Recv: places.posted,
        WaitRecv: places.arrived,
    }
    first = columns[type(instruction)][key(header, message)]
    if first != place:
        done = {Send: "sent", Recv: "received"}.get(type(instruction), "waited for")
        yield say.RepeatedMessage(*where, content(program.header, message), done, program.lanes[worker][first].origin)
    if isinstance(instruction, Send) and instruction.to != receiver(header, message):
        yield say.WrongPeer(*where, instruction.to, receiver(header, message), message.target)
    if isinstance(instruction, Recv) and instruction.source != sender(header, message):
        yield say.WrongPeer(*where, instruction.source, sender(header, message), message.source)


def _hand_over(program: Program, cells: Flow, places: MessagePlaces, message: Message) -> Iterator[Diagnostic]:
    number, start, end = places.expected[message]
    sent, retired = places.sent[number], places.retired[number]
    posted, arrived = places.posted[number], places.arrived[number]
    if ABSENT in (sent, retired, posted, arrived):
        yield from _missing(program, cells, places, message)
    made, used = cells.producer(message), cells.consumer(message)
    if sent != ABSENT and sent < made:
        yield say.SendBeforeOperation(*_order(program, start, sent, made), content(program.header, message))
    if sent != ABSENT and retired != ABSENT and retired < sent:
        yield say.WaitBeforeSend(*_order(program, start, retired, sent))
    if posted != ABSENT and arrived != ABSENT and arrived < posted:
        yield say.WaitBeforeRecv(*_order(program, end, arrived, posted))
    if arrived != ABSENT and used < arrived:
        yield say.UseBeforeWait(*_order(program, end, used, arrived), content(program.header, message))


def _order(program: Program, worker: Worker, early: int, late: int) -> tuple[Span, Worker, str, str, Span]:
    """Returns the fields of a diagnostic which says that one line of a lane must come after another.

    ``early`` is the place of the line that comes too early, ``late`` the place of the other line.
    """
    first, second = program.lanes[worker][early], program.lanes[worker][late]
    return first.origin, worker, line(first, program.header), line(second, program.header), second.origin


def _missing(program: Program, cells: Flow, places: MessagePlaces, message: Message) -> Iterator[Diagnostic]:
    number, start, end = places.expected[message]
    operation, user = program.lanes[start][cells.producer(message)], program.lanes[end][cells.consumer(message)]
    what, reader = content(program.header, message), line(user, program.header)
    if places.sent[number] == ABSENT:
        yield say.MissingSend(
            operation.origin,
            start,
            line(Send(message, end), program.header),
            end,
            what,
            reader,
            line(operation, program.header),
        )
    elif places.retired[number] == ABSENT:
        origin = program.lanes[start][places.sent[number]].origin
        yield say.MissingWaitSend(
            origin, start, line(WaitSend(message), program.header), line(Send(message, end), program.header)
        )
    if places.posted[number] == ABSENT:
        yield say.MissingRecv(
            user.origin, end, line(Recv(message, start, Slot(0)), program.header), start, what, reader
        )
    elif places.arrived[number] == ABSENT:
        yield say.MissingWaitRecv(user.origin, end, line(WaitRecv(message), program.header), start, what, reader)
