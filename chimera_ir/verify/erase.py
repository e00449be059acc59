"""From a program back to its schedule."""

from typing import assert_never

from chimera_ir.ir.levels import Program, Schedule
from chimera_ir.ir.streams import ProgramStream, ScheduleStream


def schedule_of(program: Program) -> Schedule:
    """The compute operations of a program, in their order; ``schedule_of(lower(schedule)) == schedule``."""
    return Schedule(program.header, tuple(tuple(parts.computes.lines) for parts in program.parts))


def erased(level: Schedule | ScheduleStream | Program | ProgramStream) -> Schedule | ScheduleStream:
    """The schedule of a program or a stream of one; a schedule as it is."""
    match level:
        case Program():
            return schedule_of(level)
        case ProgramStream():
            return level.schedule
        case Schedule() | ScheduleStream():
            return level
        case _:
            assert_never(level)
