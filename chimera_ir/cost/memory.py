"""What each worker must keep, in the units of the paper: M_a, one micro-batch's activations on one stage; M_theta."""

from collections.abc import Iterable
from fractions import Fraction
from itertools import accumulate

from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute, Forward


def activations(schedule: Schedule) -> tuple[Fraction, ...]:
    """Per worker, the peak number of live micro-batches times stages: live from the forward to the backward's end.

    Stages that recompute do not count; what the one at work computes again is gone when its backward ends.
    """
    return tuple(_peak(schedule.header, lane, recomputing=False) for lane in schedule.lanes)


def stashed_inputs(schedule: Schedule) -> tuple[Fraction, ...]:
    """The same for the stages that recompute: how many inputs a worker keeps."""
    return tuple(_peak(schedule.header, lane, recomputing=True) for lane in schedule.lanes)


def _peak(header: Header, lane: Iterable[Compute], *, recomputing: bool) -> Fraction:
    if header.recomputing:
        lane = (each for each in lane if header.recomputes(each.micros[0], each.stage) is recomputing)
    elif recomputing:
        return Fraction(0)
    changes = [len(each.micros) if isinstance(each, Forward) else -len(each.micros) for each in lane]
    return Fraction(max(accumulate(changes, initial=0)), header.parts)


def held(header: Header) -> tuple[int, ...]:
    """Per worker, how many stages it holds; one placed twice on a worker counts once."""
    return tuple(len(stages) for stages in header.stages_of)
