"""From a program back to its schedule."""

from chimera_ir.ir.levels import Program, Schedule
from chimera_ir.ir.ops import Backward, Forward


def schedule_of(program: Program) -> Schedule:
    """The compute operations of a program, in their order; ``schedule_of(lower(schedule)) == schedule``."""
    lanes = (tuple(op for op in lane if isinstance(op, Forward | Backward)) for lane in program.lanes)
    return Schedule(program.header, tuple(lanes))
