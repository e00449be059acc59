"""Makes the net of a schedule: which compute operation waits for which.

An operation waits for the operations that make the values it reads, for those before it in its lane that `queued`
gives, and in a stream for the steps that make the weights it reads.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from itertools import accumulate, chain, count, islice, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from chimera_ir.flow.engine import Time, Waits, digraph, ends, play
from chimera_ir.flow.flow import ABSENT, Flow
from chimera_ir.flow.live import MoveWaits, waits_in_turn, waits_of
from chimera_ir.ir.kinds import Resource
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Instruction,
    Micro,
    Operation,
    Recv,
    Send,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
    WeightGroup,
    singles,
)
from chimera_ir.ir.streams import ProgramStream, ScheduleStream
from chimera_ir.ir.turns import Turn, extent, in_slot, in_turn, later

if TYPE_CHECKING:
    from chimera_ir.flow.engine import IntGraph

# Finds how many updates a training loop must have given before a worker may run a turn of a stream.
#
# On every worker a training loop gives the mini-batch of one update after the other, and the worker runs the turns that
# are about the updates given so far. In such a turn it must never wait for what another worker does only when a further
# update is given: the training loop there may itself be waiting for this worker, for example for a loss. So a turn may
# need updates that it is not about. In 1F1B with D = 2 and an update for each micro-batch:
#
# worker 0:                           worker 1:
#   recv m-1 s1->s0 from w1             wait recv m s0->s1
#   F m s0 v-1                          F m s1 v
#   send m s0->s1 to w1                 recv m+1 s0->s1 from w0                turn k needs update k+1, by this line
#   wait recv m-1 s1->s0                B m s1 v
#   B m-1 s0 v-2                        send m s1->s0 to w0
#
# Turn k of worker 0 waits for gradients from turn k-1 of worker 1, so it needs update k, which it is about anyway.
#
# Where the last whole turns would wait for one another in a cycle, turns begin elsewhere: each right before the first
# line that needs a later update, by itself or through what it waits for. Operations alone:
#
# worker 0:           worker 1:           worker 0:           worker 1:
#   F m s0 v-2          F m s1 v-2          F m s0 v-2          B m s3 v-2
#   B m-1 s2 v-3        F m s3 v-2          B m-1 s2 v-3        B m s1 v-2
#   F m s2 v-2          B m s3 v-2          F m s2 v-2          F m+1 s1 v-1
#   B m-1 s0 v-3        B m s1 v-2          B m-1 s0 v-3        F m+1 s3 v-1
#
# On the left, `B m s1` in turn k of worker 1 waits for turn k+1 of worker 0, in which `F m s2` waits for turn k+1 of
# worker 1. However many updates are given, the last turns never end.

_Key = tuple[object, ...]


class RunnableTurn(NamedTuple):
    """A worker's turn, which can run once ``ahead`` updates after the first update of the turn have been given."""

    turn: Turn
    ahead: int


class _Wait(NamedTuple):
    """A wait of line ``place`` of a worker's turn k for line ``posted`` in turn k + ``later`` of worker ``other``."""

    place: int
    other: int
    posted: int
    later: int


def runnable_turns(stream: ProgramStream) -> list[RunnableTurn]:
    """The turn of each worker with the number of updates that it needs (``ahead``).

    A turn may begin at another line than in the stream, which is a program without errors by any rule.
    """
    header = stream.header
    lengths = [max(1, len(turn.instructions)) for turn in stream.turns]
    waits = _program_waits(stream)
    # Lines are counted on from the first line of turn 0. Given the updates of turn 0, how far does each worker get by
    # its own lines alone?
    ends = [_own_end(header, turn) for turn in stream.turns]
    # How many of these turns may each worker run, if a worker runs whole turns only, each as if it were one line? If
    # workers wait in a cycle, the numbers fall without end; else nothing changes after a pass for each worker.
    whole = [[wait._replace(place=0, posted=0) for wait in of_worker] for of_worker in waits]
    own_turns = [end // length for end, length in zip(ends, lengths, strict=True)]
    turns = _lines_run(whole, own_turns, [1] * len(own_turns), range(len(own_turns) + 1))
    if turns is not None:
        return [RunnableTurn(turn, _ahead(header, number)) for turn, number in zip(stream.turns, turns, strict=True)]
    # None of them ends. How many lines may each worker run? Its turns begin behind these.
    run = _lines_run(waits, ends, lengths, count())
    assert run is not None, "in a verified program no lines wait in a cycle"
    return [
        RunnableTurn(_beginning_at(header, turn, lines % length), _ahead(header, lines // length))
        for turn, lines, length in zip(stream.turns, run, lengths, strict=True)
    ]


def runnable_stream(stream: ProgramStream) -> ProgramStream:
    """The stream with its turns as `runnable_turns` cuts them: the same lines, but begun elsewhere."""
    return replace(stream, turns=tuple(runnable.turn for runnable in runnable_turns(stream)))


def lag(turns: Sequence[RunnableTurn]) -> int:
    """How many more updates must be given before an update is complete: stepped on every worker."""
    return max(
        runnable.ahead - extent(line).first
        for runnable in turns
        for line in runnable.turn.instructions
        if isinstance(line, Step)
    )


def _ahead(header: Header, turns: int) -> int:
    """``ahead`` of a `RunnableTurn` whose first turn that cannot run with the updates of turn 0 is ``turns``."""
    return (2 - turns) * header.per_turn - 1


def _own_end(header: Header, turn: Turn) -> int:
    """The lines that a worker can run by itself, from turn 0 on, when the updates of turn 0 have been given."""
    length = len(turn.instructions)
    return min(
        ((1 - _turn_of(header, line)) * length + place for place, line in enumerate(turn.instructions)), default=1
    )


def _turn_of(header: Header, line: Instruction) -> int:
    """The number of the turn to which the last micro-batch of a line, or the update of the line, belongs."""
    _, last, of_updates = extent(line)
    return last // (header.per_turn if of_updates else header.period)


def _program_waits(stream: ProgramStream) -> list[list[_Wait]]:
    """The waits in each worker's turn for lines of other workers."""
    header = stream.header
    posts: dict[_Key, list[tuple[int, int, int]]] = {}
    for worker, turn in enumerate(stream.turns):
        for place, line in enumerate(turn.instructions):
            if isinstance(line, Send | Recv | AllReduce):
                key, number = _key(header, type(line), line)
                posts.setdefault(key, []).append((worker, place, number))
    return [
        [
            _Wait(place, other, posted, number - other_number)
            for place, line in enumerate(turn.instructions)
            if isinstance(line, WaitSend | WaitRecv | WaitAllReduce)
            for key, number in [_key(header, _AWAITED[type(line)], line)]
            for other, posted, other_number in posts[key]
        ]
        for turn in stream.turns
    ]


_AWAITED: dict[type[Instruction], type[Instruction]] = {WaitRecv: Send, WaitSend: Recv, WaitAllReduce: AllReduce}
"""Maps each type of wait to the type of the line, on another worker, that ends the wait."""


def _key(header: Header, posted: type[Instruction], line: Instruction) -> tuple[_Key, int]:
    """A key of the message or the sum of a line, the same in every turn, and the number of the turn of that.

    ``posted`` is the type of the line that sends, receives or launches, and is a part of the key.
    """
    first, number = in_turn(header, line)
    if isinstance(first, AllReduce | WaitAllReduce):
        return (posted, first.group, first.version), number
    assert isinstance(first, Send | Recv | WaitSend | WaitRecv)
    return (posted, first.message), number


def _lines_run(
    waits: Sequence[Sequence[_Wait]], ends: Sequence[int], lengths: Sequence[int], passes: Iterable[int]
) -> list[int] | None:
    """How many lines, from turn 0 on, each worker can run before the first that waits for ever.

    ``ends`` has these numbers as far as each worker's own lines decide, ``lengths`` the number of lines in a turn. Each
    of the ``passes`` lowers them to what the waits for other workers allow, until nothing changes; None if they end
    before that.
    """
    ends = [*ends]
    for _ in passes:
        before = [*ends]
        for worker, worker_waits in enumerate(waits):
            for place, other, posted, later_turns in worker_waits:
                last = (ends[other] - 1 - posted) // lengths[other]  # the last turn in which the other worker posts it
                ends[worker] = min(ends[worker], (last - later_turns + 1) * lengths[worker] + place)
        if ends == before:
            return ends
    return None


def _beginning_at(header: Header, turn: Turn, place: int) -> Turn:
    """A turn that begins at ``place`` of another one, and ends with the lines before that place, a turn later."""
    again = [in_slot(turn.rings, later(header, line, 1), 1) for line in turn.instructions[:place]]
    return replace(turn, instructions=(*turn.instructions[place:], *again))


@dataclass(frozen=True, slots=True)
class Net:
    """The operations of a schedule, numbered lane by lane, and the operations that each waits for.

    ``lanes[w]`` are the numbers of worker w's operations. ``order`` has each operation after all its predecessors, as
    workers play their lanes; those that wait for ever in a cycle are not in it.
    """

    schedule: Schedule
    operations: tuple[Operation, ...]
    lanes: tuple[range, ...]
    predecessors: tuple[tuple[int, ...], ...]
    order: Sequence[int]

    def ends(self, durations: Sequence[Time]) -> list[Time]:
        """The time at which each operation ends, if it begins as soon as all its predecessors have ended."""
        return ends(self.order, self.predecessors, durations)

    def graph(self, attributes: Iterable[Mapping[str, object]] | None = None) -> "IntGraph":
        """The operations, by number, as the nodes of a new networkx graph, with an edge to each operation that waits.

        An edge says ``why``: the later operation reads ``data`` that the earlier one makes, or is after it in the
        ``order`` of its worker, or a ``sum`` of gradients, and the step after it, are between them; the first of these
        that holds. ``attributes`` are those of the nodes.
        """
        owner = [worker for worker, lane in enumerate(self.lanes) for _ in lane]
        reads = reads_of(self.schedule)
        data, order, of_sum = [dict[str, object](why=why.value) for why in Why]

        def edges() -> Iterator[tuple[int, int, dict[str, object]]]:
            for number, (read, before) in enumerate(zip(reads, self.predecessors, strict=True)):
                for other in before:
                    in_lane = owner[other] == owner[number] and other < number
                    yield other, number, data if other in read else order if in_lane else of_sum

        return digraph([{}] * len(owner) if attributes is None else attributes, edges())


class Why(Enum):
    """The reason why an operation comes before another one, on an edge of `Net.graph`."""

    DATA = "data"
    ORDER = "order"
    SUM = "sum"


Reads = Sequence[tuple[int, ...]]
"""The numbers of the operations that make the values each operation reads; all are numbered lane by lane."""


def reads_of(schedule: Schedule) -> Reads:
    """The operations that make the values each operation of a schedule reads.

    The schedule has no errors by the rules "complete" and "placed".
    """
    operations = tuple(chain.from_iterable(schedule.lanes))
    return list(map(Flow(schedule.header, enumerate(operations)).needs, operations))


def net_of(schedule: Schedule) -> Net:
    """The net of a complete schedule, in time linear in the number of operations.

    In a stream an operation that reads version v of a stage waits for the step that makes the version. The net has no
    steps, so it waits for the last operations that add to the gradients of update v-1, on all workers that hold the
    stage or a stage tied to it. The operations that add to the gradients of update v wait for them, too, because both
    updates add up in the same memory.

    Raises `KeyError` if the schedule lacks an operation that another one needs: it was not verified.
    """
    lanes, reads = numbered(schedule), reads_of(schedule)
    lasts = chain.from_iterable(map(partial(queued, schedule.header), schedule.lanes, lanes))
    before = [read if read[-1:] == last else (*read, *last) for read, last in zip(reads, lasts, strict=True)]
    if ABSENT in chain.from_iterable(reads):
        raise KeyError("an operation is missing; only a verified schedule has a net")
    for after, added in _steps(schedule, lanes):
        before[after] = tuple(dict.fromkeys((*before[after], *added)))
    played = play(lanes, before)
    return Net(schedule, tuple(chain.from_iterable(schedule.lanes)), lanes, tuple(before), played.order)


def queued(header: Header, lane: Iterable[Operation], numbers: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """The operations of a lane, by ``numbers``, that must end before each of its operations begins.

    An operation follows the last one before it that occupies the worker's lane and, if it occupies another resource,
    also the last one that occupies that resource, and the moves that the lane has waited for before it.
    """
    if header.lanes_only:
        return chain([()][: len(numbers)], zip(numbers[:-1], strict=True))
    operations = tuple(lane)
    waits = {place: [numbers[move] for move in moves] for place, moves in waits_of(header, operations).items()}
    return queued_by_resource(operations, numbers, waits)


def queued_by_resource(
    lane: Iterable[Operation], numbers: Sequence[int], waits: MoveWaits
) -> Iterator[tuple[int, ...]]:
    """Yields what `queued` returns, where ``waits`` maps places to the numbers of the moves waited for before them."""
    last: dict[Resource, int] = {}
    # The moves that the lane has waited for since the last operation that occupies it.
    awaited: list[int] = []
    for place, operation in enumerate(lane):
        awaited += waits.get(place, ())
        resources = dict.fromkeys((Resource.LANE, operation.kind.occupies))
        queues = [last[resource] for resource in resources if resource in last]
        yield tuple(dict.fromkeys((*queues, *awaited)))
        last[operation.kind.occupies] = numbers[place]
        if not operation.kind.moves:
            awaited = []


def _steps(schedule: Schedule, lanes: Sequence[range]) -> Iterator[tuple[int, Iterable[int]]]:
    """Yields (operation, those that it waits for), by number, for operations that need a step.

    Per lane and resource that is only the first operation that needs the step; later ones follow it.
    """
    if not schedule.header.steps_inside:
        return
    # Each worker's last operation that adds to the gradients of a group in an update: the step waits for all of them.
    groups_with = schedule.header.groups_with
    last: dict[tuple[WeightGroup, int], dict[int, int]] = defaultdict(dict)
    for worker, (lane, numbers) in enumerate(zip(schedule.lanes, lanes, strict=True)):
        for number, part in zip(numbers, singles(lane), strict=True):
            if part.kind.sums:
                update = schedule.header.update_of(part.micros)
                for group in groups_with[part.stage]:
                    last[group, update][worker] = number
    for lane, numbers in zip(schedule.lanes, lanes, strict=True):
        for resource in dict.fromkeys(operation.kind.occupies for operation in lane):
            parts = zip(numbers, singles(lane), strict=True)
            queue = [(number, part) for number, part in parts if part.kind.occupies is resource]
            for group, places in places_after(schedule.header, [part for _, part in queue]).items():
                for update, place in enumerate(places):
                    yield queue[place][0], last[group, update].values()


def places_after(header: Header, lane: Iterable[Operation]) -> dict[WeightGroup, list[int]]:
    """The places in a lane of the first operations that need the steps of each weight group's updates.

    Entry u is for the step of update u. The list ends with the last step that any operation needs.
    """
    places: dict[WeightGroup, list[int]] = defaultdict(list)
    groups_with = header.groups_with
    for place, operation in enumerate(singles(lane)):
        version = newest(header, operation)
        for group in groups_with[operation.stage]:
            after = places[group]
            if version > len(after):
                after += [place] * (version - len(after))
    return places


def newest(header: Header, operation: Compute) -> int:
    """The newest version of its stage's weights that must exist before an operation begins.

    It is the version that the operation reads. An operation that adds to the gradients of update u needs version u too:
    the step of the update before must be over, since the gradients of both add up in the same memory.
    """
    read = operation.version or 0
    return max(read, min(operation.micros) // header.per_update) if operation.kind.sums else read


def numbered(schedule: Schedule) -> tuple[range, ...]:
    """The numbers of the operations of each lane, counted lane by lane."""
    bounds = accumulate((len(lane) for lane in schedule.lanes), initial=0)
    return tuple(range(start, end) for start, end in pairwise(bounds))


# Makes the net of a turn: which operation of a stream waits for which, as a periodic system (`flow.cycles`).
#
#     worker 0:             worker 1:             0  F m s0     waits for 1 a turn ago
#       F m s0 v-1            F m s1 v            1  B m-1 s0   waits for 0, and for 3 a turn ago
#       B m-1 s0 v-2          B m s1 v            2  F m s1     waits for 0, and for 3 a turn ago
#                                                 3  B m s1     waits for 2
#
# Nodes are the operations of one turn of every worker, lane by lane; each stands for the same operation of all turns.
# Places of a lane are counted from the start of turn 0 of the worker, on and on through later turns; places of earlier
# turns are negative. If a turn has n operations, place p + n has the operation of place p, on micro-batches and with a
# version of the turn after.

_Marks = dict[WeightGroup, list[tuple[int, int]]]
"""The operations of a turn that use a weight group's weights, by group: each as (place, an update or a version)."""


class TurnLane:
    """The turn of a worker as nodes of a net, numbered from ``first`` on, and the weights that its operations use.

    Three mappings have a list for each weight group, with a pair (place, number) for each operation on the group:
    ``needs`` with the version that must exist before the operation starts, ``reads`` with the version that it reads,
    and ``sums`` with the update to whose gradients it adds.
    """

    def __init__(self, header: Header, operations: tuple[Compute, ...], first: int) -> None:
        self.operations, self.length, self.per_turn = operations, len(operations), header.per_turn
        self.first = first
        self.needs: _Marks = defaultdict(list)
        self.reads: _Marks = defaultdict(list)
        self.sums: _Marks = defaultdict(list)
        for place, operation in enumerate(operations):
            for group in header.groups_with[operation.stage] if not operation.kind.moves else ():
                self.needs[group].append((place, newest(header, operation)))
                self.reads[group].append((place, operation.version or 0))
                if operation.kind.sums:
                    self.sums[group].append((place, header.update_of(operation.micros)))

    def node(self, place: int) -> tuple[int, int]:
        """The node of the operation at ``place`` of the lane, and the number of the turn in which it is."""
        turn, inside = divmod(place, self.length)
        return self.first + inside, turn

    def place(self, node: int, turn: int) -> int:
        """The place in the lane of the operation that is ``node`` in turn number ``turn``."""
        return node - self.first + turn * self.length

    def first_need(self, group: WeightGroup, version: int, early: Iterable[tuple[int, int]] = ()) -> int:
        """The place of the first operation, in any turn, that needs ``version`` of a group or a later version.

        ``early`` adds needs to those in ``needs``: further pairs (place in turn 0, version that is needed there).
        """
        return min(
            place - self.length * ((need - version) // self.per_turn) for place, need in (*self.needs[group], *early)
        )

    def last(self, marks: Iterable[tuple[int, int]], number: int) -> int | None:
        """The place of the last operation, in any turn, that is marked with ``number``; None if there is none.

        ``marks`` are those of turn 0: pairs (place, version or update). From turn to turn, both grow.
        """
        turns = ((place, *divmod(number - have, self.per_turn)) for place, have in marks)
        return max((place + self.length * turn for place, turn, rest in turns if not rest), default=None)


@dataclass(frozen=True)
class TurnNet:
    """The net of a turn: its nodes are the operations of one turn of every worker, and node n is ``operations[n]``."""

    header: Header
    lanes: Sequence[TurnLane]

    @cached_property
    def operations(self) -> list[Compute]:
        """The operations of one turn of each worker, lane by lane."""
        return [operation for lane in self.lanes for operation in lane.operations]

    @cached_property
    def waits(self) -> Waits:
        """The nodes that each node waits for: for values, for steps, and in its lane.

        If a node waits for another node from several turns, only the latest of these is there.
        """
        nearest: list[dict[int, int]] = [{} for _ in self.operations]
        for node, other, ago in (*self._data(), *self._queues(), *self._steps()):
            nearest[node][other] = min(ago, nearest[node].get(other, ago))
        return [tuple(waits.items()) for waits in nearest]

    def _queues(self) -> Iterator[tuple[int, int, int]]:
        """Yields the waits within a lane: (node, the node that it waits for, how many turns ago that is)."""
        for lane in self.lanes:
            for place, before in enumerate(self._queued(lane)):
                for other, turn in map(lane.node, before):
                    yield lane.first + place, other, -turn

    def _queued(self, lane: TurnLane) -> Iterable[Iterable[int]]:
        """The places in its lane that each operation of a turn follows, as in `queued`."""
        if self.header.lanes_only:
            return ((place - 1,) for place in range(lane.length))
        # In the second of two turns in a row, all that an operation follows is there.
        places, of_turn = range(-lane.length, lane.length), waits_in_turn(self.header, lane.operations)
        waits = {
            start + place: [places[start] + move for move in moves]
            for start in (0, lane.length)
            for place, moves in of_turn.items()
        }
        return islice(queued_by_resource(lane.operations * 2, places, waits), lane.length, None)

    def _data(self) -> Iterator[tuple[int, int, int]]:
        """Yields the waits for values, as (reader, maker, how many turns ago that is)."""
        for node, operation in enumerate(self.operations):
            for micro in operation.micros:
                turn, single = divmod(micro, self.header.period)
                for made in self.flow.needs(Compute(operation.kind, (Micro(single),), operation.stage)):
                    other, before = self.at(made)
                    yield node, other, -turn - before

    @cached_property
    def flow(self) -> Flow:
        """The operations that make and take the values of turn 0's micro-batches; `at` says what the numbers mean."""
        period = self.header.period
        numbered = [
            (node + (self._latest - micro // period) * len(self.operations), kind, Micro(micro % period), stage)
            for node, (kind, micros, stage) in enumerate((o.kind, o.micros, o.stage) for o in self.operations)
            for micro in micros
        ]
        numbered.sort(key=itemgetter(0))
        return Flow(self.header, ((number, Compute(kind, (micro,), stage)) for number, kind, micro, stage in numbered))

    def at(self, number: int) -> tuple[int, int]:
        """The node of an operation, given by its number in `flow`, and the turn of its lane in which it is."""
        turn, node = divmod(number, len(self.operations))
        return node, turn - self._latest

    @cached_property
    def _latest(self) -> int:
        """The number of the latest turn to which a micro-batch of an operation in turn 0 belongs."""
        return max((max(o.micros) // self.header.period for o in self.operations), default=0)

    def _steps(self) -> Iterator[tuple[int, int, int]]:
        """Yields the waits for steps, as (node, the node that it waits for, how many turns ago that is).

        The net has no steps: in each lane, the first operation that needs the step of an update waits for the last
        operations, in all lanes, that add to the gradients of this update.
        """
        for lane in self.lanes:
            for group in lane.needs:
                for version in range(1, self.header.per_turn + 1):
                    node, turn = lane.node(lane.first_need(group, version))
                    for other_lane in self.lanes:
                        last = other_lane.last(other_lane.sums.get(group, ()), version - 1)
                        if last is not None:
                            other, before = other_lane.node(last)
                            yield node, other, turn - before


def turn_net(stream: ScheduleStream) -> TurnNet:
    """Makes the net of a turn from a complete and placed stream."""
    lanes: list[TurnLane] = []
    for operations in stream.lanes:
        lanes.append(TurnLane(stream.header, operations, lanes[-1].first + lanes[-1].length if lanes else 0))
    return TurnNet(stream.header, lanes)
