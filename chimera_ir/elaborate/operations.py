"""The operation lines of a pipe, instantiated for its micro-batches and stages."""

from collections.abc import Callable, Iterator, Sequence
from itertools import compress, product
from typing import cast

from chimera_ir.diagnostics.catalogue import groups
from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.elaborate.evaluate import Fault, Frame, Scope, compiled
from chimera_ir.elaborate.grid import Grid, Unfit
from chimera_ir.elaborate.pipes import Shape
from chimera_ir.elaborate.versions import Readings
from chimera_ir.ir.ids import Clock, Micro, Stage
from chimera_ir.ir.kinds import KINDS
from chimera_ir.ir.levels import Pipe, Planned
from chimera_ir.ir.ops import Compute
from chimera_ir.syntax import ast


def operations(shape: Shape, pipe: Pipe, reads: Readings) -> Iterator[Planned | Diagnostic]:
    """The operations of a pipe, line by line; a line that fails ends with why its first failing instance fails."""
    for line in shape.operations:
        try:
            yield from _all_at_once(line, shape, pipe, reads)
        except Unfit:
            yield from _instances(line, shape, pipe, reads)


def _all_at_once(line: ast.Operation, shape: Shape, pipe: Pipe, reads: Readings) -> list[Planned]:
    """The operations of one line.

    Raises
    ------
    Unfit
        If one of the operations fails, or may fail.
    """
    names = (shape.micros.variable.text, shape.stages.variable.text)
    grid = Grid(shape.steps, shape.stage_range, names, shape.scope)
    batches = _known(grid, line.micro, dict(zip(shape.micro_range, pipe.micros, strict=True)))
    stages, clocks = cast("list[Stage]", grid.values(line.stage)), cast("list[Clock]", grid.values(line.clock))
    if line.guard is not None:
        wanted = grid.values(line.guard)
        batches, stages, clocks = (list(compress(column, wanted)) for column in (batches, stages, clocks))  # type: ignore[assignment]
    if None in batches or not {*stages} <= {*shape.stage_range}:
        raise Unfit
    kind, workers, span = KINDS[line.letter.value], pipe.workers, line.span
    return [
        Planned(
            clock, workers[stage], Compute(kind, batch, stage, span, reads.get((batch[0], stage)) if reads else None)
        )
        for clock, stage, batch in zip(clocks, stages, batches, strict=True)
        if batch is not None
    ]


def _instances(line: ast.Operation, shape: Shape, pipe: Pipe, reads: Readings) -> Iterator[Planned | Diagnostic]:
    """The operations of one line, one by one, up to the first that fails."""
    names = (shape.micros.variable.text, shape.stages.variable.text)
    scope = shape.scope.with_variables(*names)
    guard = None if line.guard is None else compiled(line.guard, scope)
    clock, stage_of = compiled(line.clock, scope), compiled(line.stage, scope)
    batch_of = _batches(line.micro, scope, dict(zip(shape.micro_range, pipe.micros, strict=True)))
    kind = KINDS[line.letter.value]
    frame: Frame = ()
    try:
        for frame in product(shape.steps, shape.stage_range):
            if guard is not None and not guard(frame):
                continue
            stage = stage_of(frame)
            batch = batch_of(frame)
            if batch is None or stage not in shape.stage_range:
                yield _no_such(line, shape, names, frame)
                return
            version = reads.get((batch[0], Stage(stage)))
            operation = Compute(kind, batch, Stage(stage), line.span, version)
            yield Planned(Clock(clock(frame)), pipe.workers[stage], operation)
    except Fault as fault:
        yield fault.diagnostic(shape.instance(*zip(names, frame, strict=True)))


def _known(
    grid: Grid, micro: ast.Expression | ast.Range, numbers: dict[int, Micro]
) -> Sequence[tuple[Micro, ...] | None]:
    """The global numbers of the micro-batches of each pair; None where the pipe lacks one, or there are none."""
    if not isinstance(micro, ast.Range):
        single = {mine: (number,) for mine, number in numbers.items()}
        return list(map(single.get, grid.values(micro)))
    batches: dict[tuple[int, int], tuple[Micro, ...] | None] = {}
    pairs = list(zip(grid.values(micro.start), grid.values(micro.stop), strict=True))
    for start, stop in {*pairs}:
        known = start < stop and start in numbers and stop - 1 in numbers
        batches[start, stop] = tuple([numbers[mine] for mine in range(start, stop)]) if known else None
    return [batches[pair] for pair in pairs]


def _batches(
    micro: ast.Expression | ast.Range, scope: Scope, numbers: dict[int, Micro]
) -> Callable[[Frame], tuple[Micro, ...] | None]:
    """A function from a frame to the global numbers of its micro-batches, or None as in ``_known``."""
    if not isinstance(micro, ast.Range):
        only = compiled(micro, scope)
        single = {mine: (number,) for mine, number in numbers.items()}
        return lambda frame: single.get(only(frame))
    first, end = compiled(micro.start, scope), compiled(micro.stop, scope)

    def several(frame: Frame) -> tuple[Micro, ...] | None:
        start, stop = first(frame), end(frame)
        if not (start < stop and start in numbers and stop - 1 in numbers):
            return None
        return tuple(numbers[mine] for mine in range(start, stop))

    return several


def _no_such(line: ast.Operation, shape: Shape, names: tuple[str, str], frame: Frame) -> Diagnostic:
    """The diagnostic of an operation on a micro-batch or a stage that the pipe does not have."""
    scope = shape.scope.with_variables(*names)
    instance = shape.instance(*zip(names, frame, strict=True))
    micros = shape.micro_range
    if not isinstance(line.micro, ast.Range):
        micro = compiled(line.micro, scope)(frame)
        if micro not in micros:
            values = scope.values_in(line.micro, frame)
            return say.NoSuchMicro(line.micro.span, values, instance, micro, micros.start, micros.stop - 1)
    else:
        start, stop = compiled(line.micro.start, scope)(frame), compiled(line.micro.stop, scope)(frame)
        values = tuple(
            dict([*scope.values_in(line.micro.start, frame), *scope.values_in(line.micro.stop, frame)]).items()
        )
        if stop <= start:
            return groups.EmptyGroup(line.micro.span, values, instance, start, stop)
        if start not in micros or stop - 1 not in micros:
            micro = start if start not in micros else max(start, micros.stop)
            return say.NoSuchMicro(line.micro.span, values, instance, micro, micros.start, micros.stop - 1)
    values = scope.values_in(line.stage, frame)
    return say.NoSuchStage(
        line.stage.span, values, instance, compiled(line.stage, scope)(frame), shape.stage_range.stop - 1
    )
