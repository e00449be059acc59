"""Rule "acyclic": no operations wait for each other in a cycle.

An operation waits for the data that it reads, for the operation before it in its lane, and for sums and steps. The net
is the graph of these waits. The proof is its order, in which each operation comes after all that it waits for.
"""

from collections.abc import Iterator

from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow.net import Net
from chimera_ir.ir.levels import Plan


def acyclic(net: Net, plan: Plan | None) -> Iterator[Diagnostic]:
    """Yields a diagnostic with a shortest known cycle, if operations that wait in a cycle are missing from the order.

    The net's schedule has passed the rules "complete" and "placed". ``plan`` is the plan that it comes from; None if it
    was written as a schedule, without clocks.
    """
    if len(net.order) < len(net.operations):
        from chimera_ir.verify.cycle import cycle  # with networkx, which takes a while

        yield cycle(net, plan)
