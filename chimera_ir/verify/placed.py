"""Rule "placed": every stage of a pipe is on one worker within range, every operation on the worker of its stage."""

from collections import Counter
from collections.abc import Iterable, Iterator

from chimera_ir.diagnostics.catalogue import schedule as say
from chimera_ir.diagnostics.catalogue.irheader import UnevenPlan
from chimera_ir.diagnostics.catalogue.lanes import RecomputesInPart
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.ids import Version, Worker
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import NOWHERE, Compute
from chimera_ir.ir.text.printer import kinds_line, line
from chimera_ir.source import Span

_Unknown = tuple[type[say.NoSuchOperation]] | tuple[type[say.NumberNotThere], str, int]
"""The message that something about an operation does not exist.

It is a type of message, alone or with the noun and the number of what does not exist.
"""


def placed(header: Header, operations: Iterable[tuple[Worker, Compute]]) -> Iterator[Diagnostic]:
    """Yields diagnostics of ``operations`` that are on a wrong worker or cannot exist; each has its worker.

    Mistakes of one kind in one line of text are one diagnostic. If the header itself is wrong, only its mistakes are
    shown.
    """
    mistakes = list(_header(header))
    yield from mistakes or _operations(header, operations)


def _header(header: Header) -> Iterator[Diagnostic]:
    if not _even(header):
        yield UnevenPlan(NOWHERE, header.micro_batches, header.updates, header.period, header.slices)
    for pipe in header.pipes:
        if len(pipe.workers) != header.stages:
            yield say.StagesUnplaced(NOWHERE, pipe.name, len(pipe.workers), header.stages, header.stages - 1)
        for stage, worker in enumerate(pipe.workers):
            if not 0 <= worker < header.workers:
                yield say.PlacedOutside(NOWHERE, pipe.name, stage, worker, header.workers - 1)
                break
    occurrences = Counter(micro for pipe in header.pipes for micro in pipe.micros)
    for micro in (*range(header.micro_batches), *sorted(occurrences)):
        times = occurrences[micro] if 0 <= micro < header.micro_batches else occurrences[micro] + 1
        if times != 1:
            whole, last = micro // header.slices, header.micro_batches // header.slices - 1
            yield say.MicrosNotNumbered(NOWHERE, whole, occurrences[micro], last)
            return


def _even(header: Header) -> bool:
    if not header.period:
        return header.updates == 1
    shared = 1 <= header.updates <= header.micro_batches and header.micro_batches % header.updates == 0
    return shared and header.period % header.per_update == 0


def _operations(header: Header, operations: Iterable[tuple[Worker, Compute]]) -> Iterator[Diagnostic]:
    # The first operation of each line of the text with each kind of mistake, and the mistakes of the line.
    unknown: dict[Span, tuple[Worker, Compute, _Unknown]] = {}
    wrong: dict[Span, tuple[Worker, Compute]] = {}
    needless: dict[Span, tuple[Worker, Compute]] = {}
    counts: Counter[Span] = Counter()
    other: dict[Span, tuple[Worker, Compute]] = {}
    uneven: dict[Span, tuple[Worker, Compute]] = {}
    pipe_of, kinds = header.pipe_of, header.kinds
    for worker, operation in _doubtful(header, operations):
        mistake = _unknown(header, worker, operation)
        if operation.kind not in kinds and not operation.kind.recomputes:
            other.setdefault(operation.origin, (worker, operation))
        elif mistake is not None:
            unknown.setdefault(operation.origin, (worker, operation, mistake))
        elif operation.kind.recomputes and not header.recomputes(operation.micros[0], operation.stage):
            needless.setdefault(operation.origin, (worker, operation))
        elif len({header.recomputes(micro, operation.stage) for micro in operation.micros}) > 1:
            uneven.setdefault(operation.origin, (worker, operation))
        elif any(pipe_of[micro].workers[operation.stage] != worker for micro in operation.micros):
            wrong.setdefault(operation.origin, (worker, operation))
        else:
            continue
        counts[operation.origin] += 1
    for origin, (worker, operation) in other.items():
        yield say.KindNotThere(origin, line(operation, header), worker, kinds_line(header), counts[origin])
    last = (header.stages - 1, header.micro_batches // header.slices - 1, header.workers - 1)
    for origin, (worker, operation, (message, *facts)) in unknown.items():
        yield message(origin, line(operation, header), worker, *last, counts[origin], *facts)
    for origin, (worker, operation) in needless.items():
        stage, name = operation.stage, pipe_of[operation.micros[0]].name
        yield say.RecomputesNothing(origin, line(operation, header), worker, stage, name, counts[origin])
    for origin, (worker, operation) in uneven.items():
        stage, micro = operation.stage, next(m for m in operation.micros if header.recomputes(m, operation.stage))
        yield RecomputesInPart(origin, line(operation, header), worker, stage, micro, counts[origin])
    for origin, (worker, operation) in wrong.items():
        stage = operation.stage
        right = next(micro for micro in operation.micros if pipe_of[micro].workers[stage] != worker)
        pipe = pipe_of[right]
        where = (worker, pipe.workers[stage], pipe.name, stage)
        yield say.WrongWorker(origin, line(operation, header), *where, counts[origin])


def _doubtful(header: Header, operations: Iterable[tuple[Worker, Compute]]) -> Iterator[tuple[Worker, Compute]]:
    """Yields the operations that need a closer look, each with its worker.

    Nearly all operations are left out, as they are obviously right: of one micro-batch, without a version, and on the
    worker of their stage.
    """
    pipe_of, stages, plain = header.pipe_of, header.stages, {kind for kind in header.kinds if not kind.recomputes}
    if header.steps_inside:
        yield from operations
        return
    for worker, operation in operations:
        micros, stage = operation.micros, operation.stage
        is_plain = operation.kind in plain and operation.version is None and len(micros) == 1 and 0 <= stage < stages
        if not (is_plain and micros[0] in pipe_of and pipe_of[micros[0]].workers[stage] == worker):
            yield worker, operation


def _unknown(header: Header, worker: Worker, operation: Compute) -> _Unknown | None:
    """Returns why an operation cannot exist, on this worker or at all; None if it can.

    The reason is a class of message and the message's facts.
    """
    if not 0 <= operation.stage < header.stages:
        return say.NumberNotThere, "stage", operation.stage
    if not 0 <= worker < header.workers:
        return say.NumberNotThere, "worker", worker
    micros = operation.micros
    if not micros:
        return (say.NoSuchOperation,)
    if len(set(micros)) < len(micros):
        return (say.MicroNamedTwice,)
    for micro in micros:
        if not 0 <= micro < header.micro_batches:
            return say.NumberNotThere, "micro-batch", micro // header.slices
    return _unknown_version(header, operation.version, named=not operation.kind.moves)


def _unknown_version(header: Header, version: Version | None, *, named: bool) -> _Unknown | None:
    """Returns why the version that an operation names is wrong; None if it is right.

    ``named`` says whether operations of this kind name a version in schemes without a flush; with a flush none does.
    """
    if not (named and header.steps_inside):
        return None if version is None else (say.VersionOfOneUpdate,)
    if version is None:
        return (say.NoVersionNamed,)
    return None if 0 <= version <= header.updates else (say.NumberNotThere, "version", version)
