"""Compiles formulas to Python closures, once; they are then called for every micro-batch and stage.

A closure takes the values of the variables, as a tuple, and returns a number or a truth. The parts of a formula that do
not depend on a variable are computed when it is compiled:

    2*m + (2*D - 1 - s), with D = 4     lambda frame: (2 * frame[0]) + (7 - frame[1])

Values stay within 64 bits, or a ``Fault`` is raised.
"""

from collections import ChainMap
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, assert_never, cast

from chimera_ir.diagnostics.catalogue.values import (
    BadDivisor,
    BadShare,
    Called,
    Instance,
    NoSuchEntry,
    Overflow,
    Values,
)
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.elaborate.builtins import ARITHMETIC, BUILTINS, COMPARE, DIVISIONS, shareable
from chimera_ir.elaborate.formulas import Part, walk
from chimera_ir.syntax import ast
from chimera_ir.syntax.formatter import show_expression

LIMIT = 2**63 - 1
"""The largest absolute value of a number."""

Frame = tuple[int, ...]
"""The values of the variables in a formula, in the order in which its scope numbers them."""

Formula = Callable[[Frame], int]
"""A compiled expression: a function from the values of its variables to its own value."""


class Fault(Exception):
    """Raised by a formula that has no value, as in a division by zero.

    ``describe`` makes the diagnostic, from the pipe and variables for which the formula failed (an `Instance`) and the
    ``calls`` of functions around the place. It is called only when the diagnostic is needed: a constant part of a
    formula may fail although its value is never used.
    """

    def __init__(self, describe: Callable[..., Diagnostic]) -> None:
        super().__init__()
        self._describe = describe
        self._calls: list[Called] = []

    def through(self, call: Called) -> "Fault":
        """Adds a function call around the place of the fault, and returns the fault itself."""
        self._calls.append(call)
        return self

    def diagnostic(self, instance: Instance) -> Diagnostic:
        """Returns the diagnostic of this fault, for the pipe and the values of variables in ``instance``."""
        return self._describe(instance=instance, calls=tuple(self._calls))


@dataclass(frozen=True, slots=True)
class CompiledFunction:
    """A function of the scheme with its compiled body, for given parameters of the scheme.

    ``laws`` caches the laws of its calls, by their arguments: dozens of pipes and stages make the same calls.
    """

    definition: ast.Function
    body: Formula
    laws: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def bound(self, arguments: Iterable[Part]) -> dict[str, Part]:
        """Returns the arguments of a call by the names of the function's parameters."""
        return dict(zip((word.text for word in self.definition.parameters), arguments, strict=True))


@dataclass(frozen=True, slots=True)
class Scope:
    """The meaning of the names in a formula.

    ``values`` are names with fixed values. ``slots`` are variables, each with its place in a `Frame`. ``formulas`` are
    names for formulas over the variables and other names; ``tables`` have the entries of tables.
    """

    values: Mapping[str, int]
    functions: Mapping[str, CompiledFunction]
    slots: Mapping[str, int]
    formulas: Mapping[str, ast.Expression] = field(default_factory=dict)
    tables: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def with_value(self, name: str, value: int) -> "Scope":
        """This scope with a further fixed value; no mapping is copied, as a scheme may have thousands of values."""
        return replace(self, values=ChainMap({name: value}, cast("dict[str, int]", self.values)))

    def with_names(self, formulas: Mapping[str, ast.Expression], tables: dict[str, tuple[int, ...]]) -> "Scope":
        """This scope with names for formulas, and with further tables."""
        return replace(
            self, formulas=formulas, tables=ChainMap(tables, cast("dict[str, tuple[int, ...]]", self.tables))
        )

    def with_variables(self, *names: str) -> "Scope":
        """This scope with variables, whose values a frame has in the same order."""
        return replace(self, slots={name: slot for slot, name in enumerate(names)})

    def depends(self, expression: ast.Expression, variable: str) -> bool:
        """Whether an expression depends on a variable, directly or through names that stand for formulas."""
        names, pending = set[str](), [expression]
        while pending:
            fresh = {*ast.names_in(pending.pop())} - names
            names |= fresh
            pending += [self.formulas[name] for name in fresh if name in self.formulas]
        return variable in names

    def values_in(self, expression: ast.Expression, frame: Frame) -> Values:
        """Returns the names in an expression with their values; ``frame`` has the values of variables.

        A name is left out if it stands for a formula that has no value for this frame.
        """
        names = dict.fromkeys(node.text for node in ast.walk(expression) if isinstance(node, ast.Name))
        values = ((name, self._value(name, frame)) for name in names)
        return tuple((name, value) for name, value in values if value is not None)

    def _value(self, name: str, frame: Frame) -> int | None:
        if name in self.slots:
            return frame[self.slots[name]]
        with suppress(Fault):
            return compiled(self.formulas[name], self)(frame) if name in self.formulas else self.values[name]
        return None


def evaluate(expression: ast.Expression, scope: Scope, instance: Instance) -> int:
    """The value of an expression without variables; raises ``Rejected``, which names ``instance``, if it has none."""
    with rejecting(instance):
        return compiled(expression, scope)(())


@contextmanager
def rejecting(instance: Instance) -> Iterator[None]:
    """Context in which a ``Fault`` becomes a ``Rejected`` that names the pipe and variables in ``instance``."""
    try:
        yield
    except Fault as fault:
        raise Rejected([fault.diagnostic(instance)]) from None


def compiled(expression: ast.Expression, scope: Scope) -> Formula:
    """Returns a checked expression (see ``checker.check``) as a function; ``scope`` has the meaning of its names."""
    return walk(expression, _Closures(scope)).formula


class _Closure(NamedTuple):
    """A compiled expression; ``constant`` is its value if it depends on no variable."""

    formula: Formula
    constant: int | None


@dataclass(frozen=True, slots=True)
class _Closures:
    """The domain (see `formulas`) that turns a part of a formula into a closure or, if it is constant, its value."""

    scope: Scope

    def constant(self, value: int) -> _Closure:
        return _Closure(lambda frame: value, value)

    def name(self, text: str) -> _Closure:
        slot = self.scope.slots.get(text)
        if slot is not None:
            return _Closure(lambda frame: frame[slot], None)
        formula = self.scope.formulas.get(text)
        return self.constant(self.scope.values[text]) if formula is None else walk(formula, self)

    def fixed(self, part: _Closure) -> int | None:
        return part.constant

    def minus(self, operand: _Closure) -> _Closure:
        formula = operand.formula
        return self._folded(lambda frame: -formula(frame), operand)

    def negation(self, operand: _Closure) -> _Closure:
        formula = operand.formula
        return self._folded(lambda frame: not formula(frame), operand)

    def arithmetic(self, node: ast.Binary, left: _Closure, right: _Closure) -> _Closure:
        apply, first, second = ARITHMETIC[node.operator], left.formula, right.formula

        def within(frame: Frame) -> int:
            value = apply(first(frame), second(frame))
            if -LIMIT <= value <= LIMIT:
                return value
            raise self._fault(Overflow, node, frame)

        def quotient(frame: Frame) -> int:
            divisor = second(frame)
            if divisor > 0:
                return apply(first(frame), divisor)
            raise self._fault(BadDivisor, node.right, frame, show_expression(node.right), divisor)

        return self._folded(quotient if node.operator in DIVISIONS else within, left, right)

    def comparison(self, node: ast.Comparison, comparator: ast.Comparator, left: _Closure, right: _Closure) -> _Closure:
        holds, first, second = COMPARE[comparator], left.formula, right.formula
        return self._folded(lambda frame: holds(first(frame), second(frame)), left, right)

    def logical(self, node: ast.Expression, logic: ast.Logic, left: _Closure, right: _Closure) -> _Closure:
        first, second = left.formula, right.formula
        match logic:
            case ast.Logic.AND:
                return self._folded(lambda frame: first(frame) and second(frame), left, right)
            case ast.Logic.OR:
                return self._folded(lambda frame: first(frame) or second(frame), left, right)
            case _:
                assert_never(logic)

    def choice(self, node: ast.Choice, condition: _Closure, then: _Closure, otherwise: _Closure) -> _Closure:
        test, if_true, if_false = condition.formula, then.formula, otherwise.formula
        return _Closure(lambda frame: if_true(frame) if test(frame) else if_false(frame), None)

    def builtin(self, node: ast.Call, arguments: Sequence[_Closure]) -> _Closure:
        name, formulas = node.function.text, [argument.formula for argument in arguments]
        apply = BUILTINS[name].apply

        def share(frame: Frame) -> int:
            values = [formula(frame) for formula in formulas]
            if not shareable(*values):
                raise self._fault(BadShare, node, frame, *values)
            return apply(*values)

        formula = share if name == "share" else lambda frame: apply(*[formula(frame) for formula in formulas])
        return self._folded(formula, *arguments)

    def lookup(self, node: ast.Lookup, position: _Closure) -> _Closure:
        entries, place = self.scope.tables[node.table.text], position.formula

        def entry(frame: Frame) -> int:
            number = place(frame)
            if 0 <= number < len(entries):
                return entries[number]
            raise self._fault(NoSuchEntry, node, frame, node.table.text, number, len(entries))

        return self._folded(entry, position)

    def call(self, node: ast.Call, arguments: Sequence[_Closure]) -> _Closure:
        name, formulas = node.function.text, [argument.formula for argument in arguments]
        body = self.scope.functions[name].body

        def result(frame: Frame) -> int:
            values = tuple([formula(frame) for formula in formulas])
            try:
                return body(values)
            except Fault as fault:
                raise fault.through(Called(name, values, node.span)) from None

        return self._folded(result, *arguments)

    def _fault(self, describe: Callable[..., Diagnostic], node: ast.Expression, frame: Frame, *facts: object) -> Fault:
        scope = self.scope
        return Fault(lambda instance, calls: describe(node.span, scope.values_in(node, frame), instance, calls, *facts))

    def _folded(self, formula: Formula, *parts: _Closure) -> _Closure:
        """Returns the formula or, if all ``parts`` are constant, its value.

        A constant formula without a value stays a formula, which raises its ``Fault`` when it is called.
        """
        if any(part.constant is None for part in parts):
            return _Closure(formula, None)
        try:
            return self.constant(formula(()))
        except Fault:
            return _Closure(formula, None)
