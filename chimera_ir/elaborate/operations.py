"""The operation lines of a pipe, instantiated for its micro-batches and stages."""

from collections.abc import Iterator
from typing import assert_never

from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.elaborate.evaluate import Fault, Formula, Frame, compiled
from chimera_ir.elaborate.pipes import Shape
from chimera_ir.ir.ids import Clock, Stage
from chimera_ir.ir.levels import Pipe, Planned
from chimera_ir.ir.ops import Backward, Forward
from chimera_ir.syntax import ast


def operations(shape: Shape, pipe: Pipe) -> Iterator[Planned | Diagnostic]:
    """Every operation of a pipe, line by line; a line that fails ends with why, at its first failing instance."""
    for line in shape.operations:
        yield from _instances(line, shape, pipe)


def _instances(line: ast.Operation, shape: Shape, pipe: Pipe) -> Iterator[Planned | Diagnostic]:
    """The operations of one line.

    This is the inner loop of the compiler: what does not change from instance to instance is looked up before it.
    """
    assert not isinstance(line.micro, ast.Range), "a range is rejected by clauses.unsupported"
    names = (shape.micros.variable.text, shape.stages.variable.text)
    scope = shape.scope.with_variables(*names)
    guard = None if line.guard is None else compiled(line.guard, scope)
    clock, micro_of, stage_of = (compiled(part, scope) for part in (line.clock, line.micro, line.stage))
    make = _operation_type(line.letter)
    batches = {micro: (number,) for micro, number in zip(shape.micro_range, pipe.micros, strict=True)}
    stages, workers, span = shape.stage_range, pipe.workers, line.span
    frame: Frame = ()
    try:
        for m in shape.micro_range:
            for s in stages:
                frame = (m, s)
                if guard is not None and not guard(frame):
                    continue
                stage = stage_of(frame)
                batch = batches.get(micro_of(frame))
                if batch is None or stage not in stages:
                    yield _no_such(line, shape, names, frame, micro_of, stage_of)
                    return
                yield Planned(Clock(clock(frame)), workers[stage], make(batch, Stage(stage), span))
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


def _no_such(
    line: ast.Operation, shape: Shape, names: tuple[str, str], frame: Frame, micro_of: Formula, stage_of: Formula
) -> Diagnostic:
    """An operation on a micro-batch or a stage that the pipe does not have."""
    assert not isinstance(line.micro, ast.Range)
    scope = shape.scope.with_variables(*names)
    instance = shape.instance(*zip(names, frame, strict=True))
    micro = micro_of(frame)
    if micro not in shape.micro_range:
        values, micros = scope.values_in(line.micro, frame), shape.micro_range
        return say.NoSuchMicro(line.micro.span, values, instance, micro, micros.start, micros.stop - 1)
    values = scope.values_in(line.stage, frame)
    return say.NoSuchStage(line.stage.span, values, instance, stage_of(frame), shape.stage_range.stop - 1)
