"""Rule "complete": each micro-batch meets each stage as the table of kinds says, exactly once.

One operation, a forward, opens the stage for the micro-batch. One operation frees each value that is kept there; the
values that the forward keeps are freed by the backward or, if it is split, by the input gradient, and what that keeps
by the weight gradient.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from chimera_ir.diagnostics.catalogue.schedule import DoneTwice, Duplicate, Missing
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.ids import Micro, Stage, Worker
from chimera_ir.ir.kinds import Kind, Value
from chimera_ir.ir.levels import Header, Pipe
from chimera_ir.ir.ops import NOWHERE, Compute
from chimera_ir.ir.text.printer import line
from chimera_ir.source import Span

_LISTED = 100_000
"""The most missing operations that are counted for a pipe and part."""

_Part = Value | None
"""The part of an operation on a stage: it frees a value or, for None, opens the stage."""

_Seen = dict[_Part, dict[int, tuple[Worker, Compute]]]
"""By part, the worker and the operation of each micro-batch on each stage, at ``micro * stages + stage``.

These are as many as there are operations, however large a header says that the schedule is.
"""


def complete(header: Header, operations: Iterable[tuple[Worker, Compute]]) -> Iterator[Diagnostic]:
    """Missing operations, once per pipe and part, and duplicates, once per pair of lines.

    Parameters
    ----------
    header
        Placed: its micro-batches are 0 .. N-1, and the operations are within its ranges.
    operations
        Every operation with the worker that runs it.
    """
    seen: _Seen = {kind.frees: {} for kind in header.kinds}
    kinds = {_usual(header, None, [])}
    yield from _duplicates(header, operations, seen, kinds)
    yield from _missing(header, seen, kinds)


def _duplicates(
    header: Header, operations: Iterable[tuple[Worker, Compute]], seen: _Seen, kinds: set[Kind]
) -> Iterator[Diagnostic]:
    """The duplicates; fills ``seen``, and adds to ``kinds`` those of the operations."""
    stages = header.stages
    twice: dict[tuple[Span, Span], list[Duplicate | DoneTwice]] = {}
    for placed in operations:
        _, operation = placed
        column = seen[operation.kind.frees]
        kinds.add(operation.kind)
        for micro in operation.micros:
            cell = micro * stages + operation.stage
            known = column.get(cell)
            if known is None:
                column[cell] = placed
                continue
            twice.setdefault((known[1].origin, operation.origin), []).append(_again(header, placed, known))
    for group in twice.values():
        first_one = group[0]
        yield replace(first_one, count=len(group))


def _again(header: Header, second: tuple[Worker, Compute], first: tuple[Worker, Compute]) -> Duplicate | DoneTwice:
    (worker, operation), (first_worker, known) = second, first
    if operation.kind is known.kind:
        where = line(operation), worker, first_worker, known.origin, _directions(header)
        return Duplicate(operation.origin, *where, 1)
    return DoneTwice(operation.origin, line(operation), line(known), worker, first_worker, known.origin, 1)


def _missing(header: Header, seen: _Seen, kinds: Iterable[Kind]) -> Iterator[Diagnostic]:
    needed = {None, *(value for kind in kinds for value in kind.keeps)}
    size = header.stages * header.micro_batches
    lacking = [part for part, column in seen.items() if part in needed and len(column) < size]
    if not lacking:
        return
    examples: dict[tuple[str, _Part], Compute] = {}
    for part, column in seen.items():
        for _, (_, operation) in sorted(column.items()):
            examples.setdefault((header.pipe_of[operation.micros[0]].name, part), operation)
    for pipe in header.pipes:
        for part in lacking:
            absent = list(islice(_absent(header, pipe, seen, part), _LISTED))
            if not absent:
                continue
            micro, stage = absent[0]
            there = _there(header, seen, micro, stage)
            version = there[0].version if there else None
            absentee = Compute(_usual(header, part, there), (micro,), stage, version=version)
            example = examples.get((pipe.name, part))
            candidates = (
                _neighbour(header, pipe, seen[part], absentee),
                example if example is not None and example.kind is absentee.kind else None,
                *(known for known in reversed(there) if _linked(known.kind, absentee.kind)),
                *(examples.get((pipe.name, candidate)) for candidate in seen),
            )
            where = next((known.origin for known in candidates if known is not None), NOWHERE)
            place = (pipe.name, pipe.workers[stage], micro, stage)
            yield Missing(where, *place, absentee.kind.noun, line(absentee), _directions(header), len(absent))


def _absent(header: Header, pipe: Pipe, seen: _Seen, part: _Part) -> Iterator[tuple[Micro, Stage]]:
    """The micro-batches and stages where a pipe lacks an operation."""
    column = seen[part]
    for micro in pipe.micros:
        for number in range(header.stages):
            stage = Stage(number)
            if micro * header.stages + stage not in column and _wanted(header, seen, part, micro, stage):
                yield micro, stage


def _neighbour(
    header: Header, pipe: Pipe, column: dict[int, tuple[Worker, Compute]], absentee: Compute
) -> Compute | None:
    """The operation like the absent one of the next micro-batch on its stage, one before it rather than one behind."""
    (micro,), stage = absentee.micros, absentee.stage
    like = {
        other: column[cell][1]
        for other in pipe.micros
        if (cell := other * header.stages + stage) in column and column[cell][1].kind is absentee.kind
    }
    return like[min(like, key=lambda other: (other > micro, abs(other - micro)))] if like else None


def _linked(kind: Kind, other: Kind) -> bool:
    """Whether one of two kinds frees what the other one keeps."""
    return kind.frees in other.keeps or other.frees in kind.keeps


def _wanted(header: Header, seen: _Seen, part: _Part, micro: Micro, stage: Stage) -> bool:
    """Whether a micro-batch needs an operation with a part on a stage: to open the stage, or to free a kept value."""
    if part is None:
        return True
    kinds = [operation.kind for operation in _there(header, seen, micro, stage)]
    if not any(kind.opens for kind in kinds):
        kinds.append(_usual(header, None, []))
    return any(part in kind.keeps for kind in kinds)


def _there(header: Header, seen: _Seen, micro: Micro, stage: Stage) -> list[Compute]:
    """The operations of a micro-batch on a stage."""
    return [known[1] for column in seen.values() if (known := column.get(micro * header.stages + stage)) is not None]


def _usual(header: Header, part: _Part, there: Iterable[Compute]) -> Kind:
    """The usual kind of operation with a part: the first such row of the table that keeps what others there free."""
    freed = {operation.kind.frees for operation in there}
    rows = [kind for kind in header.kinds if kind.frees is part]
    return next((kind for kind in rows if not kind.opens and not freed.isdisjoint(kind.keeps)), rows[0])


def _directions(header: Header) -> str:
    """In how many directions a micro-batch goes."""
    return " in each direction" if header.answers else ""
