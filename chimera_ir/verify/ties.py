"""Tied stages of a stream read the same versions: a part of the rule "versions".

Stages that share parameters make their updates together, as the updates of all stages have the same micro-batches. They
can only do so with one version of the parameters for each micro-batch. With a flush there is one version anyway.
"""

from collections.abc import Iterator

from chimera_ir.diagnostics.catalogue.schedule import TiesDiffer
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.ids import Micro
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.ops import singles
from chimera_ir.ir.text.printer import line


def ties(schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields for each pair of tied stages the first micro-batch, in a stream, of which they read different versions."""
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
            pairs = (
                (forwards[micro, tie[0]], forwards[micro, stage]) for micro in map(Micro, range(header.micro_batches))
            )
            differing = next(((first, other) for first, other in pairs if first.version != other.version), None)
            if differing is not None:
                first, other = differing
                yield TiesDiffer(other.origin, tie[0], stage, line(first), line(other), first.origin)
