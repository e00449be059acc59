"""Evaluates formulas for all micro-batches and stages of a pipe at once, as lists instead of one call for each value.

A part of a formula is evaluated only for what it depends on: `2*m` for the micro-batches, `D-1 - s` for the stages,
their sum for both. A grid has the values that `evaluate` gives one by one, or raises `UndefinedOnGrid`; then `evaluate`
finds the place and the reason.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import NamedTuple

from chimera_ir.elaborate.evaluate import ARITHMETIC, BUILTINS, COMPARE, DIVISIONS, LIMIT, LOGIC, Scope, shareable, walk
from chimera_ir.syntax import ast


class UndefinedOnGrid(Exception):
    """Raised if a part of a formula has no value for some micro-batch and stage, even if it is not needed there."""


class _Column(NamedTuple):
    """The values of a part of a formula, one micro-batch after the other; those of a micro-batch are stage by stage.

    If the part does not depend on micro-batches, or on stages, there is one value for all of them.
    """

    on_micros: bool
    on_stages: bool
    values: list[int]


class Grid:
    """All pairs of a micro-batch of ``micros`` and a stage of ``stages``, one micro-batch after the other.

    ``names`` are the names of the two variables in formulas.
    """

    def __init__(self, micros: Sequence[int], stages: Sequence[int], names: tuple[str, str], scope: Scope) -> None:
        variables = _Column(True, False, list(micros)), _Column(False, True, list(stages))
        self._domain = _Columns(scope, dict(zip(names, variables, strict=True)), len(micros), len(stages))

    def values(self, expression: ast.Expression) -> list[int]:
        """The value of a formula for each pair, in order; raises `UndefinedOnGrid` if it has none for some pair."""
        return self._domain.spread(walk(expression, self._domain), on_micros=True, on_stages=True)


@dataclass(frozen=True, slots=True)
class _Columns:
    scope: Scope
    names: Mapping[str, _Column]
    micros: int
    stages: int

    def constant(self, value: int) -> _Column:
        return _Column(False, False, [value])

    def name(self, text: str) -> _Column:
        if text in self.names:
            return self.names[text]
        formula = self.scope.formulas.get(text)
        return self.constant(self.scope.values[text]) if formula is None else walk(formula, self)

    def fixed(self, part: _Column) -> int | None:
        return None if part.on_micros or part.on_stages else part.values[0]

    def minus(self, operand: _Column) -> _Column:
        return self._applied(operator.neg, operand)

    def negation(self, operand: _Column) -> _Column:
        return self._applied(operator.not_, operand)

    def arithmetic(self, node: ast.Binary, left: _Column, right: _Column) -> _Column:
        if node.operator in DIVISIONS and min(right.values, default=1) < 1:
            raise UndefinedOnGrid
        column = self._applied(ARITHMETIC[node.operator], left, right)
        if max(column.values, default=0) > LIMIT or min(column.values, default=0) < -LIMIT:
            raise UndefinedOnGrid
        return column

    def comparison(self, node: ast.Comparison, comparator: ast.Comparator, left: _Column, right: _Column) -> _Column:
        return self._applied(COMPARE[comparator], left, right)

    def logical(self, node: ast.Expression, logic: ast.Logic, left: _Column, right: _Column) -> _Column:
        return self._applied(LOGIC[logic], left, right)

    def choice(self, node: ast.Choice, condition: _Column, then: _Column, otherwise: _Column) -> _Column:
        return self._applied(lambda holds, yes, no: yes if holds else no, condition, then, otherwise)

    def builtin(self, node: ast.Call, arguments: Sequence[_Column]) -> _Column:
        name = node.function.text
        if name == "share" and not all(self._applied(shareable, *arguments).values):
            raise UndefinedOnGrid
        return self._applied(BUILTINS[name].apply, *arguments)

    def lookup(self, node: ast.Lookup, position: _Column) -> _Column:
        entries = self.scope.tables[node.table.text]
        if not 0 <= min(position.values, default=0) <= max(position.values, default=0) < len(entries):
            raise UndefinedOnGrid
        return self._applied(entries.__getitem__, position)

    def call(self, node: ast.Call, arguments: Sequence[_Column]) -> _Column:
        function = self.scope.functions[node.function.text]
        return walk(function.definition.body, replace(self, names=function.bound(arguments)))

    def _applied(self, apply: Callable[..., int], *parts: _Column) -> _Column:
        on_micros, on_stages = any(part.on_micros for part in parts), any(part.on_stages for part in parts)
        columns = (self.spread(part, on_micros=on_micros, on_stages=on_stages) for part in parts)
        return _Column(on_micros, on_stages, list(map(apply, *columns)))

    def spread(self, part: _Column, *, on_micros: bool, on_stages: bool) -> list[int]:
        """The values for all micro-batches, stages or pairs, repeated where ``part`` does not depend on them."""
        values = part.values
        if on_stages and not part.on_stages:
            values = list(chain.from_iterable(repeat(value, self.stages) for value in values))
        return values * self.micros if on_micros and not part.on_micros else values
