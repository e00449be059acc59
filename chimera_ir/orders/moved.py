"""Makes the schedule of a text, before it is verified, and adds the moves to the host that the user asked for."""

from collections.abc import Callable
from dataclasses import replace

from chimera_ir.cost.durations import Durations
from chimera_ir.cost.offload import Moved, offload, require_movable
from chimera_ir.cost.simulate import simulate
from chimera_ir.diagnostics.model import Diagnostic, raise_errors
from chimera_ir.ir.levels import Header, Plan, Program, Schedule
from chimera_ir.ir.streams import Level, PlanStream, ProgramStream, ScheduleStream
from chimera_ir.orders.instance import Costing
from chimera_ir.orders.ordering import scheduled
from chimera_ir.verify.verify import schedule_in, verify_schedule


def schedule_of_text(level: Level | PlanStream, durations: Durations, header: Header) -> Schedule | ScheduleStream:
    """The schedule of a level that a text describes: the level itself if it is a schedule, or what is in a program.

    A plan is ordered: operations without clocks under the ``durations``. ``header`` is the level's own.
    """
    if isinstance(level, Plan | PlanStream):
        return scheduled(level, Costing.of(durations, header))
    return schedule_in(level)


def plan_of(level: Level | PlanStream, schedule: Schedule | ScheduleStream) -> Plan | None:
    """The plan of a level, None if it has none; of a stream, as many updates of it as ``schedule`` shows."""
    if not isinstance(level, PlanStream):
        return level if isinstance(level, Plan) else None
    if isinstance(schedule, ScheduleStream) and not level.is_clocked:
        return replace(level, turns=schedule.updates_shown // level.header.per_turn).shown
    return level.shown


def with_moves(
    level: Level | PlanStream,
    schedule: Schedule | ScheduleStream,
    durations: Callable[[Header], Durations],
    warn: Callable[[Diagnostic], None],
) -> Moved:
    """Adds moves to the host and back to the ``schedule`` of a level, by the rule of `cost.offload`.

    ``durations`` makes the costs for a header, ``warn`` gets the warnings about the schedule. Declared bounds are not
    checked here, as they hold for the schedule with its moves.

    Raises what `require_movable` raises, and `Rejected` with the errors of the schedule.
    """
    require_movable(schedule, is_program=isinstance(level, Program | ProgramStream))
    free = replace(schedule, header=replace(schedule.header, bounds=()))
    checked = verify_schedule(free, plan_of(level, schedule))
    for warning in raise_errors(checked.findings.diagnostics):
        warn(warning)
    costs = durations(replace(schedule.header, moves=True))
    return Moved(offload(schedule, costs, checked.net), simulate(checked.schedule, costs, checked.net))
