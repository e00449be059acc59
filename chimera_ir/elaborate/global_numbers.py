"""The global numbers of micro-batches, over all pipes."""

from collections.abc import Iterable, Mapping, Sequence

from chimera_ir.diagnostics.catalogue import endless
from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.elaborate.pipes import Shape, collected, reject
from chimera_ir.source import Span
from chimera_ir.syntax import ast


def global_numbers(shapes: Sequence[Shape]) -> list[list[int]]:
    """The global numbers of each pipe's micro-batches; raises ``Rejected`` if they are not 0 .. N-1, each once."""
    failed: list[Diagnostic] = []
    total = sum(len(shape.micro_range) for shape in shapes)
    # ``owners`` has the first micro-batch with each number, ``clash`` the first one whose number is taken already.
    owners: dict[int, tuple[Shape, int]] = {}
    clash: tuple[int, Shape, int] | None = None
    columns: list[list[int]] = []
    for shape in shapes:
        column: list[int] = []
        with collected(failed):
            column.extend(_numbers(shape, sum(map(len, columns))))
        columns.append(column)
        for micro, number in zip(shape.micro_range, column, strict=False):
            if number not in owners:
                owners[number] = (shape, micro)
            elif clash is None:
                clash = (number, shape, micro)
    failed += [_outside(*owners[number], number, total) for number in owners if not 0 <= number < total]
    if clash is not None and not failed:
        failed.append(_clash(*clash, owners, total))
    reject(failed)
    return columns


def _numbers(shape: Shape, first: int) -> Iterable[int]:
    """The global numbers of a pipe's micro-batches; without an ``as`` clause they count on from ``first``."""
    if shape.micros.number is None:
        return range(first, first + len(shape.micro_range))
    numbers = shape.values(shape.micros.number, {shape.micros.variable.text: shape.micro_range})
    return (number for _, number in numbers)


def _outside(shape: Shape, micro: int, number: int, total: int) -> Diagnostic:
    where = _where(shape, micro)
    if isinstance(shape.micros.range, ast.Endless):
        variable, count = shape.micros.variable.text, len(shape.micro_range)
        return endless.NumberOutsideTurn(*where, variable, micro, number, count, total, total - 1)
    return say.NumberOutside(*where, micro, number, total - 1)


def _clash(number: int, shape: Shape, micro: int, owners: Mapping[int, tuple[Shape, int]], total: int) -> Diagnostic:
    missing = next(candidate for candidate in range(total) if candidate not in owners)
    owner, owner_micro = owners[number]
    earlier = f"{owner.micros.variable.text} = {owner_micro} of `{owner.name}`"
    later = f"{shape.micros.variable.text} = {micro} of `{shape.name}`"
    first = owner.micros.number or owner.micros.range
    return say.NumberTaken(*_where(shape, micro), number, earlier, later, missing, first.span)


def _where(shape: Shape, micro: int) -> tuple[Span, say.Values, say.Instance]:
    """The place that gives a micro-batch its number, the values of the names in this place, and the instance."""
    number, variable = shape.micros.number, shape.micros.variable.text
    instance = shape.instance((variable, micro))
    if number is None:
        return shape.micros.range.span, (), instance
    return number.span, shape.scope.with_variables(variable).values_in(number, (micro,)), instance
