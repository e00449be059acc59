"""Formulas as Python closures: compiled once, then called for every micro-batch and stage.

A closure takes the values of the variables, as a tuple, and returns a number or a truth. What does not depend on a
variable is computed when the formula is compiled. Values stay within 64 bits, or a ``Fault`` is raised.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, assert_never, cast

from chimera_ir.diagnostics.catalogue.values import BadDivisor, BadShare, Called, Instance, Overflow, Values
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.elaborate.builtins import BUILTINS, Builtin, shareable
from chimera_ir.source import Span
from chimera_ir.syntax import ast
from chimera_ir.syntax.printer import show_expression

LIMIT = 2**63 - 1
"""The largest size of a value."""

Frame = tuple[int, ...]
"""The values of the variables, in the order of their slots."""

Formula = Callable[[Frame], int]
"""A compiled expression."""


class _Describe(Protocol):
    """Makes the diagnostic once it is known for which instance a formula failed, and through which calls."""

    def __call__(self, instance: Instance, calls: tuple[Called, ...]) -> Diagnostic: ...


class Fault(Exception):
    """A formula has no value.

    ``describe`` looks at the frame only when the fault is told: a part whose value is known without one is computed
    without one, and may fail where its value is never needed.
    """

    def __init__(self, describe: _Describe) -> None:
        super().__init__()
        self._describe = describe
        self._calls: list[Called] = []

    def through(self, call: Called) -> "Fault":
        """The same fault, seen from the caller of the function in which it happened."""
        self._calls.append(call)
        return self

    def diagnostic(self, instance: Instance) -> Diagnostic:
        """What to tell the user."""
        return self._describe(instance=instance, calls=tuple(self._calls))


@dataclass(frozen=True, slots=True)
class Compiled:
    """A function of the scheme, ready to be called."""

    definition: ast.Function
    body: Formula


@dataclass(frozen=True, slots=True)
class Scope:
    """What the names in a formula stand for: fixed values, variables by their slot in the frame, functions."""

    values: Mapping[str, int]
    functions: Mapping[str, Compiled]
    slots: Mapping[str, int]

    def with_value(self, name: str, value: int) -> "Scope":
        """This scope and a further fixed value, which is laid over the others: a scheme may have thousands."""
        return replace(self, values=ChainMap({name: value}, cast("dict[str, int]", self.values)))

    def with_variables(self, *names: str) -> "Scope":
        """This scope, for a frame that has these variables."""
        return replace(self, slots={name: slot for slot, name in enumerate(names)})

    def values_in(self, expression: ast.Expression, frame: Frame) -> Values:
        """The names in an expression with what they stand for."""
        names = dict.fromkeys(node.text for node in ast.walk(expression) if isinstance(node, ast.Name))
        return tuple((name, frame[self.slots[name]] if name in self.slots else self.values[name]) for name in names)


def evaluate(expression: ast.Expression, scope: Scope, instance: Instance | None = None) -> int | Diagnostic:
    """The value of an expression without variables, or why it has none."""
    try:
        return compiled(expression, scope)(())
    except Fault as fault:
        return fault.diagnostic(instance or Instance())


def compiled(expression: ast.Expression, scope: Scope) -> Formula:
    """The closure of a checked expression (see ``names.check``)."""
    return _compile(expression, scope).formula


class _Part(NamedTuple):
    """A compiled expression; ``constant`` is its value if that is known already."""

    formula: Formula
    constant: int | None


def _compile(node: ast.Expression, scope: Scope) -> _Part:
    match node:
        case ast.Integer(value):
            return _constant(value)
        case ast.Name(text):
            return _slot(scope.slots[text]) if text in scope.slots else _constant(scope.values[text])
        case ast.Call():
            return _call(node, scope)
        case ast.Minus(operand):
            part = _compile(operand, scope)
            return _folded(_minus(part.formula), [part])
        case ast.Binary():
            left, right = _compile(node.left, scope), _compile(node.right, scope)
            return _folded(_binary(node, scope, left, right), [left, right])
        case ast.Comparison():
            parts = [_compile(operand, scope) for operand in node.operands]
            return _folded(_comparison(node.comparators, parts), parts)
        case ast.Not(operand):
            part = _compile(operand, scope)
            return _folded(_not(part.formula), [part])
        case ast.Logical():
            left, right = _compile(node.left, scope), _compile(node.right, scope)
            return _folded(_logical(node.operator, left.formula, right.formula), [left, right])
        case ast.Choice():
            return _choice(*(_compile(part, scope) for part in (node.condition, node.one, node.other)))
        case _:
            assert_never(node)


def _constant(value: int) -> _Part:
    return _Part(lambda frame: value, value)


def _slot(slot: int) -> _Part:
    return _Part(lambda frame: frame[slot], None)


def _folded(formula: Formula, parts: list[_Part]) -> _Part:
    """The formula, or its value if all parts have one; a fault waits until the formula is really asked for."""
    if any(part.constant is None for part in parts):
        return _Part(formula, None)
    try:
        return _constant(formula(()))
    except Fault:
        return _Part(formula, None)


def _minus(operand: Formula) -> Formula:
    return lambda frame: -operand(frame)


def _not(operand: Formula) -> Formula:
    return lambda frame: not operand(frame)


def _logical(operator: ast.Logic, left: Formula, right: Formula) -> Formula:
    match operator:
        case ast.Logic.AND:
            return lambda frame: left(frame) and right(frame)
        case ast.Logic.OR:
            return lambda frame: left(frame) or right(frame)
        case _:
            assert_never(operator)


def _choice(condition: _Part, one: _Part, other: _Part) -> _Part:
    if condition.constant is not None:
        return one if condition.constant else other
    test, yes, no = condition.formula, one.formula, other.formula
    return _Part(lambda frame: yes(frame) if test(frame) else no(frame), None)


def _comparison(comparators: tuple[ast.Comparator, ...], parts: list[_Part]) -> Formula:
    formulas = [part.formula for part in parts]
    pairs = [_compare(*triple) for triple in zip(comparators, formulas, formulas[1:], strict=False)]
    if len(pairs) == 1:
        return pairs[0]
    return lambda frame: all(pair(frame) for pair in pairs)


def _compare(comparator: ast.Comparator, left: Formula, right: Formula) -> Formula:
    match comparator:
        case ast.Comparator.EQUAL:
            return lambda frame: left(frame) == right(frame)
        case ast.Comparator.UNEQUAL:
            return lambda frame: left(frame) != right(frame)
        case ast.Comparator.AT_MOST:
            return lambda frame: left(frame) <= right(frame)
        case ast.Comparator.LESS:
            return lambda frame: left(frame) < right(frame)
        case ast.Comparator.AT_LEAST:
            return lambda frame: left(frame) >= right(frame)
        case ast.Comparator.GREATER:
            return lambda frame: left(frame) > right(frame)
        case _:
            assert_never(comparator)


def _binary(node: ast.Binary, scope: Scope, left: _Part, right: _Part) -> Formula:
    match node.operator:
        case ast.Arithmetic.ADD:
            return _add(left, right, partial(_overflow, node, scope))
        case ast.Arithmetic.SUBTRACT:
            return _subtract(left.formula, right.formula, partial(_overflow, node, scope))
        case ast.Arithmetic.MULTIPLY:
            return _multiply(left, right, partial(_overflow, node, scope))
        case ast.Arithmetic.DIVIDE:
            return _divide(left.formula, right, partial(_bad_divisor, node, scope))
        case ast.Arithmetic.REMAINDER:
            return _remainder(left.formula, right, partial(_bad_divisor, node, scope))
        case _:
            assert_never(node.operator)


def _add(left: _Part, right: _Part, overflow: Callable[[Frame], Fault]) -> Formula:
    one, other = left.formula, right.formula

    def add(frame: Frame) -> int:
        value = one(frame) + other(frame)
        if -LIMIT <= value <= LIMIT:
            return value
        raise overflow(frame)

    return add


def _subtract(one: Formula, other: Formula, overflow: Callable[[Frame], Fault]) -> Formula:
    def subtract(frame: Frame) -> int:
        value = one(frame) - other(frame)
        if -LIMIT <= value <= LIMIT:
            return value
        raise overflow(frame)

    return subtract


def _multiply(left: _Part, right: _Part, overflow: Callable[[Frame], Fault]) -> Formula:
    one, other = left.formula, right.formula

    def multiply(frame: Frame) -> int:
        value = one(frame) * other(frame)
        if -LIMIT <= value <= LIMIT:
            return value
        raise overflow(frame)

    def scale(frame: Frame) -> int:
        value = factor * other(frame)
        if -LIMIT <= value <= LIMIT:
            return value
        raise overflow(frame)

    if left.constant is None:
        return multiply
    factor = left.constant
    return scale


def _divide(one: Formula, right: _Part, bad: Callable[[Frame, int], Fault]) -> Formula:
    other = right.formula

    def divide(frame: Frame) -> int:
        divisor = other(frame)
        if divisor > 0:
            return one(frame) // divisor
        raise bad(frame, divisor)

    if right.constant is None or right.constant <= 0:
        return divide
    fixed = right.constant
    return lambda frame: one(frame) // fixed


def _remainder(one: Formula, right: _Part, bad: Callable[[Frame, int], Fault]) -> Formula:
    other = right.formula

    def remainder(frame: Frame) -> int:
        divisor = other(frame)
        if divisor > 0:
            return one(frame) % divisor
        raise bad(frame, divisor)

    if right.constant is None or right.constant <= 0:
        return remainder
    fixed = right.constant
    return lambda frame: one(frame) % fixed


def _overflow(node: ast.Expression, scope: Scope, frame: Frame) -> Fault:
    return Fault(lambda instance, calls: Overflow(node.span, scope.values_in(node, frame), instance, calls))


def _bad_divisor(node: ast.Binary, scope: Scope, frame: Frame, divisor: int) -> Fault:
    def describe(instance: Instance, calls: tuple[Called, ...]) -> Diagnostic:
        values = scope.values_in(node.right, frame)
        return BadDivisor(node.right.span, values, instance, calls, show_expression(node.right), divisor)

    return Fault(describe)


def _bad_share(node: ast.Call, scope: Scope, frame: Frame, total: int, parts: int, part: int) -> Fault:
    def describe(instance: Instance, calls: tuple[Called, ...]) -> Diagnostic:
        return BadShare(node.span, scope.values_in(node, frame), instance, calls, total, parts, part)

    return Fault(describe)


def _call(node: ast.Call, scope: Scope) -> _Part:
    parts = [_compile(argument, scope) for argument in node.arguments]
    formulas = tuple(part.formula for part in parts)
    builtin = BUILTINS.get(node.function.text)
    if builtin is not None:
        return _folded(_builtin(node, scope, builtin, formulas), parts)
    return _folded(_function(node.function.text, scope.functions[node.function.text].body, formulas, node.span), parts)


def _builtin(node: ast.Call, scope: Scope, builtin: Builtin, arguments: tuple[Formula, ...]) -> Formula:
    apply = builtin.apply

    def share(frame: Frame) -> int:
        total, parts, part = (argument(frame) for argument in arguments)
        if not shareable(total, parts, part):
            raise _bad_share(node, scope, frame, total, parts, part)
        return apply(total, parts, part)

    if node.function.text == "share":
        return share
    return lambda frame: apply(*[argument(frame) for argument in arguments])


def _function(name: str, body: Formula, arguments: tuple[Formula, ...], span: Span) -> Formula:
    def call(frame: Frame) -> int:
        values = tuple([argument(frame) for argument in arguments])
        try:
            return body(values)
        except Fault as fault:
            raise fault.through(Called(name, values, span)) from None

    def call_with_one(frame: Frame) -> int:
        values = (only(frame),)
        try:
            return body(values)
        except Fault as fault:
            raise fault.through(Called(name, values, span)) from None

    def call_with_two(frame: Frame) -> int:
        values = (only(frame), second(frame))
        try:
            return body(values)
        except Fault as fault:
            raise fault.through(Called(name, values, span)) from None

    match arguments:
        case (only,):
            return call_with_one
        case (only, second):
            return call_with_two
        case _:
            return call
