"""The global numbers of micro-batches, over all pipes."""

from collections.abc import Sequence

from chimera_ir.diagnostics.catalogue import endless
from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.elaborate.evaluate import Fault, compiled
from chimera_ir.elaborate.pipes import Shape
from chimera_ir.syntax import ast


def global_numbers(shapes: Sequence[Shape], failed: list[Diagnostic]) -> list[list[int]]:
    """Returns the numbers of each pipe's micro-batches; adds to ``failed`` why they are not 0 .. N-1, each once."""
    total = sum(len(shape.micro_range) for shape in shapes)
    owners: dict[int, tuple[Shape, int]] = {}
    clash: tuple[int, Shape, int] | None = None
    # ``owners`` has the first micro-batch with each number, ``clash`` the first one whose number is taken already.
    columns: list[list[int]] = []
    for shape in shapes:
        column = _column(shape, sum(map(len, columns)), failed)
        columns.append(column)
        for micro, number in zip(shape.micro_range, column, strict=False):
            if number not in owners:
                owners[number] = (shape, micro)
            elif clash is None:
                clash = (number, shape, micro)
    outside = [_outside(*owners[number], number, total) for number in owners if not 0 <= number < total]
    failed += outside
    if clash is not None and not failed:
        failed.append(_clash(clash, owners, total))
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
        count = len(shape.micro_range)
        return endless.NumberOutsideTurn(text.span, values, instance, variable, micro, number, count, total, total - 1)
    return say.NumberOutside(text.span, values, instance, micro, number, total - 1)


def _clash(clash: tuple[int, Shape, int], owners: dict[int, tuple[Shape, int]], total: int) -> Diagnostic:
    number, shape, micro = clash
    owner, owner_micro = owners[number]
    missing = next(candidate for candidate in range(total) if candidate not in owners)
    text, first = shape.micros.number or shape.micros.range, owner.micros.number or owner.micros.range
    earlier = f"m = {owner_micro} of `{owner.name}`".replace("m", owner.micros.variable.text, 1)
    later = f"m = {micro} of `{shape.name}`".replace("m", shape.micros.variable.text, 1)
    instance = shape.instance((shape.micros.variable.text, micro))
    values = _number_values(shape, micro)
    return say.NumberTaken(text.span, values, instance, number, earlier, later, missing, first.span)


def _number_values(shape: Shape, micro: int) -> say.Values:
    if shape.micros.number is None:
        return ()
    return shape.scope.with_variables(shape.micros.variable.text).values_in(shape.micros.number, (micro,))
