"""Rule "conflict-free": at most one operation per worker and clock (section 3.1) on each resource of the worker."""

from collections.abc import Iterator

from chimera_ir.diagnostics.catalogue.schedule import Conflict
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.kinds import Resource
from chimera_ir.ir.levels import Plan, Planned
from chimera_ir.ir.text.printer import line
from chimera_ir.source import Span
from chimera_ir.verify.occupied import draw, occupied


def conflict_free(plan: Plan) -> Iterator[Diagnostic]:
    """Yields a diagnostic for every pair of source lines with conflicts, with the first conflict and their number."""
    first: dict[tuple[int, int, Resource], Planned] = {}
    conflicts: dict[tuple[Span, Span], list[tuple[Planned, Planned]]] = {}
    for planned in plan.operations:
        place = planned.worker, planned.clock, planned.operation.kind.occupies
        other = first.setdefault(place, planned)
        if other is not planned:
            conflicts.setdefault((other.operation.origin, planned.operation.origin), []).append((other, planned))
    places = occupied(plan.operations) if conflicts else {}
    for (before, after), group in conflicts.items():
        earlier, later = group[0]
        yield Conflict(
            span=after,
            worker=earlier.worker,
            clock=earlier.clock,
            first=line(earlier.operation),
            second=line(later.operation),
            first_span=before,
            count=len(group),
            around=draw(places, (other for other, _ in group)),
        )
