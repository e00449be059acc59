"""Where the gradients of a stage are summed over the workers that hold it.

When a worker launches the sum of a stage is the stage's strategy (section 3.2 of the paper): right after its last
backward of that stage, whatever the pipe (eager), or after all its compute (lazy). By default it is eager only where
the schedule leaves the worker a bubble between the two (eager_opt): without one, an eager launch would only disturb
the compute that follows. Times are those of the earliest run with the given durations, communication free.

A worker that holds a stage for pipes without micro-batches takes part as well, with nothing to add. All workers launch
in one agreed order of the stages, by the time at which the last member wants to launch; so overlapping groups of
workers never wait for each other crosswise. Where that order delays a launch, it is behind a sum that cannot begin
later than its own.

The sums are waited for at the end of the lane, in the order of their launches, each before the step that uses it.
They are there even where a single worker holds a stage, for the number of copies W is only known when the program is
started.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from chimera_ir.ir.ids import Stage, Worker
from chimera_ir.ir.levels import Header, Schedule, Strategy
from chimera_ir.ir.ops import NOWHERE, AllReduce, Backward, Compute, Forward, Instruction, Step, WaitAllReduce
from chimera_ir.source import Span

Duration = Callable[[Compute], int]
"""How long an operation takes, in any unit."""


class Insertions(NamedTuple):
    """What is put between the operations of a lane: before and after the one at a place, and at the lane's end.

    After place -1 is the start of the lane.
    """

    before: Mapping[int, Sequence[Instruction]]
    after: Mapping[int, Sequence[Instruction]]
    at_end: Sequence[Instruction] = ()


class Launch(NamedTuple):
    """The sum of a stage's gradients, launched after the operation at ``after``; -1 is the start of the lane."""

    after: int
    stage: Stage


class Region(NamedTuple):
    """A worker's part of a stage: its last backward's place in the lane and end, and the idle time between then and the
    end of the lane."""

    last: int
    ready: int
    idle: int


class _Lane(NamedTuple):
    """What launches depend on: the regions of the stages that a worker holds, and the end of its compute."""

    regions: dict[Stage, Region]
    length: int
    end: int


def synchronise(schedule: Schedule, duration: Duration) -> Iterator[Insertions]:
    """The sums and steps of every lane, by the policy above: one for each stage that its worker holds."""
    header, lanes = schedule.header, _lanes(schedule, duration)
    agreed = _agreed(header, lanes)
    for operations, lane in zip(schedule.lanes, lanes, strict=True):
        launches = _launches(header, lane, sorted(lane.regions, key=agreed.__getitem__))
        yield _insertions(launches, {operation.stage: operation.origin for operation in operations})


def _insertions(launches: Iterable[Launch], origin: Mapping[Stage, Span]) -> Insertions:
    after: dict[int, list[Instruction]] = defaultdict(list)
    at_end: list[Instruction] = []
    for place, stage in launches:
        where = origin.get(stage, NOWHERE)
        after[place].append(AllReduce(stage, where))
        at_end += [WaitAllReduce(stage, where), Step(stage, where)]
    return Insertions({}, after, at_end)


def _eager(header: Header, stage: Stage, region: Region) -> bool:
    strategy = header.strategy(stage)
    return strategy is Strategy.EAGER or (strategy is Strategy.EAGER_OPT and region.idle > 0)


def _launches(header: Header, lane: _Lane, held: list[Stage]) -> tuple[Launch, ...]:
    launches: list[Launch] = []
    after = -1
    for stage in held:
        region = lane.regions[stage]
        after = max(after, region.last if _eager(header, stage, region) else lane.length - 1)
        launches.append(Launch(after, stage))
    return tuple(launches)


def _agreed(header: Header, lanes: list[_Lane]) -> dict[Stage, int]:
    """The rank of every stage in the order in which all workers launch the sums; of equals, the later stage first."""
    wanted: dict[Stage, int] = {}
    for lane in lanes:
        for stage, region in lane.regions.items():
            time = region.ready if _eager(header, stage, region) else lane.end
            wanted[stage] = max(wanted.get(stage, 0), time)
    return {stage: rank for rank, stage in enumerate(sorted(wanted, key=lambda stage: (wanted[stage], -stage)))}


def _lanes(schedule: Schedule, duration: Duration) -> list[_Lane]:
    ends = earliest_ends(schedule, duration)
    found: list[_Lane] = []
    for worker, lane in enumerate(schedule.lanes):
        regions = {stage: Region(-1, 0, 0) for stage in schedule.header.stages_of[worker]}
        busy = 0
        for place, operation in enumerate(lane):
            busy += duration(operation)
            if isinstance(operation, Backward):
                end = ends[worker][place]
                regions[operation.stage] = Region(place, end, end - busy)
        end = ends[worker][-1] if lane else 0
        after = {stage: region._replace(idle=end - busy - region.idle) for stage, region in regions.items()}
        found.append(_Lane(after, len(lane), end))
    return found


def earliest_ends(schedule: Schedule, duration: Duration) -> list[list[int]]:
    """When each operation of each lane ends, every one starting as early as its data and its worker allow.

    An operation that waits in a cycle has no such time; it counts as over when its worker got stuck.
    """
    times = _Times(schedule.header.stages, schedule.header.micro_batches)
    ends: list[list[int]] = [[] for _ in schedule.lanes]
    awake = [Worker(worker) for worker in range(len(schedule.lanes))]
    while awake:
        worker = awake.pop()
        lane, done = schedule.lanes[worker], ends[worker]
        now = done[-1] if done else 0
        for operation in islice(lane, len(done), None):
            ready = times.ready(operation, worker)
            if ready is None:
                break
            now = max(now, ready) + duration(operation)
            done.append(now)
            awake += times.finish(operation, now)
    for lane, done in zip(schedule.lanes, ends, strict=True):
        done += [done[-1] if done else 0] * (len(lane) - len(done))
    return ends


class _Times:
    """When each forward and backward is done; a cell is ``2 * (micro * stages + stage)``, plus one for the backward."""

    def __init__(self, stages: int, micro_batches: int) -> None:
        self._stages = stages
        self._done = [0] * (2 * stages * micro_batches)
        self._sleepers: dict[int, list[Worker]] = {}

    def ready(self, operation: Compute, worker: Worker) -> int | None:
        """The time at which all that the operation needs is done; if it is not, its worker sleeps until the rest is."""
        done, time = self._done, 0
        needs = self._needs(operation)
        for micro in operation.micros:
            own = 2 * (micro * self._stages + operation.stage)
            for offset in needs:
                cell = own + offset
                if not done[cell]:
                    self._sleepers.setdefault(cell, []).append(worker)
                    return None
                time = max(time, done[cell])
        return time

    def _needs(self, operation: Compute) -> tuple[int, ...]:
        """Where, from its forward's cell, is what an operation needs: forwards go down the stages, backwards up."""
        if isinstance(operation, Forward):
            return (-2,) if operation.stage > 0 else ()
        return (0, 3) if operation.stage < self._stages - 1 else (0,)

    def finish(self, operation: Compute, time: int) -> list[Worker]:
        """Notes the time at which the operation is done; the workers that slept until then."""
        woken: list[Worker] = []
        for micro in operation.micros:
            cell = 2 * (micro * self._stages + operation.stage) + isinstance(operation, Backward)
            self._done[cell] = time
            woken += self._sleepers.pop(cell, ())
        return woken
