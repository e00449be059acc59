"""Rule "conflict-free": at most one operation per worker and clock (section 3.1) on each resource of the worker.

A conflict is shown with the clocks around it, and the operations there of the workers that have conflicts:

   clock  2        3        4        5        6
worker 0  .        .        F m2 s0  .        F m3 s0
worker 3  F m0 s3  B m0 s3  F m1 s3  B m1 s3  .
                            B m4 s0
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat, zip_longest

from chimera_ir.diagnostics.catalogue.schedule import Conflict
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.ids import Clock, Worker
from chimera_ir.ir.kinds import Resource
from chimera_ir.ir.levels import Header, Plan
from chimera_ir.ir.planned import Planned
from chimera_ir.ir.text.printer import line
from chimera_ir.source import Span

_Occupied = Mapping[tuple[Worker, Clock], Sequence[Planned]]
"""The operations on each clock of each worker."""

_REACH, _WORKERS, _ROWS = 3, 4, 4
"""The clocks drawn on each side of a conflict, the most workers drawn, and the most operations drawn on a clock."""

_WIDEST = 20
"""The most columns that the text of an operation takes."""


def conflict_free(plan: Plan) -> Iterator[Diagnostic]:
    """Yields a diagnostic for every pair of source lines with conflicts, with the first conflict and their number."""
    first: dict[tuple[int, int, Resource], Planned] = {}
    conflicts: dict[tuple[Span, Span], list[tuple[Planned, Planned]]] = {}
    for planned in plan.clocked:
        place = planned.worker, planned.clock, planned.operation.kind.occupies
        other = first.setdefault(place, planned)
        if other is not planned:
            conflicts.setdefault((other.operation.origin, planned.operation.origin), []).append((other, planned))
    places = _occupied(plan.clocked) if conflicts else {}
    for (before, after), group in conflicts.items():
        earlier, later = group[0]
        yield Conflict(
            span=after,
            worker=earlier.worker,
            clock=earlier.clock,
            first=line(earlier.operation, plan.header),
            second=line(later.operation, plan.header),
            first_span=before,
            count=len(group),
            around=_drawing(plan.header, places, (other for other, _ in group)),
        )


def _occupied(operations: Iterable[Planned]) -> _Occupied:
    """Maps each worker and clock to the operations that the worker has at that clock."""
    by_place: dict[tuple[Worker, Clock], list[Planned]] = {}
    for planned in operations:
        by_place.setdefault((planned.worker, planned.clock), []).append(planned)
    return by_place


def _drawing(header: Header, places: _Occupied, conflicts: Iterable[Planned]) -> tuple[str, ...]:
    """Draws the clocks around the first conflict, with a row for each worker that has a conflict at one of them.

    ``places`` has all operations of the plan; ``conflicts`` has one operation of each conflict.
    """
    listed = list(conflicts)
    clocks = range(listed[0].clock - _REACH, listed[0].clock + _REACH + 1)
    workers = dict.fromkeys(planned.worker for planned in listed if planned.clock in clocks)
    rows = [["clock", *map(str, clocks)]]
    for worker in sorted([*workers][:_WORKERS]):
        columns = [_texts(header, places.get((worker, Clock(clock)), ())) for clock in clocks]
        names = chain([f"worker {worker}"], repeat(""))
        rows += [[name, *texts] for name, texts in zip(names, zip_longest(*columns, fillvalue=""), strict=False)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return tuple("  ".join([row[0].rjust(widths[0]), *map(str.ljust, row[1:], widths[1:])]).rstrip() for row in rows)


def _texts(header: Header, operations: Sequence[Planned]) -> list[str]:
    """The texts of a worker's operations on one clock: the first few, with ``...`` for others; a dot for none."""
    texts = [_short(line(planned.operation, header)) for planned in operations[:_ROWS]]
    return texts + (["..."] if len(operations) > _ROWS else []) or ["."]


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
