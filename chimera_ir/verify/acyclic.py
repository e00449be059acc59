"""Rule "acyclic": no operations wait for each other in a cycle, for data, in their lanes, or for sums and steps.

The proof is the order of the net, in which each operation comes after all that it waits for.
"""

from collections.abc import Iterator

from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow.net import Net
from chimera_ir.ir.levels import Plan


def acyclic(net: Net, plan: Plan | None) -> Iterator[Diagnostic]:
    """Yields the diagnostic of a shortest known cycle if some operations are missing from the order of the net.

    The schedule of the net is complete and placed. ``plan`` is the plan that it comes from, None if it was written as a
    schedule, without clocks.
    """
    if len(net.order) < len(net.operations):
        from chimera_ir.verify.cycle import cycle  # with networkx, which takes a while

        yield cycle(net, plan)
