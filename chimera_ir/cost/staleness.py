"""The age of the weights on which an asynchronous schedule computes gradients."""

from collections.abc import Iterator, Sequence

from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.ops import singles
from chimera_ir.plural import counted


def staleness(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most steps between the weights that a micro-batch reads and the weights that it updates.

    Update k turns version k into version k+1; without a flush, its micro-batches may have read an older version.
    """
    oldest = [0] * schedule.header.stages
    for lane in schedule.lanes:
        for operation in singles(lane):
            if operation.version is not None:
                update = schedule.header.update_of(operation.micros)
                oldest[operation.stage] = max(oldest[operation.stage], update - operation.version)
    return tuple(oldest)


def warning(stale: Sequence[int]) -> Iterator[str]:
    """A warning for the user, if any stage reads old weights."""
    most, least = max(stale), min(stale)
    if most > 0:
        old = f"{counted(most, 'update')} old"
        where = "" if most == least else f" on stage {stale.index(most)}, {least} on stage {stale.index(least)}"
        yield f"without a flush, gradients come from old weights: {old}{where}"
