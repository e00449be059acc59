"""Formulas over all micro-batches and stages of a pipe at once: lists of values instead of a call for each of them.

A part of a formula is evaluated only for what it depends on: `2*m` for the micro-batches, `D-1 - s` for the stages,
their sum for both. It has the values that `evaluate` gives one by one, or is `Unfit`: then that tells where, and why.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from typing import NamedTuple, assert_never

from chimera_ir.elaborate.builtins import BUILTINS, COMPARE, shareable
from chimera_ir.elaborate.evaluate import LIMIT, Scope
from chimera_ir.syntax import ast


class Unfit(Exception):
    """Somewhere the formula has no value, or what it does not need there has none."""


class _Values(NamedTuple):
    """What a part of a formula depends on, and its values for that: by micro-batch, then by stage."""

    on_micros: bool
    on_stages: bool
    values: list[int]


class Grid:
    """All pairs of a micro-batch and a stage, micro-batch by micro-batch.

    Parameters
    ----------
    micros, stages
        What the two variables run through.
    names
        Those of the variables.
    scope
        What all other names stand for.
    """

    def __init__(self, micros: Sequence[int], stages: Sequence[int], names: tuple[str, str], scope: Scope) -> None:
        self._sizes = len(micros), len(stages)
        variables = _Values(True, False, list(micros)), _Values(False, True, list(stages))
        self._variables = dict(zip(names, variables, strict=True))
        self._scope = scope

    def values(self, expression: ast.Expression) -> list[int]:
        """The values of a checked formula, or its truths, on the whole grid.

        Raises
        ------
        Unfit
            If it, or any part of it, lacks one somewhere.
        """
        return self._spread(self._of(expression, self._variables), on_micros=True, on_stages=True)

    def _of(self, node: ast.Expression, bound: Mapping[str, _Values]) -> _Values:
        match node:
            case ast.Integer(value):
                return _one(value)
            case ast.Name(text):
                return bound[text] if text in bound else _one(self._scope.values[text])
            case ast.Minus(operand):
                return self._each(operator.neg, self._of(operand, bound))
            case ast.Binary():
                return self._binary(node.operator, self._of(node.left, bound), self._of(node.right, bound))
            case ast.Comparison():
                operands = [self._of(operand, bound) for operand in node.operands]
                pairs = zip(node.comparators, operands, operands[1:], strict=False)
                holds = [self._each(COMPARE[comparator], one, other) for comparator, one, other in pairs]
                return self._each(lambda *truths: all(truths), *holds) if len(holds) > 1 else holds[0]
            case ast.Not(operand):
                return self._each(operator.not_, self._of(operand, bound))
            case ast.Logical():
                return self._each(_LOGIC[node.operator], self._of(node.left, bound), self._of(node.right, bound))
            case ast.Choice():
                parts = (self._of(part, bound) for part in (node.condition, node.one, node.other))
                return self._each(lambda condition, one, other: one if condition else other, *parts)
            case ast.Call():
                return self._call(node.function.text, [self._of(argument, bound) for argument in node.arguments])
            case _:
                assert_never(node)

    def _binary(self, symbol: ast.Arithmetic, left: _Values, right: _Values) -> _Values:
        if symbol in (ast.Arithmetic.DIVIDE, ast.Arithmetic.REMAINDER) and min(right.values, default=1) < 1:
            raise Unfit
        found = self._each(_COMBINE[symbol], left, right)
        if max(found.values, default=0) > LIMIT or min(found.values, default=0) < -LIMIT:
            raise Unfit
        return found

    def _call(self, name: str, arguments: list[_Values]) -> _Values:
        builtin = BUILTINS.get(name)
        if builtin is None:
            function = self._scope.functions[name].definition
            parameters = (parameter.text for parameter in function.parameters)
            return self._of(function.body, dict(zip(parameters, arguments, strict=True)))
        if name == "share" and not all(self._each(shareable, *arguments).values):
            raise Unfit
        return self._each(builtin.apply, *arguments)

    def _each(self, apply: Callable[..., int], *parts: _Values) -> _Values:
        """A function of parts, for all that any of them depends on."""
        on_micros, on_stages = any(part.on_micros for part in parts), any(part.on_stages for part in parts)
        columns = (self._spread(part, on_micros=on_micros, on_stages=on_stages) for part in parts)
        return _Values(on_micros, on_stages, list(map(apply, *columns)))

    def _spread(self, part: _Values, *, on_micros: bool, on_stages: bool) -> list[int]:
        """The values of a part, repeated for what it does not depend on."""
        values, (micros, stages) = part.values, self._sizes
        if on_stages and not part.on_stages:
            values = list(chain.from_iterable(repeat(value, stages) for value in values))
        return values * micros if on_micros and not part.on_micros else values


def _one(value: int) -> _Values:
    return _Values(False, False, [value])


_LOGIC = {ast.Logic.AND: operator.and_, ast.Logic.OR: operator.or_}

_COMBINE = {
    ast.Arithmetic.ADD: operator.add,
    ast.Arithmetic.SUBTRACT: operator.sub,
    ast.Arithmetic.MULTIPLY: operator.mul,
    ast.Arithmetic.DIVIDE: operator.floordiv,
    ast.Arithmetic.REMAINDER: operator.mod,
}
