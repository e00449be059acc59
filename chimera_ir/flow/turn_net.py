"""Makes the net of a turn: which operation of a stream waits for which, as a periodic system (`flow.cycles`).

    worker 0:             worker 1:             0  F m s0     waits for 1 a turn ago
      F m s0 v-1            F m s1 v            1  B m-1 s0   waits for 0, and for 3 a turn ago
      B m-1 s0 v-2          B m s1 v            2  F m s1     waits for 0, and for 3 a turn ago
                                                3  B m s1     waits for 2

Nodes are the operations of one turn of every worker, lane by lane; each stands for the same operation of all turns.
Places of a lane are counted from the start of turn 0 of the worker, on and on through later turns; places of earlier
turns are negative. If a turn has n operations, place p + n has the operation of place p, on micro-batches and with a
version of the turn after.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import itemgetter

from chimera_ir.flow.cycles import Waits
from chimera_ir.flow.flow import Flow
from chimera_ir.flow.host_moves import waits_in_turn
from chimera_ir.flow.net import newest, queued_by_resource
from chimera_ir.ir.ids import Micro, WeightGroup
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute
from chimera_ir.ir.streams import ScheduleStream

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
        """Returns the node of the operation at ``place`` of the lane, and the number of the turn in which it is."""
        turn, inside = divmod(place, self.length)
        return self.first + inside, turn

    def place(self, node: int, turn: int) -> int:
        """Returns the place in the lane of the operation that is ``node`` in turn number ``turn``."""
        return node - self.first + turn * self.length

    def first_need(self, group: WeightGroup, version: int, early: Iterable[tuple[int, int]] = ()) -> int:
        """Returns the place of the first operation, in any turn, that needs ``version`` of a group or a later version.

        ``early`` adds needs to those in ``needs``: further pairs (place in turn 0, version that is needed there).
        """
        return min(
            place - self.length * ((need - version) // self.per_turn) for place, need in (*self.needs[group], *early)
        )

    def last(self, marks: Iterable[tuple[int, int]], number: int) -> int | None:
        """Returns the place of the last operation, in any turn, that is marked with ``number``; None if there is none.

        ``marks`` are the marks of turn 0: pairs (place, version or update). From turn to turn, both grow.
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
        """Returns for each node the nodes that it waits for: for values, for steps, and in its lane.

        If a node waits for the operations of another node from several turns, only the latest of these turns is there.
        """
        nearest: list[dict[int, int]] = [{} for _ in self.operations]
        for node, other, ago in (*self._data(), *self._queues(), *self._steps()):
            nearest[node][other] = min(ago, nearest[node].get(other, ago))
        return [tuple(waits.items()) for waits in nearest]

    def _queues(self) -> Iterator[tuple[int, int, int]]:
        """Yields the waits within a lane: for earlier operations, and for moves that the lane has waited for.

        A wait is (node, the node that it waits for, how many turns ago that is).
        """
        for lane in self.lanes:
            for place, before in enumerate(self._queued(lane)):
                for other, turn in map(lane.node, before):
                    yield lane.first + place, other, -turn

    def _queued(self, lane: TurnLane) -> Iterable[Iterable[int]]:
        """Returns for each operation of a turn the places in its lane that it follows, as in `flow.net.queued`."""
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
        """Yields the waits for operations that make values, each as (reader, maker, how many turns ago that is)."""
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
        """Returns the node of an operation, given by its number in `flow`, and the turn of its lane in which it is."""
        turn, node = divmod(number, len(self.operations))
        return node, turn - self._latest

    @cached_property
    def _latest(self) -> int:
        """The number of the latest turn to which a micro-batch of an operation in turn 0 belongs."""
        return max((max(o.micros) // self.header.period for o in self.operations), default=0)

    def _steps(self) -> Iterator[tuple[int, int, int]]:
        """Yields the waits for steps, each as (node, the node that it waits for, how many turns ago that is).

        The net has no steps. In each lane, the first operation that needs the step of an update waits in its place: for
        the last operations, in all lanes, that add to the gradients of this update.
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
