"""Checks for lines that a scheme must have, may have once, or may have only together with other lines."""

from collections.abc import Iterator, Sequence

from chimera_ir.diagnostics.catalogue import endless, pairs
from chimera_ir.diagnostics.catalogue import names as say
from chimera_ir.diagnostics.model import Diagnostic
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
    """Yields diagnostics of lines that are missing, and of second lines where only one is allowed."""
    pipes = [item for item in scheme.items if isinstance(item, ast.PipeBlock)]
    if not pipes:
        yield say.NoPipes(scheme.name.span, scheme.name.text)
    workers = [item.span for item in scheme.items if isinstance(item, ast.Workers)]
    yield from _once(workers, "the scheme", "workers")
    yield from _once([item.span for item in scheme.items if isinstance(item, ast.Update)], "the scheme", "update")
    for quantity in ast.MemoryQuantity:
        bounds = [i.span for i in scheme.items if isinstance(i, ast.Memory) and i.quantity is quantity]
        yield from _once(bounds, "the scheme", f"memory {quantity.value}")
    names: dict[str, Span] = {}
    for pipe in pipes:
        first = names.setdefault(pipe.name.text, pipe.name.span)
        if first != pipe.name.span:
            yield say.DefinedTwice(pipe.name.span, pipe.name.text, first)
        yield from _check_pipe(pipe)


def _check_pipe(pipe: ast.PipeBlock) -> Iterator[Diagnostic]:
    kinds: tuple[tuple[str, type[ast.Clause]], ...] = (
        ("stages", ast.Stages),
        ("micros", ast.Micros),
        ("operation", ast.Operation),
    )
    for clause, kind in kinds:
        spans = [line.span for line in pipe.clauses if isinstance(line, kind)]
        if not spans:
            yield say.MissingClause(pipe.name.span, pipe.name.text, clause, _EXAMPLES[clause])
        elif clause != "operation":
            yield from _once(spans, f"the pipe `{pipe.name.text}`", clause)
    for line in pipe.clauses:
        if isinstance(line, ast.Operation) and len(line.subjects) > 1:
            letters = [subject.letter for subject in line.subjects]
            if {*letters} != {ast.Letter.FORWARD, ast.Letter.BACKWARD}:
                yield pairs.OtherKinds(line.span, *(letter.value for letter in letters))
    reads = [clause.span for clause in pipe.clauses if isinstance(clause, ast.Reads)]
    yield from _once(reads, f"the pipe `{pipe.name.text}`", "reads version")
    recompute = [clause.span for clause in pipe.clauses if isinstance(clause, ast.Recompute)]
    yield from _once(recompute, f"the pipe `{pipe.name.text}`", "recompute")


def _once(spans: Sequence[Span], owner: str, clause: str) -> Iterator[Diagnostic]:
    for span in spans[1:]:
        yield say.SecondClause(span, owner, clause, spans[0])


def check_updates(scheme: ast.Scheme) -> Iterator[Diagnostic]:
    """Yields diagnostics of asynchronous schemes' lines in a synchronous scheme, and the other way round."""
    update = next((item for item in scheme.items if isinstance(item, ast.Update)), None)
    for pipe in scheme.items:
        if isinstance(pipe, ast.PipeBlock):
            yield from _flushed(pipe) if update is None else _streaming(pipe, update)


def _flushed(pipe: ast.PipeBlock) -> Iterator[Diagnostic]:
    """Diagnostics of lines in a pipe of a synchronous scheme that only asynchronous schemes may have."""
    for clause in pipe.clauses:
        match clause:
            case ast.Micros(range=ast.Endless(span=span)):
                yield endless.UpdateMissing(span, pipe.name.text)
            case ast.Reads(span=span):
                yield endless.NeedlessReads(span)
            case _:
                pass


def _streaming(pipe: ast.PipeBlock, update: ast.Update) -> Iterator[Diagnostic]:
    """Diagnostics of lines that a pipe of an asynchronous scheme lacks, or has and may not have."""
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


def unsupported(scheme: ast.Scheme) -> Iterator[Diagnostic]:
    """Diagnostics of lines that the language allows and the compiler cannot compile."""
    for pipe in scheme.items:
        for clause in pipe.clauses if isinstance(pipe, ast.PipeBlock) else ():
            match clause:
                case ast.Micros(range=ast.Endless(), halves=ast.Halves(span=span)):
                    yield say.HalvesNotSupported(span)
                case _:
                    pass
