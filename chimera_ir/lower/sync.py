"""Where the gradients of a stage are summed over the workers that hold it.

A worker launches the sum of a stage right after its last backward of that stage, whatever the pipe: the earliest
place at which its own part is complete. A worker that holds a stage for pipes without micro-batches takes part as
well, with nothing to add, as early as its lane allows. All workers launch in one agreed order of the stages, by the
time at which the last of all backwards of a stage can be done; so overlapping groups of workers never wait for each
other crosswise. Where that order delays a launch, it is behind a sum whose last part is done no later than that of
its own.

The sums are waited for at the end of the lane, in the order of their launches, each before the step that uses it.
They are there even where a single worker holds a stage, for the number of copies W is only known when the program is
started.
"""

from typing import NamedTuple

from chimera_ir.ir.ids import Stage
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.ops import Backward, Compute, Forward


class Launch(NamedTuple):
    """The sum of a stage's gradients, launched after the operation at ``after``; -1 is the start of the lane."""

    after: int
    stage: Stage


def synchronise(schedule: Schedule) -> tuple[tuple[Launch, ...], ...]:
    """The launches of every lane, in their order, by the policy above; every lane has one for each stage it holds."""
    agreed = _agreed(schedule)
    return tuple(
        _launches(lane, sorted(held, key=agreed.__getitem__))
        for lane, held in zip(schedule.lanes, schedule.header.stages_of, strict=True)
    )


def _launches(lane: tuple[Compute, ...], held: list[Stage]) -> tuple[Launch, ...]:
    last = {op.stage: place for place, op in enumerate(lane) if isinstance(op, Backward)}
    launches: list[Launch] = []
    after = -1
    for stage in held:
        after = max(after, last.get(stage, -1))
        launches.append(Launch(after, stage))
    return tuple(launches)


def _agreed(schedule: Schedule) -> list[int]:
    """The rank of every stage in the order in which all workers launch the sums; of equals, the later stage first."""
    ready = _last_backward(schedule)
    ranks = [0] * len(ready)
    for rank, stage in enumerate(sorted(range(len(ready)), key=lambda stage: (ready[stage], -stage))):
        ranks[stage] = rank
    return ranks


def _last_backward(schedule: Schedule) -> list[int]:
    """For every stage the earliest time at which all its backwards can be done, every operation taking one unit."""
    stages = schedule.header.stages
    clock = _Times(stages, schedule.header.micro_batches)
    ready = [0] * stages
    free = [0] * len(schedule.lanes)
    place = [0] * len(schedule.lanes)
    awake = list(range(len(schedule.lanes)))
    while awake:
        worker = awake.pop()
        lane = schedule.lanes[worker]
        while place[worker] < len(lane):
            operation = lane[place[worker]]
            missing = clock.missing(operation)
            if missing is not None:
                clock.sleepers[missing] = worker
                break
            free[worker] = max(free[worker], clock.start(operation)) + 1
            awake.extend(clock.finish(operation, free[worker]))
            place[worker] += 1
            if isinstance(operation, Backward):
                ready[operation.stage] = max(ready[operation.stage], free[worker])
    return ready


class _Times:
    """When each forward and backward is done; a cell is ``2 * (micro * stages + stage)``, plus one for the backward."""

    def __init__(self, stages: int, micro_batches: int) -> None:
        self._stages = stages
        self._done = [0] * (2 * stages * micro_batches)
        self.sleepers: dict[int, int] = {}

    def _inputs(self, operation: Compute) -> list[int]:
        cells = [2 * (micro * self._stages + operation.stage) for micro in operation.micros]
        if isinstance(operation, Forward):
            return [cell - 2 for cell in cells] if operation.stage > 0 else []
        if operation.stage == self._stages - 1:
            return cells
        return [cell + 3 for cell in cells] + cells

    def missing(self, operation: Compute) -> int | None:
        """A cell that the operation needs and that is not done yet."""
        return next((cell for cell in self._inputs(operation) if not self._done[cell]), None)

    def start(self, operation: Compute) -> int:
        """The time at which all that the operation needs is done."""
        return max((self._done[cell] for cell in self._inputs(operation)), default=0)

    def finish(self, operation: Compute, time: int) -> list[int]:
        """Notes the time at which the operation is done; the workers that slept until then."""
        woken: list[int] = []
        for micro in operation.micros:
            cell = 2 * (micro * self._stages + operation.stage) + isinstance(operation, Backward)
            self._done[cell] = time
            if cell in self.sleepers:
                woken.append(self.sleepers.pop(cell))
        return woken
