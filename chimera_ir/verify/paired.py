"""Rule "paired", a part of "complete": the two sides of a pair have different micro-batches, and equally many."""

from collections.abc import Iterator

from chimera_ir.diagnostics.catalogue.groups import PairOfOne, PairUneven
from chimera_ir.diagnostics.catalogue.values import Instance
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.ops import Pair
from chimera_ir.ir.text.printer import line


def paired(schedule: Schedule) -> Iterator[Diagnostic]:
    """Yields pairs with one micro-batch on both sides, which wait for themselves, and pairs with more on one side."""
    for lane in schedule.lanes:
        for pair in lane:
            if isinstance(pair, Pair):
                yield from _mistakes(pair)


def _mistakes(pair: Pair) -> Iterator[Diagnostic]:
    forward, backward = pair.parts
    facts = pair.origin, (), Instance(), line(forward), line(backward)
    common = {*forward.micros} & {*backward.micros}
    if common:
        yield PairOfOne(*facts, min(common))
    elif forward.size != backward.size:
        yield PairUneven(*facts, forward.size, backward.size)
