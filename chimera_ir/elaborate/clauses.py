"""Checks that a scheme has the lines it must have, and others at most once, or only together with certain lines.

`suggest_workers` gives better help where a memory bound uses a name for its worker that it does not define.
"""

from collections.abc import Iterable, Iterator

from chimera_ir.diagnostics.catalogue import endless, groups, slices
from chimera_ir.diagnostics.catalogue import names as say
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.elaborate.builtins import UNITS
from chimera_ir.ir.kinds import PAIR
from chimera_ir.source import Span
from chimera_ir.syntax import ast

_READS = "reads version"

_EXAMPLES = {
    "stages": "stages s in 0..D on s",
    "micros": "micros m in 0..N",
    "operation": "F(m, s) @ 2*m + s",
    _READS: "reads version max(0, m - (D-1 - s))",
}


def check_clauses(scheme: ast.Scheme) -> Iterator[Diagnostic]:
    """Yields diagnostics of lines that are missing, doubled, impossible next to others, or not supported."""
    pipes = [item for item in scheme.items if isinstance(item, ast.PipeBlock)]
    updates = [item for item in scheme.items if isinstance(item, ast.Update)]
    if not pipes:
        yield say.NoPipes(scheme.name.span, scheme.name.text)
    yield from _once(scheme.items, ast.Workers, "the scheme", "workers")
    yield from _once(updates, ast.Update, "the scheme", "update")
    for quantity in ast.MemoryQuantity:
        bounds = [item for item in scheme.items if isinstance(item, ast.Memory) and item.quantity is quantity]
        yield from _once(bounds, ast.Memory, "the scheme", f"memory {quantity.value}")
    names: dict[str, Span] = {}
    for pipe in pipes:
        first = names.setdefault(pipe.name.text, pipe.name.span)
        if first != pipe.name.span:
            yield say.DefinedTwice(pipe.name.span, pipe.name.text, first)
        yield from _lines(pipe)
        yield from _streaming(pipe, updates[0]) if updates else _flushed(pipe)


def suggest_workers(scheme: ast.Scheme, mistakes: Iterable[Diagnostic]) -> Iterator[Diagnostic]:
    """Yields the mistakes of a scheme, some with better help.

    The help is for an unknown name in a memory bound that names no worker: it says how to name the worker.
    """
    quantities = {
        node.span: item.quantity.value
        for item in scheme.items
        if isinstance(item, ast.Memory) and item.worker is None
        for node in ast.walk(item.limit)
        if isinstance(node, ast.Name) and node.text not in UNITS
    }
    for mistake in mistakes:
        if isinstance(mistake, say.UnknownName) and mistake.closest is None and mistake.span in quantities:
            yield say.UnnamedNumber(mistake.span, mistake.name, None, mistake.known, quantities[mistake.span])
        else:
            yield mistake


def _lines(pipe: ast.PipeBlock) -> Iterator[Diagnostic]:
    for name, needed in (("stages", ast.Stages), ("micros", ast.Micros), ("operation", ast.Operation)):
        if not any(isinstance(line, needed) for line in pipe.clauses):
            yield say.MissingClause(pipe.name.span, pipe.name.text, name, _EXAMPLES[name])
    single = (
        ("stages", ast.Stages),
        ("micros", ast.Micros),
        ("slices", ast.Slices),
        (_READS, ast.Reads),
        ("recompute", ast.Recompute),
    )
    for name, kind in single:
        yield from _once(pipe.clauses, kind, f"the pipe `{pipe.name.text}`", name)
    yield from _slices(pipe)
    again = next((line for line in pipe.clauses if isinstance(line, ast.Recompute)), None)
    for line in pipe.clauses:
        match line:
            case ast.Operation(subjects=[subject]) if again and subject.kind.recomputes:
                yield say.RecomputesTwice(line.span, pipe.name.text, again.span)
                again = None
            case ast.Micros(range=ast.Endless(), halves=ast.Halves(span=span)):
                yield say.HalvesNotSupported(span)
            case ast.Operation(subjects=[first, second]) if {first.kind, second.kind} != {*PAIR.kinds}:
                yield groups.OtherKinds(line.span, first.kind.letter, second.kind.letter)
            case _:
                pass


def _slices(pipe: ast.PipeBlock) -> Iterator[Diagnostic]:
    """Yields mistakes of a pipe about slices: operations that lack a slice, or name one although there are none.

    Groups of micro-batches, and halves, are mistakes beside slices.
    """
    cut = next((line for line in pipe.clauses if isinstance(line, ast.Slices)), None)
    for line in pipe.clauses:
        if isinstance(line, ast.Micros) and line.halves and cut:
            yield slices.SlicesAlone(line.halves.span, cut.span)
        for subject in line.subjects if isinstance(line, ast.Operation) else ():
            if cut is None and subject.slice is not None:
                yield slices.SliceNamed(subject.slice.span, pipe.name.text)
            elif cut and subject.slice is None:
                yield slices.SliceNotNamed(subject.span, subject.kind.letter, cut.variable.text)
            elif cut and isinstance(subject.micro, ast.Range):
                yield slices.SlicesUngrouped(subject.micro.span, cut.span)


def _once(lines: Iterable[ast.SyntaxNode], kind: type[ast.SyntaxNode], owner: str, name: str) -> Iterator[Diagnostic]:
    spans = [line.span for line in lines if isinstance(line, kind)]
    for span in spans[1:]:
        yield say.SecondClause(span, owner, name, spans[0])


def _flushed(pipe: ast.PipeBlock) -> Iterator[Diagnostic]:
    """Yields a mistake for each line that only a pipe without end may have, of a pipe whose scheme has a flush."""
    for clause in pipe.clauses:
        match clause:
            case ast.Micros(range=ast.Endless(span=span)):
                yield endless.UpdateMissing(span, pipe.name.text)
            case ast.Reads(span=span):
                yield endless.NeedlessReads(span)
            case _:
                pass


def _streaming(pipe: ast.PipeBlock, update: ast.Update) -> Iterator[Diagnostic]:
    """Yields a mistake for each line that a pipe without end lacks or may not have; ``update`` is the scheme's line."""
    for clause in pipe.clauses:
        match clause:
            case ast.Micros(range=ast.Range(span=span)):
                yield endless.PipeEnds(span, pipe.name.text, update.span)
            case ast.Sync(mode=ast.SyncMode.LAZY, span=span):
                yield endless.NeverLazy(span)
            case ast.Operation(subjects=[_, second]):
                yield say.NotSupported(second.span)
            case _:
                pass
    if not any(isinstance(clause, ast.Reads) for clause in pipe.clauses):
        yield say.MissingClause(pipe.name.span, pipe.name.text, f"`{_READS}`", _EXAMPLES[_READS])
