"""From clocks to lanes: the plan's operations, each on its worker, in the order of their clocks."""

from chimera_ir.ir.levels import Plan, Planned, Schedule
from chimera_ir.ir.ops import Compute


def order(plan: Plan) -> Schedule:
    """The schedule in which every worker runs its operations by ascending clock.

    A clock orders the operations of one worker; what the clocks of two workers say about each other plays no part. Two
    operations of one worker on one clock (an error by the rule "conflict-free") keep the order of the text.

    Parameters
    ----------
    plan
        Every operation with its worker, all workers within range.
    """
    lanes: list[list[Planned]] = [[] for _ in range(plan.header.workers)]
    for planned in plan.operations:
        lanes[planned.worker].append(planned)
    return Schedule(plan.header, tuple(_lane(operations) for operations in lanes))


def _lane(operations: list[Planned]) -> tuple[Compute, ...]:
    return tuple(planned.operation for planned in sorted(operations, key=lambda planned: planned.clock))
