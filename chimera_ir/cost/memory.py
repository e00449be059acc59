"""What each worker must keep, in the units of the paper: M_a, one micro-batch's activations on one stage; M_theta."""

from collections.abc import Iterable
from itertools import accumulate

from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute, Forward


def activations(schedule: Schedule) -> tuple[int, ...]:
    """Per worker, the peak number of live micro-batches times stages: live from the forward to the backward's end."""
    return tuple(_peak(lane) for lane in schedule.lanes)


def _peak(lane: Iterable[Compute]) -> int:
    changes = (len(each.micros) if isinstance(each, Forward) else -len(each.micros) for each in lane)
    return max(accumulate(changes, initial=0))


def weights(header: Header) -> tuple[int, ...]:
    """Per worker, the copies of stages' weights; a stage placed twice on a worker is kept once."""
    return tuple(len(stages) for stages in header.stages_of)
