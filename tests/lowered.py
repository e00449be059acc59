"""Programs of schedules with and without a flush alike, for what is played or replayed update by update."""

from typing import Any

from chimera_ir.codegen.facts import scripts
from chimera_ir.ir.levels import Program, Schedule
from chimera_ir.ir.streams import ProgramStream, stream_of
from chimera_ir.lower.lower import forwards, lower
from chimera_ir.verify.verify import Verified, verify_lowered, verify_schedule


def level(schedule: Schedule, **how: Any) -> Program | ProgramStream:
    """The program of a schedule; without a flush, of the stream of which it shows the first updates."""
    return lower(stream_of(schedule), **how) if schedule.header.asynchronous else lower(schedule, **how)


def lowered(schedule: Schedule, **how: Any) -> Program:
    """The program of the updates that a schedule shows."""
    program = level(schedule, **how)
    return program if isinstance(program, Program) else program.view(schedule.header.updates)


def evaluated(verified: Verified, **how: Any) -> Verified:
    """The forwards of a verified program alone."""
    level = verified.level.schedule if isinstance(verified.level, ProgramStream) else verified.schedule
    checked = verify_schedule(forwards(level), None)
    return verify_lowered(lower(checked.level, net=checked.net, **how), checked)


def scripts_of(verified: Verified) -> dict[str, str]:
    """What runs a verified program, and an evaluation."""
    return scripts(verified, evaluated(verified))
