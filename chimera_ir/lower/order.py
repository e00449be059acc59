"""The pass from clocks to lanes: each worker runs its operations in the order of their clocks.

F m0 s0 @ 0 on w0            worker 0:
F m1 s0 @ 1 on w0              F m0 s0
F m0 s1 @ 1 on w1              F m1 s0
F m1 s1 @ 3 on w1              B m0 s0
B m0 s1 @ 2 on w1              B m1 s0
B m1 s1 @ 4 on w1            worker 1:
B m0 s0 @ 3 on w0              F m0 s1
B m1 s0 @ 5 on w0              B m0 s1
                               F m1 s1
                               B m1 s1
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import overload

from chimera_ir.ir.ids import Clock
from chimera_ir.ir.levels import Plan, Schedule
from chimera_ir.ir.ops import Compute
from chimera_ir.ir.planned import Planned, Unclocked
from chimera_ir.ir.recomputation import in_full
from chimera_ir.ir.streams import PlanStream, ScheduleStream, computes, stream_with
from chimera_ir.ir.turns import later


@overload
def order(plan: Plan) -> Schedule: ...


@overload
def order(plan: PlanStream) -> ScheduleStream: ...


def order(plan: Plan | PlanStream) -> Schedule | ScheduleStream:
    """The schedule in which every worker runs its operations by ascending clock; all workers are within range.

    Only the clocks of the same worker are compared. Two operations of a worker on one clock, an error by the rule
    "conflict-free", keep the order of the text; a move of memory, which may share the clock of another operation, comes
    before that operation. Operations without a clock come last: `orders.ordering` gives them a better place. A
    recomputation without a clock comes right before the operation that needs what it makes.

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
        lane.sort(key=_moves_first if plan.header.moves else attrgetter("clock"))
    operations = [[planned.operation for planned in lane] for lane in lanes]
    for planned_last in unclocked:
        operations[planned_last.worker].append(planned_last.operation)
    return Schedule(plan.header, in_full(plan.header, operations))


def _moves_first(planned: Planned) -> tuple[int, bool]:
    """Returns the sort key of an operation in its lane: by clock, and on one clock the moves of memory first."""
    return planned.clock, not planned.operation.kind.moves


def _turn(plan: PlanStream, lane: Sequence[Planned]) -> Iterator[Compute]:
    """Yields the operations of a worker's turn in order; ``lane`` has those of the plan's first turn, with clocks."""
    start = min((planned.clock for planned in lane), default=0)
    places = [(*divmod(planned.clock - start, plan.clocks), planned.operation) for planned in lane]
    places.sort(key=lambda place: (place[1], not place[2].kind.moves))
    return computes(later(plan.header, operation, -turns) for turns, _, operation in places)
