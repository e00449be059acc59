"""Writes the diagnostic of a cycle of operations that wait for each other."""

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import TYPE_CHECKING, assert_never

from chimera_ir.diagnostics.catalogue import schedule as say
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow.engine import is_acyclic, shortest_cycle
from chimera_ir.flow.flow import ABSENT, Flow
from chimera_ir.flow.net import Net, Why
from chimera_ir.ir.kinds import KEPT, RECOMPUTATION, Value
from chimera_ir.ir.levels import Header, Plan, forwards_of_clocked
from chimera_ir.ir.ops import Clock, Operation, Pair, Planned, Worker
from chimera_ir.ir.text.printer import line
from chimera_ir.source import Span

if TYPE_CHECKING:
    from chimera_ir.flow.engine import IntGraph

# Check "clocks": an operation has a higher clock than every operation whose data it reads.
#
# If that holds, no operations wait for each other's data in a cycle. If it does not hold, the rule "acyclic" decides
# whether they do, so this check only warns. Waits for updates are left to the rule "acyclic".


def clocks(plan: Plan) -> Iterator[Diagnostic]:
    """Yields a warning for two lines of the source of which one reads data of the other, but not at a higher clock.

    Several such operations of the same two lines give one warning, with the first of them and their number. A missing
    operation gives no warning.
    """
    operations = plan.clocked
    if plan.header.only or RECOMPUTATION in {planned.operation.kind for planned in operations}:
        # An operation that the header does not allow is a mistake by the rule "placed".
        allowed = (
            planned
            for planned in forwards_of_clocked(plan)
            if all(part.kind in plan.header.kinds for part in planned.operation.parts)
        )
        operations = list(allowed)
    data_flow = Flow(plan.header, enumerate(planned.operation for planned in operations))
    falling: dict[tuple[Span, Span], list[tuple[Planned, Planned]]] = {}
    for after in operations:
        for number in data_flow.needs(after.operation):
            before = operations[number]
            if number != ABSENT and before.clock >= after.clock:
                falling.setdefault((before.operation.origin, after.operation.origin), []).append((before, after))
    for (origin, end), group in falling.items():
        before, after = group[0]
        yield say.ClockNotIncreasing(
            span=end,
            before=line(before.operation, plan.header),
            before_clock=before.clock,
            before_worker=before.worker,
            before_span=origin,
            after=line(after.operation, plan.header),
            after_clock=after.clock,
            after_worker=after.worker,
            count=len(group),
        )


def first_value(header: Header, before: Operation, after: Operation) -> Value:
    """The first value that an operation makes and another one reads."""
    return next(
        value
        for reader in after.parts
        for value in reader.kind.reads
        for maker in before.parts
        if value in maker.kind.makes and maker.stage in header.makers(value, reader.stage)
        if not {micro - value.slices_on for micro in reader.micros}.isdisjoint(maker.micros)
    )


class _Story:
    """Writes the diagnostic of a cycle of operations.

    Where the cycle follows a lane over several operations, the diagnostic shows only the first and the last of them.
    """

    def __init__(self, net: Net, graph: "IntGraph", plan: Plan | None) -> None:
        self._operations, self._header, self._edges = net.operations, net.schedule.header, graph.edges
        self._owners = [*chain.from_iterable([Worker(worker)] * len(lane) for worker, lane in enumerate(net.lanes))]
        self._clocks = (
            {line(planned.operation, self._header): planned.clock for planned in plan.clocked} if plan else {}
        )
        self._nodes = self._bends(shortest_cycle(graph))

    def _bends(self, nodes: tuple[int, ...]) -> tuple[int, ...]:
        """Drops the operations inside a stretch of one lane; the ends of the stretch stay."""
        ring = (nodes[-1], *nodes, nodes[0])
        around = zip(ring, nodes, ring[2:], strict=False)
        return tuple(
            node for before, node, after in around if not (self._follows(before, node) and self._follows(node, after))
        )

    def diagnostic(self) -> Diagnostic:
        """Returns the diagnostic of the cycle, at the line of the operation that is to blame.

        To blame is the first of these that exists: an operation whose clock is too low; an operation that its lane runs
        too late; an operation that reads a version of the weights which its own gradients help to make; a pair.
        """
        edges = list(pairwise((*self._nodes, self._nodes[0])))
        lanes = [(before, after) for before, after in edges if self._follows(before, after)]
        falling = [(before, after) for before, after in edges if lanes and self._falls(before, after)]
        readers = [after for before, after in edges if self._why(before, after) is Why.SUM]
        joined = [node for node in self._nodes if isinstance(self._operations[node], Pair)]
        # The likeliest mistake comes first; the diagnostic shows the cycle from there.
        suspects = [*(after for _, after in falling), *(before for before, _ in lanes), *readers, *joined]
        worst = suspects[0]
        at = self._nodes.index(worst)
        ring = (*self._nodes[at:], *self._nodes[:at])
        steps = tuple(self._step(before, after) for before, after in pairwise((*ring, ring[0])))
        operation = self._operations[worst]
        text, header = line(operation, self._header), self._header
        chained = () if header.feeds or len(header.named) < 2 else tuple(name for name, *_ in header.named)
        cycle = operation.origin, text, steps, chained
        if falling:
            before, after = (self._operations[node] for node in falling[0])
            message = say.CycleOfVersions if self._reads(*falling[0]) else say.CycleOfClocks
            return message(*cycle, line(after, header), self._clock(before), line(before, header))
        if lanes:
            first, second = (self._operations[node] for node in lanes[0])
            worker = self._owners[lanes[0][0]]
            return say.CycleOfLane(*cycle, worker, line(second, header), line(first, header))
        pair = next((self._operations[node] for node in joined), None)
        return (
            say.Cycle(*cycle) if pair is None else say.CycleOfPair(*cycle, *(line(part, header) for part in pair.parts))
        )

    def _step(self, node: int, following: int) -> say.CycleStep:
        operation = self._operations[node]
        clock = self._clock(operation)
        place = f"worker {self._owners[node]}" + (f", clock {clock}" if clock is not None else "")
        return say.CycleStep(line(operation, self._header), place, operation.origin, self._reason(node, following))

    def _reason(self, before: int, after: int) -> str:
        why = self._why(before, after)
        match why:
            case Why.ORDER:
                return f"worker {self._owners[before]} runs it first"
            case Why.SUM if self._reads(before, after):
                reason = "it reads weights that those gradients change"
            case Why.SUM:
                reason = "those gradients are summed before its own"
            case Why.DATA:
                reason = self._need(before, after)
            case _:
                assert_never(why)
        return f"{reason}, but the clock falls" if self._falls(before, after) else reason

    def _why(self, before: int, after: int) -> Why:
        """The reason on the edge; operations of one lane between which there is no edge follow others in between."""
        return Why(self._edges[before, after]["why"]) if (before, after) in self._edges else Why.ORDER

    def _need(self, before: int, after: int) -> str:
        maker, reader = self._operations[before], self._operations[after]
        value = first_value(self._header, maker, reader)
        return "an offload moves what its forward kept" if value is KEPT and reader.kind.moves else value.reason

    def _reads(self, before: int, after: int) -> bool:
        earlier, later = self._operations[before], self._operations[after]
        if self._why(before, after) is not Why.SUM:
            return False
        made = max(self._header.update_of(part.micros) for part in earlier.parts)
        return max(part.version or 0 for part in later.parts) > made

    def _follows(self, before: int, after: int) -> bool:
        return self._why(before, after) is Why.ORDER

    def _falls(self, before: int, after: int) -> bool:
        earlier, later = self._clock(self._operations[before]), self._clock(self._operations[after])
        return earlier is not None and later is not None and later <= earlier and not self._follows(before, after)

    def _clock(self, operation: Operation) -> Clock | None:
        return self._clocks.get(line(operation, self._header))


# Rule "acyclic": no operations wait for each other in a cycle.
#
# An operation waits for the data that it reads, for the operation before it in its lane, and for sums and steps. The
# net is the graph of these waits, and networkx says whether it has a cycle.


def acyclic(net: Net, plan: Plan | None) -> Iterator[Diagnostic]:
    """Yields a diagnostic with a shortest known cycle, if networkx says that the graph of the net has one.

    The net's schedule has passed the rules "complete" and "placed". ``plan`` is the plan that it comes from; None if it
    was written as a schedule, without clocks.
    """
    graph = net.graph()
    if not is_acyclic(graph):
        yield _Story(net, graph, plan).diagnostic()
