"""What waits for what: the net of a schedule's compute operations, and networkx's DAG of it with sums and steps.

An operation waits for those that make what it reads, for the one before it in its lane, and in an asynchronous schedule
for the weights that it reads.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from chimera_ir.flow.flow import ABSENT, flow
from chimera_ir.flow.run import Time, ends, play
from chimera_ir.ir.ids import Stage
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute


@dataclass(frozen=True, slots=True)
class Net:
    """Operations by number, counted lane by lane; ``order`` has each of them after all its predecessors, but
    for those that wait for ever where a schedule closes a cycle.

    ``lanes[w]`` are the numbers of worker w's operations.
    """

    operations: tuple[Compute, ...]
    lanes: tuple[range, ...]
    predecessors: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]

    def ends(self, durations: Sequence[Time]) -> list[Time]:
        """When each operation ends if each starts with the end of its last predecessor, the first ones at 0."""
        return ends(self.order, self.predecessors, durations)


Reads = Sequence[tuple[int, ...]]
"""For every operation, counted lane by lane, the numbers of those that make what it reads."""


def reads_of(schedule: Schedule) -> Reads:
    """What each operation of a schedule reads that is complete and placed."""
    operations = tuple(chain.from_iterable(schedule.lanes))
    return list(map(flow(schedule.header, operations).needs, operations))


def net_of(schedule: Schedule, reads: Reads | None = None) -> Net:
    """The net of a schedule that is complete; its reads may be known. Linear in the number of operations.

    In an asynchronous schedule an operation that reads version v of a stage waits for the step that makes it: for the
    last operations that add to the gradients of update v-1 on all workers that hold the stage; and so do those that add
    to the gradients of update v, as they add up in one place.

    Raises
    ------
    KeyError
        If it lacks an operation that another one needs: it was not verified.
    """
    lanes = numbered(schedule)
    before = _waits(schedule, lanes, reads or reads_of(schedule))
    played = play(lanes, before)
    return Net(tuple(chain.from_iterable(schedule.lanes)), lanes, tuple(before), played.order)


def _waits(schedule: Schedule, lanes: Sequence[range], reads: Reads) -> list[tuple[int, ...]]:
    """For every operation those that it waits for, each once: whose values it reads, whose step, and in its lane."""
    before: list[tuple[int, ...]] = []
    for lane in lanes:
        for number in lane:
            read = reads[number]
            before.append(read if number == lane.start or number - 1 in read else (*read, number - 1))
    if any(ABSENT in makers for makers in reads):
        raise KeyError("an operation is missing; only a verified schedule has a net")
    for earlier, later in _steps(schedule, lanes):
        if earlier not in before[later]:
            before[later] += (earlier,)
    return before


def _steps(schedule: Schedule, lanes: Sequence[range]) -> Iterator[tuple[int, int]]:
    """The last operations that add to an update, each with the first operation of each lane that waits for the step.

    What comes later in the lane then waits for it as well. A synchronous schedule steps after all its operations.
    """
    if not schedule.header.asynchronous:
        return
    last: dict[tuple[Stage, int], dict[int, int]] = defaultdict(dict)
    for worker, (lane, numbers) in enumerate(zip(schedule.lanes, lanes, strict=True)):
        for number, operation in zip(numbers, lane, strict=True):
            if operation.kind.sums:
                last[operation.stage, update_of(schedule.header, operation)][worker] = number
    for lane, numbers in zip(schedule.lanes, lanes, strict=True):
        reached: dict[Stage, int] = defaultdict(int)
        for number, operation in zip(numbers, lane, strict=True):
            stage, version = operation.stage, newest(schedule.header, operation)
            for update in range(reached[stage], version):
                yield from ((before, number) for before in last[stage, update].values())
            reached[stage] = max(reached[stage], version)


def update_of(header: Header, operation: Compute) -> int:
    """The update, from 0, whose gradients an operation takes part in making."""
    return max(operation.micros) // header.per_update


def newest(header: Header, operation: Compute) -> int:
    """The newest version of its stage that must be there before an operation."""
    read = operation.version or 0
    return max(read, min(operation.micros) // header.per_update) if operation.kind.sums else read


def numbered(schedule: Schedule) -> tuple[range, ...]:
    """The numbers of each lane's operations."""
    bounds = accumulate((len(lane) for lane in schedule.lanes), initial=0)
    return tuple(range(start, end) for start, end in pairwise(bounds))
