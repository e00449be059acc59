"""Check "clocks": an operation has a higher clock than every operation whose data it reads.

If that holds, no operations wait for each other's data in a cycle. If it does not hold, the rule "acyclic" decides
whether they do, so this check only warns. Waits for updates are left to the rule "acyclic".
"""

from collections.abc import Iterator

from chimera_ir.diagnostics.catalogue.schedule import ClockNotIncreasing
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow.flow import ABSENT, Flow
from chimera_ir.ir.kinds import RECOMPUTATION
from chimera_ir.ir.levels import Plan
from chimera_ir.ir.planned import Planned
from chimera_ir.ir.recomputation import forwards_of_clocked
from chimera_ir.ir.text.printer import line
from chimera_ir.source import Span


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
        yield ClockNotIncreasing(
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
