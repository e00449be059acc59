"""From a program back to its schedule."""

from chimera_ir.ir.levels import Program, Schedule


def schedule_of(program: Program) -> Schedule:
    """The compute operations of a program, in their order; ``schedule_of(lower(schedule)) == schedule``."""
    return Schedule(program.header, tuple(tuple(parts.computes.lines) for parts in program.parts))
