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

from operator import attrgetter

from chimera_ir.ir.levels import Plan, Planned, Schedule


def order(plan: Plan) -> Schedule:
    """The schedule in which every worker runs its operations by ascending clock.

    Only the clocks of the same worker are compared. Two operations of a worker on one clock, an error by the rule
    "conflict-free", keep the order of the text.

    Parameters
    ----------
    plan
        Every operation with its worker, all workers within range.
    """
    lanes: list[list[Planned]] = [[] for _ in range(plan.header.workers)]
    for planned in plan.operations:
        lanes[planned.worker].append(planned)
    for lane in lanes:
        lane.sort(key=attrgetter("clock"))
    return Schedule(plan.header, tuple(tuple(planned.operation for planned in lane) for lane in lanes))
