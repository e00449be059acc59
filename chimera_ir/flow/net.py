"""The net of a schedule: which compute operation waits for which.

An operation waits for the operations that make the values it reads, for those before it in its lane that `queued`
gives, and in a stream for the steps that make the weights it reads.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise

from chimera_ir.flow.engine import Time, ends, play
from chimera_ir.flow.flow import ABSENT, Flow
from chimera_ir.flow.host_moves import Waits, waits_of
from chimera_ir.ir.ids import WeightGroup
from chimera_ir.ir.kinds import Resource
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute, Operation, singles


@dataclass(frozen=True, slots=True)
class Net:
    """The operations of a schedule by number, counted lane by lane; ``lanes[w]`` are the numbers of worker w's.

    ``order`` has each operation after all its predecessors. If a schedule has a cycle, the operations that wait for
    ever are not in ``order``.
    """

    schedule: Schedule
    operations: tuple[Operation, ...]
    lanes: tuple[range, ...]
    predecessors: tuple[tuple[int, ...], ...]
    order: Sequence[int]

    def ends(self, durations: Sequence[Time], earliest: Mapping[int, Time] | None = None) -> list[Time]:
        """The end of each operation if it starts once all its predecessors are over, and not before ``earliest``."""
        return ends(self.order, self.predecessors, durations, earliest)


Reads = Sequence[tuple[int, ...]]
"""The reads of every operation, counted lane by lane: the operations, by number, that make the values it reads."""


def reads_of(schedule: Schedule) -> Reads:
    """The reads of a schedule without errors by the rules "complete" and "placed"."""
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
    lanes = numbered(schedule)
    before = _waits(schedule, lanes)
    played = play(lanes, before)
    return Net(schedule, tuple(chain.from_iterable(schedule.lanes)), lanes, tuple(before), played.order)


def _waits(schedule: Schedule, lanes: Sequence[range]) -> list[tuple[int, ...]]:
    """The operations, by number, that each operation waits for: for values, for steps, and in its lane."""
    reads = reads_of(schedule)
    lasts = chain.from_iterable(map(partial(queued, schedule.header), schedule.lanes, lanes))
    before = [read if read[-1:] == last else (*read, *last) for read, last in zip(reads, lasts, strict=True)]
    if ABSENT in chain.from_iterable(reads):
        raise KeyError("an operation is missing; only a verified schedule has a net")
    for later, added in _steps(schedule, lanes):
        before[later] = tuple(dict.fromkeys((*before[later], *added)))
    return before


def queued(header: Header, lane: Iterable[Operation], numbers: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """The numbers of the operations that each operation of a lane follows; ``numbers`` are those of the lane.

    An operation follows the last one before it that occupies the worker's lane and, if it occupies another resource,
    also the last one before it that occupies that resource; and the moves that the lane has waited for before it.
    """
    if header.lanes_only:
        return chain([()][: len(numbers)], zip(numbers[:-1], strict=True))
    operations = tuple(lane)
    waits = {place: [numbers[move] for move in moves] for place, moves in waits_of(header, operations).items()}
    return queued_by_resource(operations, numbers, waits)


def queued_by_resource(lane: Iterable[Operation], numbers: Sequence[int], waits: Waits) -> Iterator[tuple[int, ...]]:
    """Yields the result of `queued`; ``waits`` has the moves, by number, that the lane waits for before each place."""
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
    """Yields the waits for steps between updates: an operation, and the operations that it waits for.

    The first operation of a lane on each resource that needs the step of an update waits for the last operations that
    add to the update. Later operations on the resource then wait for the step as well.
    """
    if not schedule.header.steps_inside:
        return
    # Each worker's last operation that adds to the gradients of a group in an update: the step waits for all of them.
    groups_with = schedule.header.groups_with
    last: dict[tuple[WeightGroup, int], dict[int, int]] = defaultdict(dict)
    for worker, (lane, numbers) in enumerate(zip(schedule.lanes, lanes, strict=True)):
        for number, part in _parts(numbers, lane):
            if part.kind.sums:
                update = schedule.header.update_of(part.micros)
                for group in groups_with[part.stage]:
                    last[group, update][worker] = number
    for lane, numbers in zip(schedule.lanes, lanes, strict=True):
        for resource in dict.fromkeys(operation.kind.occupies for operation in lane):
            queue = [(number, part) for number, part in _parts(numbers, lane) if part.kind.occupies is resource]
            for group, places in places_after(schedule.header, [part for _, part in queue]).items():
                for update, place in enumerate(places):
                    yield queue[place][0], last[group, update].values()


def places_after(header: Header, lane: Iterable[Operation]) -> dict[WeightGroup, list[int]]:
    """The place of the first operation in a lane of a stream that must come after each update, by group and update.

    Updates that no operation must come after are left out.
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


def _parts(numbers: range, lane: Sequence[Operation]) -> Iterator[tuple[int, Compute]]:
    """The operations of a lane of a stream, which has no pairs, each with its number."""
    return zip(numbers, singles(lane), strict=True)


def newest(header: Header, operation: Compute) -> int:
    """The newest version of its stage that must exist before an operation starts.

    It is the version that the operation reads. If the operation adds to gradients, the step of the update before must
    have been made as well.
    """
    read = operation.version or 0
    return max(read, min(operation.micros) // header.per_update) if operation.kind.sums else read


def numbered(schedule: Schedule) -> tuple[range, ...]:
    """The operations of each lane by number, counted lane by lane."""
    bounds = accumulate((len(lane) for lane in schedule.lanes), initial=0)
    return tuple(range(start, end) for start, end in pairwise(bounds))
