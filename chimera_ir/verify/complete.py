"""Rule "complete": each micro-batch has its forward and its backward on every stage exactly once."""

from collections.abc import Iterable, Iterator
from itertools import islice

from chimera_ir.diagnostics.catalogue.schedule import Duplicate, Missing
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.ids import Micro, Stage, Worker
from chimera_ir.ir.levels import Header, Pipe
from chimera_ir.ir.ops import NOWHERE, Backward, Compute, Forward
from chimera_ir.ir.text.printer import line
from chimera_ir.source import Span
from chimera_ir.verify.words import kind

_LISTED = 1_000_000
"""How many missing operations are looked for before the rest is only counted."""


def complete(header: Header, operations: Iterable[tuple[Worker, Compute]]) -> Iterator[Diagnostic]:
    """What is missing, once per pipe and direction, and what is there twice, once per pair of lines.

    Parameters
    ----------
    header
        Placed: its micro-batches are 0 .. N-1, and the operations are within its ranges.
    operations
        Every operation with the worker that runs it.
    """
    seen: dict[int, tuple[Worker, Compute]] = {}
    yield from _duplicates(header, operations, seen)
    if len(seen) < 2 * header.stages * header.micro_batches:
        yield from _missing(header, seen)


def _cell(header: Header, micro: Micro, stage: Stage, *, backward: bool) -> int:
    return 2 * (micro * header.stages + stage) + backward


def _duplicates(
    header: Header, operations: Iterable[tuple[Worker, Compute]], seen: dict[int, tuple[Worker, Compute]]
) -> Iterator[Diagnostic]:
    """Fills ``seen``, by the cell of each operation."""
    found: dict[tuple[Span, Span], list[Duplicate]] = {}
    for worker, operation in operations:
        for micro in operation.micros:
            cell = _cell(header, micro, operation.stage, backward=isinstance(operation, Backward))
            if cell not in seen:
                seen[cell] = (worker, operation)
                continue
            first_worker, first = seen[cell]
            again = Duplicate(operation.origin, line(operation), worker, first_worker, first.origin, 1)
            found.setdefault((first.origin, operation.origin), []).append(again)
    for group in found.values():
        first_one = group[0]
        where = (first_one.operation, first_one.worker, first_one.first_worker, first_one.first_span)
        yield Duplicate(first_one.span, *where, len(group))


def _missing(header: Header, seen: dict[int, tuple[Worker, Compute]]) -> Iterator[Diagnostic]:
    like: dict[tuple[str, bool], Compute] = {}
    for _, operation in seen.values():
        like.setdefault((header.pipe_of[operation.micros[0]].name, isinstance(operation, Backward)), operation)
    for pipe in header.pipes:
        for backward in (False, True):
            absent = list(islice(_absent(header, pipe, seen, backward=backward), _LISTED))
            if not absent:
                continue
            micro, stage = absent[0]
            _, other = seen.get(_cell(header, micro, stage, backward=not backward), (None, None))
            operation = (Backward if backward else Forward)((micro,), stage, version=other.version if other else None)
            model = like.get((pipe.name, backward)) or like.get((pipe.name, not backward))
            where = model.origin if model else NOWHERE
            place = (pipe.name, pipe.workers[stage], micro, stage)
            yield Missing(where, *place, kind(operation), line(operation), len(absent))


def _absent(
    header: Header, pipe: Pipe, seen: dict[int, tuple[Worker, Compute]], *, backward: bool
) -> Iterator[tuple[Micro, Stage]]:
    for micro in pipe.micros:
        for number in range(header.stages):
            if _cell(header, micro, Stage(number), backward=backward) not in seen:
                yield micro, Stage(number)
