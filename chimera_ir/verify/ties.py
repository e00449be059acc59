"""Tied stages of an asynchronous schedule read the same versions: a part of the rule "versions".

Stages that share parameters make their updates together, as the updates of all stages have the same micro-batches. They
can only do so with one version of the parameters for each micro-batch. A synchronous schedule has one version anyway.
"""

from collections.abc import Iterator

from chimera_ir.diagnostics.catalogue.schedule import TiesDiffer
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.ids import Micro, Stage
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.ops import Compute, singles
from chimera_ir.ir.text.printer import line


def ties(schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields for each pair of tied stages the first micro-batch of which they read different versions.

    Parameters
    ----------
    schedule
        Asynchronous; complete and placed.
    """
    header = schedule.header
    tied = {stage for tie in header.ties for stage in tie}
    forwards = {
        (micro, operation.stage): operation
        for lane in schedule.lanes
        for operation in singles(lane)
        if operation.kind.opens and operation.stage in tied
        for micro in operation.micros
    }
    for tie in header.ties:
        for stage in tie[1:]:
            pair = _differing(forwards, header.micro_batches, tie[0], stage)
            if pair is not None:
                first, other = pair
                yield TiesDiffer(other.origin, tie[0], stage, line(first), line(other), first.origin)


def _differing(
    forwards: dict[tuple[Micro, Stage], Compute], micro_batches: int, first: Stage, other: Stage
) -> tuple[Compute, Compute] | None:
    for micro in map(Micro, range(micro_batches)):
        pair = forwards[micro, first], forwards[micro, other]
        if pair[0].version != pair[1].version:
            return pair
    return None
