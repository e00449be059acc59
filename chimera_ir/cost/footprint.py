"""The memory of each worker in the units of the paper: M_a, a micro-batch's activations on a stage, and M_theta."""

from fractions import Fraction

from chimera_ir.flow import live
from chimera_ir.ir.levels import Header, Schedule


def activations(schedule: Schedule) -> tuple[Fraction, ...]:
    """Per worker, the peak of the activations of stages that do not recompute, in M_a."""
    return live.whole(schedule.header, live.activations(schedule))


def stashed_inputs(schedule: Schedule) -> tuple[Fraction, ...]:
    """Per worker, the peak number of inputs that stages keep for recomputation, in whole micro-batches."""
    return live.whole(schedule.header, live.inputs(schedule))


def between_halves(schedule: Schedule) -> tuple[Fraction, ...]:
    """Per worker, the peak of what waits for its weight gradient alone; part of `activations`, and counted like it."""
    return live.whole(schedule.header, live.between_halves(schedule))


def held(header: Header) -> tuple[int, ...]:
    """Per worker, the number of stages that it holds; a stage placed twice on a worker counts once."""
    return tuple(len(stages) for stages in header.stages_of)
