"""The operation lines of a pipe, instantiated for its micro-batches and stages."""

from collections.abc import Callable, Iterator
from typing import assert_never

from chimera_ir.diagnostics.catalogue import groups
from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.elaborate.evaluate import Fault, Frame, Scope, compiled
from chimera_ir.elaborate.pipes import Shape
from chimera_ir.elaborate.versions import Readings
from chimera_ir.ir.ids import Clock, Micro, Stage
from chimera_ir.ir.levels import Pipe, Planned
from chimera_ir.ir.ops import Backward, Forward
from chimera_ir.syntax import ast


def operations(shape: Shape, pipe: Pipe, reads: Readings) -> Iterator[Planned | Diagnostic]:
    """Every operation of a pipe, line by line; a line that fails ends with why, at its first failing instance."""
    for line in shape.operations:
        yield from _instances(line, shape, pipe, reads)


def _instances(line: ast.Operation, shape: Shape, pipe: Pipe, reads: Readings) -> Iterator[Planned | Diagnostic]:
    """The operations of one line.

    This is the inner loop of the compiler: what does not change from instance to instance is looked up before it.
    """
    names = (shape.micros.variable.text, shape.stages.variable.text)
    scope = shape.scope.with_variables(*names)
    guard = None if line.guard is None else compiled(line.guard, scope)
    clock, stage_of = compiled(line.clock, scope), compiled(line.stage, scope)
    batch_of = _batches(line.micro, scope, dict(zip(shape.micro_range, pipe.micros, strict=True)))
    make = _operation_type(line.letter)
    stages, workers, span = shape.stage_range, pipe.workers, line.span
    frame: Frame = ()
    try:
        for m in shape.steps:
            for s in stages:
                frame = (m, s)
                if guard is not None and not guard(frame):
                    continue
                stage = stage_of(frame)
                batch = batch_of(frame)
                if batch is None or stage not in stages:
                    yield _no_such(line, shape, names, frame)
                    return
                version = reads.get((batch[0], Stage(stage)))
                yield Planned(Clock(clock(frame)), workers[stage], make(batch, Stage(stage), span, version))
    except Fault as fault:
        yield fault.diagnostic(shape.instance(*zip(names, frame, strict=True)))


def _operation_type(letter: ast.Letter) -> type[Forward] | type[Backward]:
    match letter:
        case ast.Letter.FORWARD:
            return Forward
        case ast.Letter.BACKWARD:
            return Backward
        case ast.Letter.INPUT_GRADIENT | ast.Letter.WEIGHT_GRADIENT:
            raise AssertionError("a split backward is rejected by clauses.unsupported")
        case _:
            assert_never(letter)


def _batches(
    micro: ast.Expression | ast.Range, scope: Scope, numbers: dict[int, Micro]
) -> Callable[[Frame], tuple[Micro, ...] | None]:
    """The global numbers of the micro-batches of an operation; None if the pipe lacks one, or there are none."""
    if not isinstance(micro, ast.Range):
        only = compiled(micro, scope)
        single = {mine: (number,) for mine, number in numbers.items()}
        return lambda frame: single.get(only(frame))
    first, end = compiled(micro.start, scope), compiled(micro.stop, scope)

    def several(frame: Frame) -> tuple[Micro, ...] | None:
        start, stop = first(frame), end(frame)
        if not (start < stop and start in numbers and stop - 1 in numbers):
            return None
        return tuple(numbers[each] for each in range(start, stop))

    return several


def _no_such(line: ast.Operation, shape: Shape, names: tuple[str, str], frame: Frame) -> Diagnostic:
    """An operation on a micro-batch or a stage that the pipe does not have."""
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
