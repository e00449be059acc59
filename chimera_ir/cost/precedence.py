"""Which operation waits for which: for data from its neighbours, for the one before it in its worker's lane, and in an
asynchronous schedule for the weights that it reads."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise

from chimera_ir.ir.ids import Stage
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Backward, Compute, Forward

_ABSENT = -1


@dataclass(frozen=True, slots=True)
class Precedence:
    """Operations by number, counted lane by lane; ``order`` has each of them after all its predecessors."""

    operations: tuple[Compute, ...]
    predecessors: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]


def precede(schedule: Schedule) -> Precedence:
    """The precedence of a schedule that is complete and closes no cycle.

    F(m, s) waits for F(m, s-1); B(m, s) waits for F(m, s) and, below the last stage, for B(m, s+1); every operation
    waits for the one before it in its lane. In an asynchronous schedule one that reads version v of a stage waits for
    the step that makes it: for the last backwards of update v-1 on all workers that hold the stage; and so do the
    backwards of update v, as gradients add up in one place. Linear in the number of operations.

    Raises
    ------
    ValueError
        If the schedule closes a cycle: it was not verified.
    KeyError
        If it lacks an operation that another one needs: it was not verified.
    """
    operations = tuple(chain.from_iterable(schedule.lanes))
    forwards, backwards = _cells(schedule.header, operations)
    lanes = numbered(schedule)
    needs = _needs(operations, schedule.header.stages, forwards, backwards)
    before = list(chain.from_iterable(_in_lane(islice(needs, len(lane)), lane) for lane in lanes))
    for earlier, later in _steps(schedule, lanes):
        if earlier not in before[later]:
            before[later] += (earlier,)
    return Precedence(operations, tuple(before), _order(lanes, before))


def _cells(header: Header, operations: Iterable[Compute]) -> tuple[list[int], list[int]]:
    """The numbers of all forwards and of all backwards, at index ``micro * stages + stage``."""
    stages = header.stages
    forwards = [_ABSENT] * (stages * header.micro_batches)
    backwards = list(forwards)
    for number, operation in enumerate(operations):
        made = forwards if isinstance(operation, Forward) else backwards
        for micro in operation.micros:
            made[micro * stages + operation.stage] = number
    if _ABSENT in forwards or _ABSENT in backwards:
        raise KeyError("an operation is missing; only a verified schedule has a precedence")
    return forwards, backwards


def _needs(
    operations: Iterable[Compute], stages: int, forwards: Sequence[int], backwards: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """For every operation the numbers of those whose results it reads, each once."""
    last = stages - 1
    for operation in operations:
        stage, forward = operation.stage, isinstance(operation, Forward)
        if len(operation.micros) == 1:
            cell = operation.micros[0] * stages + stage
            if forward:
                yield (forwards[cell - 1],) if stage else ()
            else:
                yield (forwards[cell], backwards[cell + 1]) if stage < last else (forwards[cell],)
            continue
        cells = [micro * stages + stage for micro in operation.micros]
        if forward:
            found = [forwards[cell - 1] for cell in cells] if stage else []
        else:
            found = [forwards[cell] for cell in cells]
            found += [backwards[cell + 1] for cell in cells] if stage < last else []
        yield tuple(dict.fromkeys(found))


def _in_lane(needs: Iterable[tuple[int, ...]], lane: range) -> Iterator[tuple[int, ...]]:
    """The needs of a lane's operations, and of each the operation before it in the lane, once."""
    previous = lane.start - 1
    for number, own in zip(lane, needs, strict=True):
        yield own if number == lane.start or previous in own else (*own, previous)
        previous = number


def _steps(schedule: Schedule, lanes: Sequence[range]) -> Iterator[tuple[int, int]]:
    """The last backwards of every update, each with the first operation of each lane that waits for the step.

    What comes later in the lane then waits for it as well. A synchronous schedule steps after all its operations.
    """
    if not schedule.header.asynchronous:
        return
    size = schedule.header.per_update
    last: dict[tuple[Stage, int], dict[int, int]] = defaultdict(dict)
    for worker, (lane, numbers) in enumerate(zip(schedule.lanes, lanes, strict=True)):
        for number, operation in zip(numbers, lane, strict=True):
            if isinstance(operation, Backward):
                last[operation.stage, max(operation.micros) // size][worker] = number
    for lane, numbers in zip(schedule.lanes, lanes, strict=True):
        reached: dict[Stage, int] = defaultdict(int)
        for number, operation in zip(numbers, lane, strict=True):
            stage, version = operation.stage, _version(operation, size)
            for update in range(reached[stage], version):
                yield from ((before, number) for before in last[stage, update].values())
            reached[stage] = max(reached[stage], version)


def _version(operation: Compute, per_update: int) -> int:
    """The newest version of its stage that must be there before an operation."""
    read = operation.version or 0
    return read if isinstance(operation, Forward) else max(read, min(operation.micros) // per_update)


def numbered(schedule: Schedule) -> list[range]:
    """The numbers of each lane's operations."""
    ends = list(accumulate((len(lane) for lane in schedule.lanes), initial=0))
    return [range(start, end) for start, end in pairwise(ends)]


def _order(lanes: Sequence[range], before: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Every operation after all its predecessors: each lane runs until it must wait, and goes on when it may."""
    order: list[int] = []
    done = bytearray(len(before))
    waiting: dict[int, list[range]] = {}
    running = list(lanes)
    while running:
        lane = running.pop()
        for number in lane:
            for other in before[number]:
                if not done[other]:
                    waiting.setdefault(other, []).append(range(number, lane.stop))
                    break
            else:
                done[number] = True
                order.append(number)
                if number in waiting:
                    running += waiting.pop(number)
                continue
            break
    if waiting:
        raise ValueError("the schedule closes a cycle; only a verified schedule has a timeline")
    return tuple(order)
