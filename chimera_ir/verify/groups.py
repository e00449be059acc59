"""Rule "groups", a part of "complete": the stages of a pipe take its micro-batches in the same groups.

An operation over several micro-batches hands all of them on at once, so the next stage's operation is over the same
micro-batches. Forwards and backwards may be grouped differently. All gradients of a backward count for one update.
"""

from collections.abc import Iterable, Iterator

from chimera_ir.diagnostics.catalogue.schedule import GroupsDiffer, PipesMixed, UpdatesMixed
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow.flow import Flow
from chimera_ir.ir.ids import Worker
from chimera_ir.ir.kinds import Value
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute
from chimera_ir.ir.text.printer import line
from chimera_ir.source import Span


def groups(header: Header, operations: Iterable[tuple[Worker, Compute]]) -> Iterator[Diagnostic]:
    """Yields diagnostics of operations that mix pipes, and of backwards that mix updates.

    If there are none, yields diagnostics of operations that do not have the same micro-batches as an operation whose
    values they read, one for each pair of lines. The operations are complete and placed.
    """
    listed = [operation for _, operation in operations]
    if all(len(operation.micros) == 1 for operation in listed):
        return
    mixed = list(_mixed(header, listed))
    yield from mixed or _differing(header, listed)


def _mixed(header: Header, operations: Iterable[Compute]) -> Iterator[Diagnostic]:
    reported: set[Span] = set()
    for operation in operations:
        pipes = list(dict.fromkeys(header.pipe_of[micro].name for micro in operation.micros))
        if len(pipes) > 1 and operation.origin not in reported:
            reported.add(operation.origin)
            yield PipesMixed(operation.origin, line(operation, header), *pipes[:2])
        updates = list(dict.fromkeys(micro // header.per_update for micro in operation.micros))
        if len(updates) > 1 and operation.kind.sums and operation.origin not in reported:
            reported.add(operation.origin)
            yield UpdatesMixed(operation.origin, line(operation, header), *updates[:2])


def _differing(header: Header, operations: list[Compute]) -> Iterator[Diagnostic]:
    data_flow = Flow(header, enumerate(operations))
    differing: dict[tuple[Span, Span], list[tuple[Compute, Compute, Value]]] = {}
    for operation in operations:
        received = (value for value in operation.kind.reads if value.crosses)
        for value, stage in ((v, maker) for v in received for maker in header.makers(v, operation.stage)):
            before = operations[data_flow.makers[value][operation.micros[0] * header.stages + stage]]
            if before.micros != operation.micros:
                differing.setdefault((before.origin, operation.origin), []).append((before, operation, value))
    for (origin, end), pairs in differing.items():
        before, operation, value = pairs[0]
        yield GroupsDiffer(end, line(before, header), origin, line(operation, header), value.noun, len(pairs))
