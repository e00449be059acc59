"""Makes the net of a schedule: which compute operation waits for which.

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
from chimera_ir.flow.host_moves import MoveWaits, waits_of
from chimera_ir.ir.ids import WeightGroup
from chimera_ir.ir.kinds import Resource
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute, Operation, singles


@dataclass(frozen=True, slots=True)
class Net:
    """The operations of a schedule, numbered lane by lane, and the operations that each waits for (``predecessors``).

    ``lanes[w]`` are the numbers of worker w's operations. ``order`` has each operation after all its predecessors. If a
    schedule has a cycle, the operations that wait for ever are not in ``order``.
    """

    schedule: Schedule
    operations: tuple[Operation, ...]
    lanes: tuple[range, ...]
    predecessors: tuple[tuple[int, ...], ...]
    order: Sequence[int]

    def ends(self, durations: Sequence[Time], earliest: Mapping[int, Time] | None = None) -> list[Time]:
        """Returns the time at which each operation ends, if it begins as soon as all its predecessors have ended.

        ``durations`` has the time that each takes. ``earliest`` has for some operations a time before which they do not
        begin.
        """
        return ends(self.order, self.predecessors, durations, earliest)


Reads = Sequence[tuple[int, ...]]
"""The numbers of the operations that make the values each operation reads; all are numbered lane by lane."""


def reads_of(schedule: Schedule) -> Reads:
    """Returns for each operation of a schedule the operations that make the values it reads.

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
    lanes = numbered(schedule)
    before = _waits(schedule, lanes)
    played = play(lanes, before)
    return Net(schedule, tuple(chain.from_iterable(schedule.lanes)), lanes, tuple(before), played.order)


def _waits(schedule: Schedule, lanes: Sequence[range]) -> list[tuple[int, ...]]:
    """Returns for each operation the numbers of all that it waits for: for values, for steps, and in its lane.

    ``lanes`` has the numbers of the operations of each lane.
    """
    reads = reads_of(schedule)
    lasts = chain.from_iterable(map(partial(queued, schedule.header), schedule.lanes, lanes))
    before = [read if read[-1:] == last else (*read, *last) for read, last in zip(reads, lasts, strict=True)]
    if ABSENT in chain.from_iterable(reads):
        raise KeyError("an operation is missing; only a verified schedule has a net")
    for later, added in _steps(schedule, lanes):
        before[later] = tuple(dict.fromkeys((*before[later], *added)))
    return before


def queued(header: Header, lane: Iterable[Operation], numbers: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """Returns for each operation of a lane the numbers of the operations in the lane that must end before it begins.

    ``numbers`` has the number of each operation of the lane. An operation follows the last one before it that occupies
    the worker's lane and, if it occupies another resource, also the last one before it that occupies that resource. It
    also follows the moves that the lane has waited for before it.
    """
    if header.lanes_only:
        return chain([()][: len(numbers)], zip(numbers[:-1], strict=True))
    operations = tuple(lane)
    waits = {place: [numbers[move] for move in moves] for place, moves in waits_of(header, operations).items()}
    return queued_by_resource(operations, numbers, waits)


def queued_by_resource(lane: Iterable[Operation], numbers: Sequence[int], waits: MoveWaits) -> Iterator[tuple[int, ...]]:
    """Yields for each operation of a lane the numbers of the operations in the lane that it follows, as `queued` does.

    ``waits`` maps a place of the lane to the numbers of the moves that the lane waits for before this place.
    """
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
    """Yields (number of an operation, numbers of the operations that it waits for), for operations that need a step.

    The net has no steps: what the step would wait for are the last operations, on all workers, that add to the
    gradients of its update. Per lane and resource, only the first operation that needs the step is yielded; later ones
    follow it.
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
    """Returns for each weight group the places in a lane of the first operations that need the steps of its updates.

    Entry u of the group's list is for the step of update u. The list ends with the last step that any operation needs.
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
    """Returns the newest version of its stage's weights that must exist before an operation begins.

    It is the version that the operation reads. An operation that adds to the gradients of update u needs version u too:
    the step of the update before must be over, since the gradients of both add up in the same memory.
    """
    read = operation.version or 0
    return max(read, min(operation.micros) // header.per_update) if operation.kind.sums else read


def numbered(schedule: Schedule) -> tuple[range, ...]:
    """Numbers all operations lane by lane; returns the numbers of each lane."""
    bounds = accumulate((len(lane) for lane in schedule.lanes), initial=0)
    return tuple(range(start, end) for start, end in pairwise(bounds))
