"""Rule "messages": every value for another worker is sent and received once, and both workers wait for the transfer.

The send comes after the operation that makes the value, the receive and its wait before the operation that reads it.
This rule checks each lane by itself, before the rule "channels" plays all lanes together.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, chain, repeat, zip_longest
from operator import itemgetter

from chimera_ir.diagnostics.catalogue import schedule as say
from chimera_ir.diagnostics.catalogue.program import Blocked, Deadlock, ReceivesOutOfOrder, SlotInUse, SlotTooHigh
from chimera_ir.diagnostics.catalogue.schedule import Conflict
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow.engine import Played, play
from chimera_ir.flow.flow import ABSENT, Flow, crossing, passed_on
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
from chimera_ir.ir.rolled import RolledProgram
from chimera_ir.ir.streams import ProgramStream
from chimera_ir.ir.text.printer import absolute, line, message_text, micros_name
from chimera_ir.ir.turns import extent
from chimera_ir.source import Span
from chimera_ir.verify.versions import sum_key, summed


def cells(program: Program) -> Flow:
    """Returns the data flow of a complete and placed program: the place in a lane where each value is made or taken."""
    return Flow(program.header, chain.from_iterable(parts.computes for parts in program.parts))


def _key(header: Header, message: Message) -> int:
    """The index of a message, from 0 to ``len(edges) * micro_batches - 1``; its edge must be one of the header.

    No two messages of a program share it, as each micro-batch is in one message of each value and edge.
    """
    return header.edges[message[1:]] + message[0][0]


def _sender(header: Header, message: Message) -> Worker:
    return header.worker(message.micros[0], message.source)


def _receiver(header: Header, message: Message) -> Worker:
    return header.worker(message.micros[0], message.target)


def _content(header: Header, message: Message) -> str:
    """The content of a message: ``the activations of micro-batch 0 from stage 0``."""
    what, source = f"the {message.value.noun}", header.stage_name(message.source)
    return f"{what} of {micros_name(message.micros, header.slices)} from stage {source}"


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
        yield from _moves_of(program.header, Worker(number), parts)


def _moves_of(header: Header, worker: Worker, parts: LaneParts) -> Iterator[Diagnostic]:
    """Yields the mistakes of a lane, in its order, and then the moves that nothing waits for."""
    launches = {_move(step): step for _, step in parts.singles if step.kind.moves}
    waits = {_move(wait): wait for wait in reversed(parts.wait_moves.lines)}
    # The moves that were launched, those of them under way by micro-batch and stage, and those waited for.
    launched: set[_Move] = set()
    under_way: dict[tuple[Micro, Stage], list[_Move]] = defaultdict(list)
    ended: set[_Move] = set()
    for step in parts.steps:
        move, cells = _move(step), [(micro, step.stage) for micro in step.micros]
        where = step.origin, worker, line(step, header)
        if not isinstance(step, WaitMove):
            for touched in dict.fromkeys(other for cell in cells for other in under_way[cell] if other in waits):
                wait, message = waits[touched], say.UseBeforeOut if touched[0].offloads else say.UseBeforeBack
                yield message(*where, line(wait, header), wait.origin, _moved(header, touched))
            if step.kind.moves:
                launched.add(move)
                for cell in cells:
                    under_way[cell].append(move)
        elif move not in launches:
            yield say.WaitForNoMove(*where, line(Compute(*move), header))
        elif move in ended:
            yield say.WaitRepeated(*where, step.kind.noun, waits[move].origin)
        elif move not in launched:
            yield say.WaitBeforeLaunch(*where, line(launches[move], header), launches[move].origin)
        else:
            ended.add(move)
            for cell in cells:
                under_way[cell].remove(move)
    for move, launch in launches.items():
        if move not in waits:
            texts = line(WaitMove(*move), header), launch.kind.noun, line(launch, header)
            yield say.MissingWaitMove(launch.origin, worker, *texts)


def _moved(header: Header, move: _Move) -> str:
    kind, micros, stage = move
    what = "operands" if kind.moves_operands else "activations"
    return f"the {what} of {micros_name(micros, header.slices)} on stage {header.stage_name(stage)}"


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
    first_sum = len(header.edges) * header.micro_batches
    starts = [*accumulate((parts.length for parts in program.parts), initial=0)]
    posts: list[tuple[int, ...]] = [()] * (first_sum + len(header.groups) * header.updates)
    for start, parts in zip(starts, program.parts, strict=False):
        for place, post in chain[tuple[int, Send | Recv]](parts.sends, parts.recvs):
            posts[_key(header, post.message)] += (start + place,)
        for place, instruction in parts.updates:
            if isinstance(instruction, AllReduce):
                posts[first_sum + sum_key(header, instruction)] += (start + place,)
    # Each wait waits for all posts of its message, or all launches of its sum.
    before: list[tuple[int, ...]] = [()] * starts[-1]
    for start, parts in zip(starts, program.parts, strict=False):
        for place, wait in chain[tuple[int, WaitSend | WaitRecv]](parts.wait_sends, parts.wait_recvs):
            before[start + place] = posts[_key(header, wait.message)]
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
            return _posting(program, result, _sender(header, message), Send, message)
        case WaitSend(message):
            return _posting(program, result, _receiver(header, message), Recv, message)
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
            return f"{_content(header, message)} (worker {_sender(header, message)})"
        case WaitSend(message):
            return f"worker {_receiver(header, message)} to take {_content(header, message)}"
        case WaitAllReduce():
            return f"the sum of the gradients of {summed(wait, header)}"
        case _:
            raise AssertionError("only waits block")


Places = Mapping[type[Talk], Mapping[Message, int]]
"""Maps a type of lines, and a message, to the place of the first line of that type about the message in a lane."""

_HandOver = tuple[Message, Worker, Worker]
"""A message that the program needs, with its sender and its receiver."""


def places(program: Program) -> list[Places]:
    """Returns the places of the lines about messages in each lane."""
    return [
        {
            Send: _first_places(parts.sends),
            WaitSend: _first_places(parts.wait_sends),
            Recv: _first_places(parts.recvs),
            WaitRecv: _first_places(parts.wait_recvs),
        }
        for parts in program.parts
    ]


def _first_places(lines: Lines[Talk]) -> dict[Message, int]:
    return dict(zip([line.message for line in reversed(lines.lines)], reversed(lines.places), strict=True))


def messages(program: Program, cells: Flow, places: Sequence[Places]) -> Iterator[Diagnostic]:
    """Yields diagnostics of lines for messages: unknown, redundant, about the wrong peer, missing or misplaced.

    The operations of the program are complete and placed, and grouped the same way on all stages. ``cells`` is the flow
    of the program (`cells`), ``places`` are those of its lines about messages (`places`).
    """
    blocks = program.blocks
    hand_overs = [
        (message, Worker(worker), peer)
        for worker, parts in enumerate(program.parts)
        for _, message, peer in crossing(program.header, Worker(worker), parts.computes, blocks)
    ]
    wrong = [hand_over for hand_over in hand_overs if not _is_right(program, cells, places, hand_over)]
    # If every message has its four lines, and there are no more lines than these, each line is right.
    if wrong or _lines_about_messages(program) != 4 * len(hand_overs):
        for worker, lane in enumerate(program.lanes):
            for place, instruction in enumerate(lane):
                if isinstance(instruction, Talk):
                    yield from _line(program, cells, places[worker], Worker(worker), place, instruction)
    for hand_over in wrong:
        yield from _missing(program, cells, places, hand_over)
        yield from _misplaced(program, cells, places, hand_over)


def _lines_about_messages(program: Program) -> int:
    return sum(
        len(lines.places)
        for parts in program.parts
        for lines in (parts.sends, parts.wait_sends, parts.recvs, parts.wait_recvs)
    )


def _four_places(places: Sequence[Places], hand_over: _HandOver) -> tuple[int, int, int, int]:
    """The places of the send, of the wait for it, of the receive and of the wait for that; `ABSENT` without a line."""
    message, start, end = hand_over
    out, back = places[start], places[end]
    return (
        out[Send].get(message, ABSENT),
        out[WaitSend].get(message, ABSENT),
        back[Recv].get(message, ABSENT),
        back[WaitRecv].get(message, ABSENT),
    )


def _is_right(program: Program, cells: Flow, places: Sequence[Places], hand_over: _HandOver) -> bool:
    message, start, end = hand_over
    sent, retired, posted, arrived = _four_places(places, hand_over)
    in_order = ABSENT < cells.producer(message) < sent < retired
    if not (in_order and ABSENT < posted < arrived < cells.consumer(message)):
        return False
    send, recv = program.lanes[start][sent], program.lanes[end][posted]
    return isinstance(send, Send) and send.to == end and isinstance(recv, Recv) and recv.source == start


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
        return say.NotNeighbours(*where, *map(header.stage_name, message.edge[:2]))
    start, end = _sender(header, message), _receiver(header, message)
    if start == end:
        return say.WithinWorker(*where, start)
    sharing = header.sharing(message.value, message.source, message.target, message.micros[0])
    if message.target in sharing[1:]:
        first = message_text(message._replace(target=sharing[0]), absolute(header.slices))
        return say.SentOnce(*where, first, header.stage_name(sharing[0]), header.stage_name(message.target), end)
    maker = program.lanes[start][cells.producer(message)]
    handed_on = program.blocks.of(_made_with(maker, message), message.value, message.source, *sharing)
    micros = next(together for together in handed_on if message.micros[0] in together)
    if micros != message.micros:
        return say.PartOfMessage(
            *where,
            line(maker, program.header),
            message_text(message._replace(micros=micros), absolute(program.header.slices)),
        )
    peer, verb = (start, "sends") if isinstance(instruction, Send | WaitSend) else (end, "receives")
    return None if peer == worker else say.MessageElsewhere(*where, peer, verb)


def _made_with(maker: Instruction, message: Message) -> tuple[Micro, ...]:
    """The micro-batches of which ``maker`` makes the value together with that of the first one of a message."""
    parts = maker.parts if isinstance(maker, Compute | Pair) else ()
    handed_on = (
        part.micros
        for part in parts
        if message.micros[0] in part.micros and part.stage == message.source and message.value in part.kind.makes
    )
    return next(handed_on, message.micros)


def _line(
    program: Program, cells: Flow, places: Places, worker: Worker, place: int, instruction: Talk
) -> Iterator[Diagnostic]:
    mistake = _foreign(program, cells, worker, instruction)
    if mistake is not None:
        yield mistake
        return
    header, message = program.header, instruction.message
    where = instruction.origin, worker, line(instruction, header)
    first = places[type(instruction)][message]
    if first != place:
        done = {Send: "sent", Recv: "received"}.get(type(instruction), "waited for")
        yield say.RepeatedMessage(*where, _content(header, message), done, program.lanes[worker][first].origin)
    if isinstance(instruction, Send) and instruction.to != _receiver(header, message):
        yield say.WrongPeer(*where, instruction.to, _receiver(header, message), header.stage_name(message.target))
    if isinstance(instruction, Recv) and instruction.source != _sender(header, message):
        yield say.WrongPeer(*where, instruction.source, _sender(header, message), header.stage_name(message.source))


def _misplaced(program: Program, cells: Flow, places: Sequence[Places], hand_over: _HandOver) -> Iterator[Diagnostic]:
    message, start, end = hand_over
    sent, retired, posted, arrived = _four_places(places, hand_over)
    made, used, what = cells.producer(message), cells.consumer(message), _content(program.header, message)
    if ABSENT < sent < made:
        yield say.SendBeforeOperation(*_order(program, start, sent, made), what)
    if ABSENT < retired < sent:
        yield say.WaitBeforeSend(*_order(program, start, retired, sent))
    if ABSENT < arrived < posted:
        yield say.WaitBeforeRecv(*_order(program, end, arrived, posted))
    if used < arrived:
        yield say.UseBeforeWait(*_order(program, end, used, arrived), what)


def _order(program: Program, worker: Worker, early: int, late: int) -> tuple[Span, Worker, str, str, Span]:
    first, second = program.lanes[worker][early], program.lanes[worker][late]
    return first.origin, worker, line(first, program.header), line(second, program.header), second.origin


def _missing(program: Program, cells: Flow, places: Sequence[Places], hand_over: _HandOver) -> Iterator[Diagnostic]:
    header, (message, start, end) = program.header, hand_over
    sent, retired, posted, arrived = _four_places(places, hand_over)
    maker, user = program.lanes[start][cells.producer(message)], program.lanes[end][cells.consumer(message)]
    what, reader, send = _content(header, message), line(user, header), line(Send(message, end), header)
    if sent == ABSENT:
        yield say.MissingSend(maker.origin, start, send, end, what, reader, line(maker, header))
    elif retired == ABSENT:
        yield say.MissingWaitSend(program.lanes[start][sent].origin, start, line(WaitSend(message), header), send)
    if posted == ABSENT:
        recv = line(Recv(message, start, Slot(0)), header)
        yield say.MissingRecv(user.origin, end, recv, start, what, reader)
    elif arrived == ABSENT:
        yield say.MissingWaitRecv(user.origin, end, line(WaitRecv(message), header), start, what, reader)


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


def communications(
    level: Program | ProgramStream | RolledProgram, program: Program, played: Played
) -> Iterator[Communication]:
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


def _shown(level: Program | ProgramStream | RolledProgram, program: Program) -> Program:
    """Returns the program or, of a stream, as many updates as it takes to show any two messages in different orders.

    Such messages are posted in one order by their sender and in the other order by their receiver. Two posts of them
    are at most one turn further apart than the lines of one turn that post messages. Of a rolled program it is the
    beginning, which shows the first two if they are there in its window.
    """
    if isinstance(level, Program):
        return program
    if isinstance(level, RolledProgram):
        return level.beginning
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
    posts = [*map(_posts, program.parts)]
    for worker, by_peer in enumerate(posts):
        for peer in sorted(other for other in by_peer if other > worker):
            for mine, theirs in zip(by_peer[peer], posts[peer][Worker(worker)], strict=False):
                if mine.message != theirs.message:
                    texts = line(mine, program.header), line(theirs, program.header)
                    return f"`{texts[0]}` on worker {worker} and `{texts[1]}` on worker {peer} wait for each other"
    return ""


def _posts(parts: LaneParts) -> dict[Worker, list[Send | Recv]]:
    """The sends and receives of a lane, in order, by the other worker."""
    posts: dict[Worker, list[Send | Recv]] = defaultdict(list)
    for _, post in sorted([*parts.sends, *parts.recvs], key=itemgetter(0)):
        posts[post.to if isinstance(post, Send) else post.source].append(post)
    return posts


# Rule "conflict-free": at most one operation per worker and clock (section 3.1) on each resource of the worker.
#
# A conflict is shown with the clocks around it, and the operations there of the workers that have conflicts:
#
#    clock  2        3        4        5        6
# worker 0  .        .        F m2 s0  .        F m3 s0
# worker 3  F m0 s3  B m0 s3  F m1 s3  B m1 s3  .
#                             B m4 s0

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
    occupied: dict[tuple[Worker, Clock], list[Planned]] = defaultdict(list)
    for planned in plan.clocked if conflicts else ():
        occupied[planned.worker, planned.clock].append(planned)
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
            around=_drawing(plan.header, occupied, [other for other, _ in group]),
        )


def _drawing(
    header: Header, occupied: Mapping[tuple[Worker, Clock], Sequence[Planned]], conflicts: Sequence[Planned]
) -> tuple[str, ...]:
    """The operations around the first of ``conflicts``, of the workers with conflicts there, as lines of a table."""
    clocks = range(conflicts[0].clock - _REACH, conflicts[0].clock + _REACH + 1)
    workers = dict.fromkeys(planned.worker for planned in conflicts if planned.clock in clocks)
    rows = [["clock", *map(str, clocks)]]
    for worker in sorted([*workers][:_WORKERS]):
        columns = [_texts(header, occupied.get((worker, Clock(clock)), ())) for clock in clocks]
        names = chain([f"worker {worker}"], repeat(""))
        rows += [[name, *texts] for name, texts in zip(names, zip_longest(*columns, fillvalue=""), strict=False)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return tuple("  ".join([row[0].rjust(widths[0]), *map(str.ljust, row[1:], widths[1:])]).rstrip() for row in rows)


def _texts(header: Header, operations: Sequence[Planned]) -> list[str]:
    whole = [line(planned.operation, header) for planned in operations[:_ROWS]]
    texts = [text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..." for text in whole]
    return texts + (["..."] if len(operations) > _ROWS else []) or ["."]


# Rule "slots", a part of "messages": a receive is posted into a buffer only when its old content is not needed.
#
# A receive may write from the moment it is posted. A slot with activations is free after two events: the last backward
# of the same micro-batches and stage, which needs what the forward kept, and the end of the send of the forward's
# result, which may be in the same memory. If the next stage is on the same worker, its result may be there, too, and so
# on. A slot with gradients is free after the backward that reads them.


def slots(program: Program, cells: Flow, places: Sequence[Places]) -> Iterator[Diagnostic]:
    """Yields diagnostics of receives into a slot that is in use, or whose number is not below the number of messages.

    The program has no errors by the rule "messages". ``cells`` is its data flow (`cells`), ``places`` are
    those of its lines about messages (`places`).
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
            held[shelf] = (recv, _last_use(program, worker, cells, places[worker], recv.message))


def _last_use(program: Program, worker: Worker, cells: Flow, places: Places, message: Message) -> int:
    last, header = cells.last_use(message), program.header
    if message.value.readers is not Readers.FED:
        return last
    # Forwards on the same worker may pass the same memory on: follow it to the stages that send.
    workers, received = header.pipe_of[message.micros[0]].workers, [message]
    for made in chain.from_iterable(passed_on(header, each, program.blocks) for each in received):
        if workers[made.target] == worker:
            received.append(made)
            last = max(last, cells.consumer(made))
        else:
            last = max(last, places[WaitSend][made])
    return last


def _in_use(program: Program, worker: Worker, recv: Recv, before: Recv, last_use: int) -> Diagnostic:
    last = program.lanes[worker][last_use]
    return SlotInUse(
        span=recv.origin,
        worker=worker,
        line=line(recv, program.header),
        slot=recv.slot,
        content=_content(program.header, before.message),
        last_use=line(last, program.header),
        last_use_span=last.origin,
        first_use_span=before.origin,
    )
