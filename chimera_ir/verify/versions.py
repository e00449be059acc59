"""Rule "versions": forward and backward of a micro-batch read the same weights. A synchronous program has one version:
no operation of a stage comes after its step."""

from collections.abc import Iterator

from chimera_ir.diagnostics.catalogue.program import AfterStep
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.ids import Stage, Worker
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import Backward, Forward, Step
from chimera_ir.ir.text.printer import line
from chimera_ir.source import Span


def versions(program: Program) -> Iterator[Diagnostic]:
    """The operations that read weights after the step that changes them."""
    for number, lane in enumerate(program.lanes):
        stepped: dict[Stage, Span] = {}
        for each in lane:
            if isinstance(each, Step):
                stepped.setdefault(each.stage, each.origin)
            elif stepped and isinstance(each, Forward | Backward) and each.stage in stepped:
                yield AfterStep(each.origin, Worker(number), line(each), each.stage, stepped[each.stage])
