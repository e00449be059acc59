"""Rule "messages": every value for another worker is sent and received once, and both workers wait for the transfer.

The send comes after the operation that makes the value, the receive and its wait before the operation that reads it.
This rule checks each lane by itself, before the rule "channels" plays all lanes together.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, chain, repeat, zip_longest
from typing import NamedTuple

from chimera_ir.diagnostics.catalogue import schedule as say
from chimera_ir.diagnostics.catalogue.program import Blocked, Deadlock, ReceivesOutOfOrder, SlotInUse, SlotTooHigh
from chimera_ir.diagnostics.catalogue.schedule import Conflict
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow.engine import Played, play
from chimera_ir.flow.flow import ABSENT, Flow, crossing
from chimera_ir.flow.live import MoveStep
from chimera_ir.ir.kinds import Kind, Readers, Resource
from chimera_ir.ir.levels import Header, Plan, Program
from chimera_ir.ir.ops import (
    AllReduce,
    Clock,
    Communicators,
    Compute,
    Crossing,
    Instruction,
    LaneParts,
    Lines,
    Message,
    Micro,
    Pair,
    Planned,
    Recv,
    Send,
    Slot,
    Stage,
    Talk,
    WaitAllReduce,
    WaitMove,
    WaitRecv,
    WaitSend,
    Worker,
)
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.ir.text.printer import absolute, line, message_text, micros_name
from chimera_ir.ir.turns import extent
from chimera_ir.source import Span
from chimera_ir.verify.findings import content, key, receiver, sender, sum_key, summed

# Part of the rule "memory": a lane waits once for each move, before anything else touches what moves.
#
#     offload m0 s0
#     F m1 s0                   may run beside the copy: it is about another micro-batch
#     wait offload m0 s0        now the activations are on the host, and gone from the worker
#     reload m0 s0
#     wait reload m0 s0         now they are back
#     B m0 s0
#
# The rules "complete" and "acyclic" have the order of the operations themselves: an offload after the forward, a reload
# after the offload, a backward after the reload. A move begins when the lane launches it, after the moves launched
# before it, and ends without the help of another worker, so a wait for a move blocks no lane for ever.

_Move = tuple[Kind, tuple[Micro, ...], Stage]


def moves(program: Program) -> Iterator[Diagnostic]:
    """Yields diagnostics of moves that nothing waits for, of needless waits, and of operations before their wait."""
    for number, parts in enumerate(program.parts if program.header.moves else ()):
        yield from _Waits(program.header, Worker(number), parts).diagnostics()


class _Waits:
    def __init__(self, header: Header, worker: Worker, parts: LaneParts) -> None:
        self._header, self._worker, self._parts = header, worker, parts
        launches = (operation for operation in parts.computes.lines if isinstance(operation, Compute))
        self._launches = {_move(operation): operation for operation in launches if operation.kind.moves}
        self._waits: dict[_Move, WaitMove] = {}
        for wait in parts.wait_moves.lines:
            self._waits.setdefault(_move(wait), wait)

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields the mistakes of the lane, in its order, and then the moves that nothing waits for."""
        header, worker = self._header, self._worker
        # The moves that were launched, those of them under way by micro-batch and stage, and those waited for.
        launched: set[_Move] = set()
        under_way: dict[tuple[Micro, Stage], list[_Move]] = defaultdict(list)
        ended: set[_Move] = set()
        for step in self._parts.steps:
            move, cells = _move(step), [(micro, step.stage) for micro in step.micros]
            text = line(step, header)
            if not isinstance(step, WaitMove):
                yield from self._touched(step, [other for cell in cells for other in under_way[cell]])
                if step.kind.moves:
                    launched.add(move)
                    for cell in cells:
                        under_way[cell].append(move)
            elif move not in self._launches:
                missing = line(Compute(step.kind, step.micros, step.stage), header)
                yield say.WaitForNoMove(step.origin, worker, text, missing)
            elif move in ended:
                yield say.WaitRepeated(step.origin, worker, text, step.kind.noun, self._waits[move].origin)
            elif move not in launched:
                launch = self._launches[move]
                yield say.WaitBeforeLaunch(step.origin, worker, text, line(launch, header), launch.origin)
            else:
                ended.add(move)
                for cell in cells:
                    under_way[cell].remove(move)
        for move, launch in self._launches.items():
            if move not in self._waits:
                wait = line(WaitMove(*move), header)
                yield say.MissingWaitMove(launch.origin, worker, wait, launch.kind.noun, line(launch, header))

    def _touched(self, step: MoveStep, under_way: list[_Move]) -> Iterator[Diagnostic]:
        """Yields a diagnostic for each move of the same cell for which the lane waits only after ``step``."""
        for move in dict.fromkeys(under_way):
            if move not in self._waits:
                continue
            wait, out = self._waits[move], move[0].offloads
            message = say.UseBeforeOut if out else say.UseBeforeBack
            texts = line(step, self._header), line(wait, self._header)
            yield message(step.origin, self._worker, *texts, wait.origin, self._content(move))

    def _content(self, move: _Move) -> str:
        kind, micros, stage = move
        what = "operands" if kind.moves_operands else "activations"
        return f"the {what} of {micros_name(micros, self._header.slices)} on stage {stage}"


def _move(step: MoveStep) -> _Move:
    return step.kind, step.micros, step.stage


# The two transports of the rule "channels", and the replay of lanes on them.
#
# Directed queues (NCCL)
#     One in-order queue per directed pair of workers. A transfer happens when its send and its receive are both at the
#     head.
# Tagged (gloo)
#     A transfer happens once both ends are posted, in any order.
#
# On both, posting never blocks a lane; a wait blocks it until the transfer has happened. A sum is done once every
# worker that holds any stage of its group has launched it; every weight group has its own communicator.
#
# If every pair of workers sends and receives in the same order, the two transports behave the same: once both ends of a
# message are posted, so are both ends of all messages before it in its queue, which have left the queue. So the rule
# checks first that the orders agree, and then plays the lanes only once.


class Transport(Enum):
    """The way in which messages find their receivers; the value is its name in diagnostics."""

    DIRECTED = "in-order queues (NCCL)"
    TAGGED = "tagged messages (gloo)"


def awaited(program: Program) -> list[tuple[int, ...]]:
    """Returns, for each instruction, the instructions of any lane that must have run before it can go on.

    Instructions are numbered lane by lane. A wait for a message needs its send and its receive to be posted; a wait for
    a sum needs the launch of every worker of the sum. The instruction before it in its own lane is not listed.
    """
    # The posts of each message, by its key, and behind them the launches of each sum.
    header = program.header
    first_sum = 2 * header.stages * header.micro_batches
    starts = [*accumulate((parts.length for parts in program.parts), initial=0)]
    posts: list[tuple[int, ...]] = [()] * (first_sum + len(header.groups) * header.updates)
    for start, parts in zip(starts, program.parts, strict=False):
        for place, post in chain[tuple[int, Send | Recv]](parts.sends, parts.recvs):
            posts[key(header, post.message)] += (start + place,)
        for place, instruction in parts.updates:
            if isinstance(instruction, AllReduce):
                posts[first_sum + sum_key(header, instruction)] += (start + place,)
    # Each wait waits for all posts of its message, or all launches of its sum.
    before: list[tuple[int, ...]] = [()] * starts[-1]
    for start, parts in zip(starts, program.parts, strict=False):
        for place, wait in chain[tuple[int, WaitSend | WaitRecv]](parts.wait_sends, parts.wait_recvs):
            before[start + place] = posts[key(header, wait.message)]
        for place, instruction in parts.updates:
            if isinstance(instruction, WaitAllReduce):
                before[start + place] = posts[first_sum + sum_key(header, instruction)]
    return before


def replay(program: Program, until: Sequence[int] | None = None) -> Played:
    """Plays the lanes as far as they get; with ``until``, each lane stops before that place at the latest.

    Posting never blocks and no event is undone, so each lane gets equally far in whatever order lanes are played. The
    program has no errors by the rules "messages" and "gradients". On directed queues, its workers must also send and
    receive in the same orders.
    """
    starts = accumulate((len(lane) for lane in program.lanes), initial=0)
    lengths = until or [len(lane) for lane in program.lanes]
    lanes = [range(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    return play(lanes, awaited(program))


# Rule "channels": the program, with all its waits and sums, finishes on both transports (see `transport`).
#
# The proof is a global order in which no wait blocks. If there is none, the diagnostic shows a shortest cycle of
# workers that wait for each other.


@dataclass(frozen=True, slots=True)
class Certificate:
    """Proof that a program finishes on a ``transport``: an order of all its instructions in which no wait blocks.

    The order is ``played.order``. Instructions are numbered lane by lane.
    """

    transport: Transport
    played: Played


def channels(program: Program) -> tuple[Certificate, ...] | tuple[Diagnostic, ...]:
    """Returns a certificate for each transport or, if the program does not finish on one of them, the errors.

    The program obeys the rules "messages" and "gradients".
    """
    # If all orders agree, both transports behave the same (`transport`), so one replay proves both.
    disorder = tuple(_disorder(program))
    transports = [Transport.TAGGED] if disorder else list(Transport)
    result = replay(program)
    if [*result.places] != [*map(len, program.lanes)]:
        return (*disorder, _deadlock(program, transports, result))
    return disorder or tuple(Certificate(transport, result) for transport in transports)


def _disorder(program: Program) -> Iterator[Diagnostic]:
    """Yields, for every directed pair of workers, the first receive that would get the message of another send."""
    sends: dict[tuple[int, int], list[Send]] = {}
    recvs: dict[tuple[int, int], list[Recv]] = {}
    for worker, parts in enumerate(program.parts):
        for send in parts.sends.lines:
            sends.setdefault((worker, send.to), []).append(send)
        for recv in parts.recvs.lines:
            recvs.setdefault((recv.source, worker), []).append(recv)
    for (peer, worker), sent in sends.items():
        for number, (send, recv) in enumerate(zip(sent, recvs[peer, worker], strict=True), start=1):
            if send.message is not recv.message and send.message != recv.message:
                yield ReceivesOutOfOrder(
                    recv.origin,
                    worker,
                    line(recv, program.header),
                    peer,
                    line(send, program.header),
                    number,
                    send.origin,
                )
                break


def _deadlock(program: Program, transports: list[Transport], result: Played) -> Diagnostic:
    """Returns the diagnostic of a shortest cycle of workers that wait for each other.

    ``result`` says at which instructions the lanes stop, on ``transports``.
    """
    from chimera_ir.flow.engine import digraph, shortest_cycle

    blocked = {Worker(w): place for w, place in enumerate(result.places) if place < len(program.lanes[w])}
    wanted = {worker: _wanted(program, worker, place, result) for worker, place in blocked.items()}
    waits = ((worker, peer, dict[str, object]()) for worker, wants in wanted.items() for peer, _ in wants)
    cycle = shortest_cycle(digraph([{}] * len(program.lanes), waits))
    chain = [_blocked(program, worker, blocked[worker], wanted[worker], cycle) for worker in map(Worker, cycle)]
    names = ", nor with ".join(transport.value for transport in transports)
    return Deadlock(chain[0].span, names, tuple(chain))


def _wanted(program: Program, worker: Worker, place: int, result: Played) -> list[tuple[Worker, Instruction]]:
    """Returns the instructions of other lanes without which ``worker`` cannot go on, each with the worker of its lane.

    ``place`` is where the lane of ``worker`` is blocked: at a wait for a message or for a sum. ``result`` says how far
    every lane gets; the returned instructions come after that.
    """
    header = program.header
    match program.lanes[worker][place]:
        case WaitRecv(message):
            return _posting(program, result, sender(header, message), Send, message)
        case WaitSend(message):
            return _posting(program, result, receiver(header, message), Recv, message)
        case WaitAllReduce(group, version=version):
            rest = ((member, result.places[member]) for member in header.members(group))
            return [
                (member, instruction)
                for member, start in rest
                for instruction in program.lanes[member][start:]
                if isinstance(instruction, AllReduce) and (instruction.group, instruction.version) == (group, version)
            ]
        case _:
            raise AssertionError("only waits block")


def _posting(
    program: Program, result: Played, peer: Worker, kind: type[Send | Recv], message: Message
) -> list[tuple[Worker, Instruction]]:
    rest = program.lanes[peer][result.places[peer] :]
    return [
        (peer, instruction) for instruction in rest if isinstance(instruction, kind) and instruction.message == message
    ]


def _blocked(
    program: Program, worker: Worker, place: int, wants: list[tuple[Worker, Instruction]], cycle: tuple[int, ...]
) -> Blocked:
    wait = program.lanes[worker][place]
    after = cycle[(cycle.index(worker) + 1) % len(cycle)]
    peer, needed = next(want for want in wants if want[0] == after)
    return Blocked(
        worker, line(wait, program.header), _meaning(program, wait), line(needed, program.header), peer, wait.origin
    )


def _meaning(program: Program, wait: Instruction) -> str:
    header = program.header
    match wait:
        case WaitRecv(message):
            return f"{content(header, message)} (worker {sender(header, message)})"
        case WaitSend(message):
            return f"worker {receiver(header, message)} to take {content(header, message)}"
        case WaitAllReduce():
            return f"the sum of the gradients of {summed(wait)}"
        case _:
            raise AssertionError("only waits block")


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
    """Notes where ``lines`` of one type stand; ``at_start`` says that they belong in the sender's lane."""
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
    """The mistake of a line about a message that its worker neither sends nor receives, if it is one."""
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
    """The micro-batches that ``maker`` hands on together with the first one of a message."""
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


# Proof that a program finishes with fewer communicators than the rule "channels" asks for.
#
# With one communicator for each direction between two workers, every program finishes that passes the rule. With one
# for both directions, the sends and receives between two workers share a CUDA stream on each of them. They start in the
# order in which they are posted, each after the one before is over, and each is over only when its other end has
# started as well.
#
# Then the two workers must post the messages between them in the same order. If one worker posts x before y and the
# other one y before x, each waits for the other. If the orders agree, then once both ends of a message are posted, so
# are both ends of all messages before it in its CUDA stream, and these are over. So a wait blocks exactly where it does
# with tagged messages (see `transport`), and what is proven for tagged messages holds here.


@dataclass(frozen=True, slots=True)
class Communication:
    """The result for a choice of ``communicators``: whether a program finishes with them, and why or why not.

    ``count`` is the number of communicators for the messages of one copy of the workers. ``played`` is a global order
    in which the program finishes, None if it does not. In that case ``blocked`` names in a few words the operations
    that wait for each other.
    """

    communicators: Communicators
    count: int
    played: Played | None
    blocked: str = ""

    @property
    def finishes(self) -> bool:
        """Whether the program is proven to finish with these communicators."""
        return self.played is not None


def communications(level: Program | ProgramStream, program: Program, played: Played) -> Iterator[Communication]:
    """Yields for each choice of communicators whether the program finishes, from the most communicators to the fewest.

    The level has no errors by any rule; ``program`` is the part of it that is proven (`ir.streams.view_of`), ``played``
    the certificate of the rule "channels".
    """
    peers = ({send.to for send in parts.sends.lines} for parts in program.parts)
    links = [(worker, peer) for worker, of_worker in enumerate(peers) for peer in of_worker]
    yield Communication(Communicators.DIRECTED, len(links), played)
    crossing = _crossing(_shown(level, program))
    pairs = {frozenset(link) for link in links}
    yield Communication(Communicators.PAIR, len(pairs), None if crossing else played, crossing)


def _shown(level: Program | ProgramStream, program: Program) -> Program:
    """Returns the program or, of a stream, as many updates as it takes to show any two messages in different orders.

    Such messages are posted in one order by their sender and in the other order by their receiver. Two posts of them
    are at most one turn further apart than the lines of one turn that post messages.
    """
    if isinstance(level, Program):
        return program
    header = level.header
    turns = [
        extent(instruction).first // header.period
        for turn in level.turns
        for instruction in turn.instructions
        if isinstance(instruction, Send | Recv)
    ]
    updates = (max(turns, default=0) - min(turns, default=0) + 2) * header.per_turn
    return program if updates <= program.header.updates else level.view(updates)


def _crossing(program: Program) -> str:
    """The first two messages that two workers post in different orders, in a few words; empty if there are none."""
    posts = [_posts(program, Worker(number)) for number in range(program.header.workers)]
    for worker, by_peer in enumerate(posts):
        for peer in sorted(other for other in by_peer if other > worker):
            for mine, theirs in zip(by_peer[peer], posts[peer][Worker(worker)], strict=True):
                if mine.message != theirs.message:
                    texts = line(mine, program.header), line(theirs, program.header)
                    return f"`{texts[0]}` on worker {worker} and `{texts[1]}` on worker {peer} wait for each other"
    return ""


def _posts(program: Program, worker: Worker) -> dict[Worker, list[Send | Recv]]:
    parts = program.parts[worker]
    places = [
        *((place, send.to) for place, send in parts.sends),
        *((place, recv.source) for place, recv in parts.recvs),
    ]
    posts: dict[Worker, list[Send | Recv]] = {}
    for place, peer in sorted(places):
        post = program.lanes[worker][place]
        assert isinstance(post, Send | Recv)
        posts.setdefault(peer, []).append(post)
    return posts


# Rule "conflict-free": at most one operation per worker and clock (section 3.1) on each resource of the worker.
#
# A conflict is shown with the clocks around it, and the operations there of the workers that have conflicts:
#
#    clock  2        3        4        5        6
# worker 0  .        .        F m2 s0  .        F m3 s0
# worker 3  F m0 s3  B m0 s3  F m1 s3  B m1 s3  .
#                             B m4 s0

_Occupied = Mapping[tuple[Worker, Clock], Sequence[Planned]]
"""The operations on each clock of each worker."""

_REACH, _WORKERS, _ROWS = 3, 4, 4
"""The clocks drawn on each side of a conflict, the most workers drawn, and the most operations drawn on a clock."""

_WIDEST = 20
"""The most columns that the text of an operation takes."""


def conflict_free(plan: Plan) -> Iterator[Diagnostic]:
    """Yields a diagnostic for every pair of source lines with conflicts, with the first conflict and their number."""
    first: dict[tuple[int, int, Resource], Planned] = {}
    conflicts: dict[tuple[Span, Span], list[tuple[Planned, Planned]]] = {}
    for planned in plan.clocked:
        place = planned.worker, planned.clock, planned.operation.kind.occupies
        other = first.setdefault(place, planned)
        if other is not planned:
            conflicts.setdefault((other.operation.origin, planned.operation.origin), []).append((other, planned))
    places = _occupied(plan.clocked) if conflicts else {}
    for (before, after), group in conflicts.items():
        earlier, later = group[0]
        yield Conflict(
            span=after,
            worker=earlier.worker,
            clock=earlier.clock,
            first=line(earlier.operation, plan.header),
            second=line(later.operation, plan.header),
            first_span=before,
            count=len(group),
            around=_drawing(plan.header, places, (other for other, _ in group)),
        )


def _occupied(operations: Iterable[Planned]) -> _Occupied:
    by_place: dict[tuple[Worker, Clock], list[Planned]] = {}
    for planned in operations:
        by_place.setdefault((planned.worker, planned.clock), []).append(planned)
    return by_place


def _drawing(header: Header, places: _Occupied, conflicts: Iterable[Planned]) -> tuple[str, ...]:
    listed = list(conflicts)
    clocks = range(listed[0].clock - _REACH, listed[0].clock + _REACH + 1)
    workers = dict.fromkeys(planned.worker for planned in listed if planned.clock in clocks)
    rows = [["clock", *map(str, clocks)]]
    for worker in sorted([*workers][:_WORKERS]):
        columns = [_texts(header, places.get((worker, Clock(clock)), ())) for clock in clocks]
        names = chain([f"worker {worker}"], repeat(""))
        rows += [[name, *texts] for name, texts in zip(names, zip_longest(*columns, fillvalue=""), strict=False)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return tuple("  ".join([row[0].rjust(widths[0]), *map(str.ljust, row[1:], widths[1:])]).rstrip() for row in rows)


def _texts(header: Header, operations: Sequence[Planned]) -> list[str]:
    texts = [_short(line(planned.operation, header)) for planned in operations[:_ROWS]]
    return texts + (["..."] if len(operations) > _ROWS else []) or ["."]


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


# Rule "slots", a part of "messages": a receive is posted into a buffer only when its old content is not needed.
#
# A receive may write from the moment it is posted. A slot with activations is free after two events: the last backward
# of the same micro-batches and stage, which needs what the forward kept, and the end of the send of the forward's
# result, which may be in the same memory. If the next stage is on the same worker, its result may be there, too, and so
# on. A slot with gradients is free after the backward that reads them.


def slots(program: Program, cells: Flow, places: MessagePlaces) -> Iterator[Diagnostic]:
    """Yields diagnostics of receives into a slot that is in use, or whose number is not below the number of messages.

    The program has no errors by the rule "messages". ``cells`` is its data flow (`index.cells`); ``places`` are the
    places of its messages (`messages.places`).
    """
    for number, parts in enumerate(program.parts):
        worker = Worker(number)
        edges = [recv.message.edge for recv in parts.recvs.lines]
        received = Counter(edges)
        held: dict[tuple[Crossing, Slot], tuple[Recv, int]] = {}
        for (place, recv), edge in zip(parts.recvs, edges, strict=True):
            messages = received[edge]
            if not 0 <= recv.slot < messages:
                yield SlotTooHigh(recv.origin, worker, line(recv, program.header), recv.slot, messages - 1)
            shelf = (edge, recv.slot)
            before = held.get(shelf)
            if before is not None and before[1] >= place:
                yield _in_use(program, worker, recv, *before)
            held[shelf] = (recv, _last_use(program.header, worker, cells, places, recv.message))


def _last_use(header: Header, worker: Worker, cells: Flow, places: MessagePlaces, message: Message) -> int:
    last = cells.last_use(message)
    if message.value.readers is not Readers.FED:
        return last
    # Forwards on the same worker may pass the same memory on: follow it to the stages that send.
    workers, stages = header.pipe_of[message.micros[0]].workers, [message.target]
    for stage in stages:
        for target in header.readers(message.value, stage):
            made = Message(message.micros, stage, target, message.value)
            if workers[target] == worker:
                stages.append(target)
                last = max(last, cells.consumer(made))
            else:
                last = max(last, places.retired[key(header, made)])
    return last


def _in_use(program: Program, worker: Worker, recv: Recv, before: Recv, last_use: int) -> Diagnostic:
    last = program.lanes[worker][last_use]
    return SlotInUse(
        span=recv.origin,
        worker=worker,
        line=line(recv, program.header),
        slot=recv.slot,
        content=content(program.header, before.message),
        last_use=line(last, program.header),
        last_use_span=last.origin,
        first_use_span=before.origin,
    )
