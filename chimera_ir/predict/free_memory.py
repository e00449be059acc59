"""Bounds on the activations of workers, from the bytes that they have free.

A search for orders counts activations, not bytes. Each worker may keep as many more micro-batches as its free bytes
hold.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil

from chimera_ir.flow.live import activations, whole
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.memory_bounds import Bound, Quantity
from chimera_ir.predict.setting import Setting


def bounded(schedule: Schedule, setting: Setting, free: Iterable[int]) -> Schedule:
    """Returns the schedule with a bound on each worker's activations: its own peak, and as many more as fit.

    ``free`` has the bytes that each worker has left at its peak. A bound that the schedule declares stays where it is
    smaller.
    """
    header = schedule.header
    all_of_them = [sum(len(pipe.micros) * pipe.workers.count(w) for pipe in header.pipes) for w in _workers(schedule)]
    limits = [
        max(1, min(most, ceil(peak) + max(0, room) // max(1, max(_sizes(schedule, setting, worker), default=1))))
        for worker, most, peak, room in zip(
            _workers(schedule), all_of_them, whole(header, activations(schedule)), free, strict=True
        )
    ]
    declared = header.limits(Quantity.ACTIVATIONS, max(limits, default=1))
    bound = Bound(Quantity.ACTIVATIONS, tuple(map(min, limits, declared)))
    others = tuple(other for other in header.bounds if other.quantity is not Quantity.ACTIVATIONS)
    return replace(schedule, header=replace(header, bounds=(*others, bound)))


def _workers(schedule: Schedule) -> Sequence[int]:
    return range(schedule.header.workers)


def _sizes(schedule: Schedule, setting: Setting, worker: int) -> list[int]:
    """The bytes of a micro-batch's activations on each stage of a worker."""
    header = schedule.header
    return [setting.as_cut(stage, header).activations for stage in header.stages_of[worker]]
