"""The global numbers of micro-batches, over all pipes."""

from collections.abc import Sequence

from chimera_ir.diagnostics.catalogue import endless
from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.elaborate.evaluate import Fault, compiled
from chimera_ir.elaborate.pipes import Shape
from chimera_ir.syntax import ast


def numbers(found: Sequence[Shape], failed: list[Diagnostic]) -> list[list[int]]:
    """The global numbers of each pipe's micro-batches, which are all of 0 .. N-1 unless something has failed."""
    total = sum(len(shape.micro_range) for shape in found)
    taken: dict[int, tuple[Shape, int]] = {}
    clash: tuple[int, Shape, int] | None = None
    columns: list[list[int]] = []
    for shape in found:
        column = _column(shape, sum(map(len, columns)), failed)
        columns.append(column)
        for micro, number in zip(shape.micro_range, column, strict=False):
            if number not in taken:
                taken[number] = (shape, micro)
            elif clash is None:
                clash = (number, shape, micro)
    outside = [_outside(*taken[number], number, total) for number in taken if not 0 <= number < total]
    failed += outside
    if clash is not None and not failed:
        failed.append(_taken(clash, taken, total))
    return columns


def _column(shape: Shape, first: int, failed: list[Diagnostic]) -> list[int]:
    number, variable = shape.micros.number, shape.micros.variable.text
    if number is None:
        return list(range(first, first + len(shape.micro_range)))
    formula = compiled(number, shape.scope.with_variables(variable))
    column: list[int] = []
    for micro in shape.micro_range:
        try:
            column.append(formula((micro,)))
        except Fault as fault:
            failed.append(fault.diagnostic(shape.instance((variable, micro))))
            break
    return column


def _outside(shape: Shape, micro: int, number: int, total: int) -> Diagnostic:
    text, variable = shape.micros.number or shape.micros.range, shape.micros.variable.text
    values = _number_values(shape, micro)
    instance = shape.instance((variable, micro))
    if isinstance(shape.micros.range, ast.Endless):
        mine = len(shape.micro_range)
        return endless.NumberOutsideTurn(text.span, values, instance, variable, micro, number, mine, total)
    return say.NumberOutside(text.span, values, instance, micro, number, total - 1)


def _taken(clash: tuple[int, Shape, int], taken: dict[int, tuple[Shape, int]], total: int) -> Diagnostic:
    number, shape, micro = clash
    other, other_micro = taken[number]
    missing = next(candidate for candidate in range(total) if candidate not in taken)
    text, first = shape.micros.number or shape.micros.range, other.micros.number or other.micros.range
    one = f"m = {other_micro} of `{other.name}`".replace("m", other.micros.variable.text, 1)
    two = f"m = {micro} of `{shape.name}`".replace("m", shape.micros.variable.text, 1)
    instance = shape.instance((shape.micros.variable.text, micro))
    values = _number_values(shape, micro)
    return say.NumberTaken(text.span, values, instance, number, one, two, missing, first.span)


def _number_values(shape: Shape, micro: int) -> say.Values:
    if shape.micros.number is None:
        return ()
    return shape.scope.with_variables(shape.micros.variable.text).values_in(shape.micros.number, (micro,))
