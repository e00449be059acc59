"""Makes the schedule for evaluation: the forwards alone, on the same pipes and workers, in an order made for forwards.

worker 0:                    worker 0:
  F m0 s0                      F m0 s0
  F m1 s1                      F m1 s1
  B m1 s1                      F m2 s0
  B m0 s0                      F m3 s1
  F m2 s0
  F m3 s1
  B m3 s1
  B m2 s0

The order of a schedule that trains makes room for backwards, which are missing here: with it, two directions on 8
workers with 16 micro-batches would take the time of 28 or 128 forwards, where 22 are enough. So the order is made anew.
A worker that is free runs one of the operations whose inputs are there: of the latest stage, and of these the first
micro-batch. A micro-batch that has come far leaves before another one enters, so few micro-batches are between two
stages at a time, and few receive buffers are needed.

A schedule without a flush has forwards without end. The evaluation takes the fewest turns that have a micro-batch for
every worker. It runs after a drain, so there is one version of the weights, the newest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush

from chimera_ir.ir.ids import Micro, Stage
from chimera_ir.ir.kinds import KINDS
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute, singles
from chimera_ir.ir.streams import ScheduleStream

_Urgency = tuple[int, tuple[Micro, ...]]


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
    return Schedule(_header(schedule.header), tuple(_ordered(schedule.header, lanes)))


def _header(trained: Header) -> Header:
    """The header without backwards, recomputation, moves, strategies and updates."""
    return replace(
        trained,
        pipes=tuple(replace(pipe, recompute=(), recomputed=()) for pipe in trained.pipes),
        strategies=(),
        updates=1,
        period=0,
        only=tuple(kind for kind in KINDS.values() if kind.opens),
        moves=False,
    )


def _ordered(header: Header, lanes: Sequence[Sequence[Compute]]) -> Iterator[tuple[Compute, ...]]:
    """Yields each worker's operations in the order of the policy above, simulated with time 1 for each micro-batch."""
    located: dict[tuple[tuple[Micro, ...], Stage], tuple[int, Compute]] = {}
    for worker, lane in enumerate(lanes):
        located |= {(operation.micros, operation.stage): (worker, operation) for operation in lane}
    ready: list[list[tuple[_Urgency, Compute]]] = [[] for _ in lanes]
    missing = {key: len(header.feeding[key[1]]) for key in located}
    for worker, operation in located.values():
        if not header.feeding[operation.stage]:
            heappush(ready[worker], (_urgency(operation), operation))
    # ``running`` is a heap of the operations that run, by their end; only ``awake`` workers may have something to
    # begin.
    ordered: list[list[Compute]] = [[] for _ in lanes]
    running: list[tuple[int, int, Compute]] = []
    now, busy, awake = 0, [False] * len(lanes), {*range(len(lanes))}
    while awake:
        for worker in awake:
            if ready[worker] and not busy[worker]:
                _, operation = heappop(ready[worker])
                ordered[worker].append(operation)
                busy[worker] = True
                heappush(running, (now + len(operation.micros), worker, operation))
        # Time goes on to the next end. What ends then frees its worker, and is an input of the stages that it feeds.
        awake = set()
        now = running[0][0] if running else now
        while running and running[0][0] == now:
            _, worker, operation = heappop(running)
            busy[worker] = False
            awake.add(worker)
            for key in ((operation.micros, stage) for stage in header.fed[operation.stage]):
                missing[key] -= 1
                if not missing[key]:
                    worker, following = located[key]
                    heappush(ready[worker], (_urgency(following), following))
                    awake.add(worker)
    return map(tuple, ordered)


def _urgency(operation: Compute) -> _Urgency:
    """Returns the sort key by which a worker chooses its next operation: latest stage, then first micro-batches."""
    return -operation.stage, operation.micros
