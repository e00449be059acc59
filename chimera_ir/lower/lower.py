"""The pass from a schedule to a program: compute operations keep their order, and all other instructions are inserted.

    F m0 s1                     recv m0 s0->s1 from w0 into 0
    B m0 s1                     wait recv m0 s0->s1
                                F m0 s1
                                B m0 s1
                                send m0 s1->s0 to w0
                                all_reduce s1
                                wait send m0 s1->s0
                                wait all_reduce s1
                                step s1

The policies are in `comm` (messages and their slots) and `updates` (sums of gradients, steps and weight versions).
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import chain
from operator import attrgetter
from sys import maxsize
from typing import overload

from chimera_ir.flow.flow import Flow, crossing
from chimera_ir.flow.live import MoveWaits, waited, waits_in_turn, waits_of
from chimera_ir.flow.net import Net, TurnNet, net_of, turn_net
from chimera_ir.ir.kinds import KINDS
from chimera_ir.ir.levels import Header, Plan, Program, Schedule, in_full
from chimera_ir.ir.ops import (
    Blocks,
    Clock,
    Communicators,
    Compute,
    Instruction,
    Message,
    Micro,
    Operation,
    Planned,
    Recv,
    Send,
    Slot,
    Unclocked,
    WaitRecv,
    WaitSend,
    Worker,
    singles,
)
from chimera_ir.ir.streams import PlanStream, ProgramStream, ScheduleStream, computes, stream_with
from chimera_ir.ir.turns import Turn, later, moved
from chimera_ir.lower.comm import (
    AHEAD,
    Link,
    Traffic,
    Transfer,
    communicate,
    earliest_run,
    in_order,
    latest_run,
    placed,
    rings,
    slots,
)
from chimera_ir.lower.updates import Duration, Insertions, synchronise, update

# Makes the schedule for evaluation: the forwards alone, on the same pipes and workers, in an order made for forwards.
#
# worker 0:                    worker 0:
#   F m0 s0                      F m0 s0
#   F m1 s1                      F m1 s1
#   B m1 s1                      F m2 s0
#   B m0 s0                      F m3 s1
#   F m2 s0
#   F m3 s1
#   B m3 s1
#   B m2 s0
#
# The order of a schedule that trains makes room for backwards, which are missing here: with it, two directions on 8
# workers with 16 micro-batches would take the time of 28 or 128 forwards, where 22 are enough. So the order is made
# anew. A worker that is free runs one of the operations whose inputs are there: of the latest stage, and of these the
# first micro-batch. A micro-batch that has come far leaves before another one enters, so few micro-batches are between
# two stages at a time, and few receive buffers are needed.
#
# A schedule without a flush has forwards without end. The evaluation takes the fewest turns that have a micro-batch for
# every worker. It runs after a drain, so there is one version of the weights, the newest.


def forwards(level: Schedule | ScheduleStream) -> Schedule:
    """Returns the schedule of the forwards alone: of all operations that open a micro-batch on a stage.

    The level has no errors by the rules "complete", "placed" and "acyclic"; the result's header lists no other kinds.
    """
    if isinstance(level, Schedule):
        schedule = level
    else:  # the updates of the fewest turns that have a micro-batch for every worker
        turn = level.header
        schedule = level.view(turn.per_turn * -(-turn.workers // turn.period))
    lanes = [
        [
            Compute(KINDS[part.kind.letter], part.micros, part.stage, part.origin)
            for part in singles(lane)
            if part.kind.opens
        ]
        for lane in schedule.lanes
    ]
    return Schedule(forwards_header(schedule.header), tuple(_ordered(schedule.header, lanes)))


def forwards_header(trained: Header) -> Header:
    """The header of the forwards alone: without all that only updates have, such as backwards and recomputation."""
    return replace(
        trained,
        pipes=tuple(replace(pipe, recompute=(), recomputed=()) for pipe in trained.pipes),
        strategies=(),
        updates=1,
        period=0,
        only=tuple(kind for kind in KINDS.values() if kind.opens),
        moves=False,
        frozen=(),
        shares=(),
    )


def _ordered(header: Header, lanes: Sequence[Sequence[Compute]]) -> Iterator[tuple[Compute, ...]]:
    """Yields each worker's operations in the order of the policy above, simulated with time 1 for each micro-batch."""
    operations = [(worker, operation) for worker, lane in enumerate(lanes) for operation in lane]
    flow = Flow(header, ((number, operation) for number, (_, operation) in enumerate(operations)))
    needs = [flow.needs(operation) for _, operation in operations]
    missing, following = [*map(len, needs)], list[list[int]]([] for _ in operations)
    for number, before in enumerate(needs):
        for other in before:
            following[other].append(number)
    ready: list[list[tuple[tuple[int, tuple[Micro, ...]], int]]] = [[] for _ in lanes]
    for number, (worker, operation) in enumerate(operations):
        if not missing[number]:
            heappush(ready[worker], (_urgency(operation), number))
    # ``running`` is a heap of the operations that run, by their end; only ``awake`` workers may have something to
    # begin.
    ordered: list[list[Compute]] = [[] for _ in lanes]
    running: list[tuple[int, int, int]] = []
    now, busy, awake = 0, [False] * len(lanes), {*range(len(lanes))}
    while awake:
        for worker in awake:
            if ready[worker] and not busy[worker]:
                _, number = heappop(ready[worker])
                operation = operations[number][1]
                ordered[worker].append(operation)
                busy[worker] = True
                heappush(running, (now + len(operation.micros), worker, number))
        # Time goes on to the next end. What ends then frees its worker, and is an input of the stages that it feeds.
        awake = set()
        now = running[0][0] if running else now
        while running and running[0][0] == now:
            _, worker, done = heappop(running)
            busy[worker] = False
            awake.add(worker)
            for number in following[done]:
                missing[number] -= 1
                if not missing[number]:
                    worker, operation = operations[number]
                    heappush(ready[worker], (_urgency(operation), number))
                    awake.add(worker)
    return map(tuple, ordered)


def _urgency(operation: Compute) -> tuple[int, tuple[Micro, ...]]:
    """The sort key by which a worker chooses its next operation: latest stage, then first micro-batches."""
    return -operation.stage, operation.micros


# Takes moves of memory out of a lane, and gives them back together with the waits for them.
#
#     worker 0:                    worker 0:
#       F m0 s0                      F m0 s0
#       offload m0 s0                send m0 s0->s1 to w1
#       F m1 s0                      offload m0 s0
#       F m2 s0                      F m1 s0
#                                    wait offload m0 s0
#                                    F m2 s0
#
# The other passes lower the lane without its moves, so that these change nothing about messages and sums. A move is
# launched after everything that belongs to the operation before it; `flow.live` says where the lane waits for it.

Moves = Mapping[int, Sequence[Instruction]]
"""Maps a place of the lane without moves to the moves, and the waits for moves, that come right before it.

The length of that lane stands for its end.
"""


def without_moves(level: Schedule | ScheduleStream) -> Schedule | ScheduleStream:
    """The schedule without its moves of memory: with those operations alone that occupy the lanes."""
    lanes = tuple(tuple(line for line in lane if not line.kind.moves) for lane in level.lanes)
    return replace(level, lanes=lanes) if isinstance(level, Schedule) else stream_with(level.header, lanes)


def moves_between(lane: Sequence[Operation], waits: MoveWaits, period: int) -> Moves:
    """The moves of a lane and the waits for them, by place in the lane without moves.

    ``waits`` says where the lane waits for which moves; ``period`` is that of a stream, else 0.
    """
    lines, following = defaultdict[int, list[Instruction]](list), 0
    for place, operation in enumerate(lane):
        lines[following] += waited(lane, waits.get(place, ()), period)
        if operation.kind.moves:
            lines[following].append(operation)
        else:
            following += 1
    lines[following] += waited(lane, waits.get(len(lane), ()), period)
    return lines


def with_inserted(
    lane: Sequence[Operation],
    traffic: Traffic,
    slots: Iterable[Slot],
    insertions: Insertions,
    moves: Moves,
) -> list[Instruction]:
    """The operations of a lane, or of turn 0 of a stream, with the instructions that other passes insert.

    ``slots`` has the slot of each receive that is posted in the lane or turn. Of the instructions before an operation,
    ``moves`` come first. An inserted instruction has the origin of the operation that it serves; in a stream that may
    be in another turn.
    """
    length = len(lane)
    posted: dict[int, list[Recv]] = defaultdict(list)
    postings = (posting for posting in traffic.postings if 0 <= posting.before < length)
    for (before, transfer), slot in zip(postings, slots, strict=True):
        posted[before].append(Recv(transfer.message, transfer.sender, slot, lane[transfer.used % length].origin))
    lines: list[Instruction] = []
    for place, operation in enumerate(lane):
        lines += moves.get(place, ())
        lines += posted.get(place, ())
        lines += insertions.before.get(place, ())
        for transfer in traffic.received.get(place, ()):
            lines.append(WaitRecv(transfer.message, operation.origin))
        for transfer in traffic.retired.get(place, ()):
            lines.append(WaitSend(transfer.message, lane[transfer.produced % length].origin))
        lines.append(operation)
        for transfer in traffic.sent.get(place, ()):
            lines.append(Send(transfer.message, transfer.receiver, operation.origin))
        lines += insertions.after.get(place, ())
    return [*lines, *moves.get(length, ())]


# The pass from clocks to lanes: each worker runs its operations in the order of their clocks.
#
# F m0 s0 @ 0 on w0            worker 0:
# F m1 s0 @ 1 on w0              F m0 s0
# F m0 s1 @ 1 on w1              F m1 s0
# F m1 s1 @ 3 on w1              B m0 s0
# B m0 s1 @ 2 on w1              B m1 s0
# B m1 s1 @ 4 on w1            worker 1:
# B m0 s0 @ 3 on w0              F m0 s1
# B m1 s0 @ 5 on w0              B m0 s1
#                                F m1 s1
#                                B m1 s1


@overload
def order(plan: Plan) -> Schedule: ...


@overload
def order(plan: PlanStream) -> ScheduleStream: ...


def order(plan: Plan | PlanStream) -> Schedule | ScheduleStream:
    """The schedule in which every worker runs its operations by ascending clock; all workers are within range.

    Two operations of a worker on one clock, an error by the rule "conflict-free", keep the order of the text; a move of
    memory, which may share the clock of another operation, comes before that operation. Operations without a clock come
    last: `orders.ordering` gives them a better place. A recomputation without a clock comes right before the operation
    that needs what it makes.

    A worker's turn in a stream begins with the first of its operations on the micro-batches of the first turn. An
    operation whose clock is n turns too late for this turn is in it for micro-batches and versions of n turns before.
    """
    lanes: list[list[Planned]] = [[] for _ in range(plan.header.workers)]
    unclocked: list[Unclocked] = []
    for planned in plan.operations:
        if isinstance(planned, Planned):
            lanes[planned.worker].append(planned)
        elif isinstance(plan, PlanStream):
            lanes[planned.worker].append(Planned(Clock(plan.clocks - 1), planned.worker, planned.operation))
        else:
            unclocked.append(planned)
    if isinstance(plan, PlanStream):
        return stream_with(plan.header, in_full(plan.header, [tuple(_turn(plan, lane)) for lane in lanes]))
    for lane in lanes:
        lane.sort(key=lambda planned: (planned.clock, not planned.operation.kind.moves))
    operations = [[planned.operation for planned in lane] for lane in lanes]
    for planned_last in unclocked:
        operations[planned_last.worker].append(planned_last.operation)
    return Schedule(plan.header, in_full(plan.header, operations))


def _turn(plan: PlanStream, lane: Sequence[Planned]) -> Iterator[Compute]:
    """The operations of a worker's turn in order; ``lane`` has those of the plan's first turn, with clocks."""
    start = min((planned.clock for planned in lane), default=0)
    places = [(*divmod(planned.clock - start, plan.clocks), planned.operation) for planned in lane]
    places.sort(key=lambda place: (place[1], not place[2].kind.moves))
    return computes(later(plan.header, operation, -turns) for turns, _, operation in places)


# The pass from a schedule without end to a program without end: one turn of each worker is lowered.
#
# worker 0:                     worker 0:
#   F m s0 v-1                    recv m-1 s1->s0 from w1 into 0 of 1
#   B m-1 s0 v-2                  wait all_reduce s0 v-1
#                                 stash s0 v-2
#                                 step s0 v-1
#                                 F m s0 v-1
#                                 send m s0->s1 to w1
#                                 wait recv m-1 s1->s0
#                                 wait send m-1 s0->s1
#                                 B m-1 s0 v-2
#                                 drop s0 v-2
#                                 all_reduce s0 v
#
# Places of a lane are counted on from turn to turn, from the start of turn 0 of the worker; those before it are
# negative.


def lower_stream(
    stream: ScheduleStream,
    ahead: int,
    duration: Duration,
    communicators: Communicators,
    moves: Iterable[Moves],
) -> ProgramStream:
    """The program without end that runs a schedule without end; arguments as in `lower.lower`.

    ``moves`` are the moves of memory of each turn, which the schedule does not have.
    """
    net, turns = turn_net(stream), list[Turn]()
    links = _links(net, ahead)
    traffics = in_order(placed(links, [maxsize] * len(net.lanes), {}, ahead, communicators), -maxsize)
    for lane, traffic, insertions, between in zip(stream.lanes, traffics, update(net, duration), moves, strict=True):
        slots, sizes = rings(traffic.postings, len(lane), net.header.period)
        turns.append(Turn(tuple(with_inserted(lane, traffic, slots, insertions, between)), sizes))
    return ProgramStream(net.header, tuple(turns))


def _links(net: TurnNet, ahead: int) -> dict[Link, list[Transfer]]:
    """The messages of every directed pair of workers that matter for turn 0 of a stream, in the order sent.

    They are of several turns: all that decide where those of turn 0 are posted and waited for.
    """
    lengths = [lane.length for lane in net.lanes]
    links = _of_turn(net)
    # For each message, the turns of its sender and of its receiver in which it is sent and used.
    ends = {
        link: [(t.produced // lengths[t.sender], t.used // lengths[t.receiver]) for t in transfers]
        for link, transfers in links.items()
    }
    reach = 2 * max((abs(sent - used) for sent, used in chain(*ends.values())), default=0) + 2 + ahead
    return {
        link: _around(transfers, reach, {*chain(*ends[link])}, net.header, lengths) for link, transfers in links.items()
    }


def _of_turn(net: TurnNet) -> Mapping[Link, list[Transfer]]:
    header, period, flow = net.header, net.header.period, net.flow
    links: dict[Link, list[Transfer]] = defaultdict(list)
    for number, lane in enumerate(net.lanes):
        worker = Worker(number)
        of_turn = (
            (
                place - turn * lane.length,
                Compute(operation.kind, moved(operation.micros, -turn * period), operation.stage),
            )
            for place, operation in enumerate(lane.operations)
            for turn in [operation.micros[0] // period]
        )
        for produced, message, peer in crossing(header, worker, of_turn, Blocks()):
            receiver = net.lanes[peer]
            last_use = max(
                receiver.place(*net.at(flow.last_use(message._replace(micros=(Micro(micro % period),)))))
                + micro // period * receiver.length
                for micro in message.micros
            )
            used = receiver.place(*net.at(flow.consumer(message)))
            links[worker, peer].append(Transfer(message, worker, peer, produced, used, last_use))
    return links


def _around(
    transfers: Sequence[Transfer], reach: int, ends: Collection[int], header: Header, lengths: Sequence[int]
) -> list[Transfer]:
    """The messages of a link that are sent or used within ``reach`` turns of turn 0, in the order sent.

    ``transfers`` are those of one turn; ``ends`` are the turns in which they are sent and used. ``lengths`` has the
    number of operations in a turn of each worker.
    """
    messages: list[Transfer] = []
    for turn in range(-reach - max(ends), reach + 1 - min(ends)):
        for message, sender, receiver, produced, used, over in transfers:
            sent, received = turn * lengths[sender], turn * lengths[receiver]
            later = Message(moved(message.micros, turn * header.period), *message.edge)
            messages.append(Transfer(later, sender, receiver, produced + sent, used + received, over + received))
    return sorted(messages, key=attrgetter("produced"))


def _unit_time(_: Operation) -> int:
    return 1


def lower(
    schedule: Schedule | ScheduleStream,
    ahead: int = AHEAD,
    duration: Duration = _unit_time,
    net: Net | None = None,
    communicators: Communicators = Communicators.DIRECTED,
) -> Program | ProgramStream:
    """The program that runs a schedule; of a schedule stream, a program stream.

    Every hand-over between workers is one message, which is sent, received and waited for at both ends, and which has a
    slot of its own while it is needed. Every stage that a worker holds is summed and stepped once per update. An
    inserted instruction has the origin of the operation that it serves.

    The schedule has no errors by the rules "complete", "placed" and "acyclic"; ``net`` is its net, if known already. A
    receive is posted ``ahead`` operations before its use. ``duration`` gives the time of an operation in any unit,
    which decides where a bubble is. ``communicators`` says with how many the program must finish: one per directed pair
    of workers, or one per pair.

    Raises `ValueError` if ``ahead`` is negative, or if the schedule is some updates of a stream: lower the stream.
    """
    if ahead < 0:
        raise ValueError("ahead must be at least 0")
    header, is_stream = schedule.header, isinstance(schedule, ScheduleStream)
    if header.period and not is_stream:
        raise ValueError("some updates of a stream are not lowered by themselves")
    moves: list[Moves] = [{}] * header.workers
    if header.moves:
        waits = waits_in_turn if is_stream else waits_of
        moves = [moves_between(lane, waits(header, lane), header.period) for lane in schedule.lanes]
        schedule, net = without_moves(schedule), None
    if isinstance(schedule, ScheduleStream):
        return lower_stream(schedule, ahead, duration, communicators, moves)
    net = net or net_of(schedule)
    run = (latest_run if header.trains else earliest_run)(net) if not all(map(header.answered, header.edges)) else None
    traffics = communicate(schedule, ahead, run, communicators)
    lanes = zip(schedule.lanes, traffics, synchronise(schedule, duration, net), moves, strict=True)
    return Program(
        header,
        tuple(
            (
                *sums.after.get(-1, ()),
                *with_inserted(lane, traffic, slots(traffic.postings), sums, between),
                *(WaitSend(transfer.message, lane[transfer.produced].origin) for transfer in traffic.unanswered),
                *sums.at_end,
            )
            for lane, traffic, sums, between in lanes
        ),
    )
