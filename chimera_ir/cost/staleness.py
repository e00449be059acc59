"""The staleness of a schedule: how old the weights are with which its gradients are computed."""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from chimera_ir.ir.ids import Micro
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.ops import singles
from chimera_ir.plural import counted


class Staleness(NamedTuple):
    """The age of the weights with which an update's gradients are computed.

    ``updates`` has the largest staleness of each stage: how many updates older the weights that a micro-batch reads are
    than those that it changes. ``micro_batches`` is how many of an update read old weights on any stage.
    """

    updates: tuple[int, ...]
    micro_batches: int


def staleness(schedule: Schedule) -> Staleness:
    """The largest staleness on each stage, and the most micro-batches of one update that read old weights.

    Update k turns version k into version k+1; without a flush, its micro-batches may have read an older version.
    """
    oldest = [0] * schedule.header.stages
    late: dict[int, set[Micro]] = defaultdict(set)
    for lane in schedule.lanes:
        for operation in singles(lane):
            if operation.version is not None:
                update = schedule.header.update_of(operation.micros)
                oldest[operation.stage] = max(oldest[operation.stage], update - operation.version)
                if operation.version < update:
                    late[update].update(operation.micros)
    return Staleness(tuple(oldest), max(map(len, late.values()), default=0))


def warning(stale: Staleness, of: int) -> Iterator[str]:
    """Yields a warning for the user if any stage reads old weights; ``of`` are the micro-batches of an update."""
    most, least = max(stale.updates), min(stale.updates)
    if most > 0:
        old = f"{counted(most, 'update')} old"
        first, last = stale.updates.index(most), stale.updates.index(least)
        where = "" if most == least else f" on stage {first}, {least} on stage {last}"
        late = (
            "all micro-batches"
            if stale.micro_batches == of
            else f"{stale.micro_batches} of {counted(of, 'micro-batch')}"
        )
        yield f"without a flush, gradients of {late} come from old weights: {old}{where}"
