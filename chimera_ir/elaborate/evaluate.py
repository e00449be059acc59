"""Compiles formulas to Python closures, once; they are then called for every micro-batch and stage.

A closure takes the values of the variables, as a tuple, and returns a number or a truth. The parts of a formula that do
not depend on a variable are computed when it is compiled:

    2*m + (2*D - 1 - s), with D = 4     lambda frame: (2 * frame[0]) + (7 - frame[1])

Values stay within 64 bits, or a ``Fault`` is raised.
"""

import operator
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar, assert_never, cast

from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.catalogue.values import Called, Instance, Values
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.syntax import ast
from chimera_ir.syntax.ast import Arithmetic, Comparator, Logic
from chimera_ir.syntax.formatter import show_expression

# The builtin functions of the scheme language, and the meaning of its operators.


class Builtin(NamedTuple):
    """A builtin function of ``least`` to ``most`` integers, or of any number of them if ``most`` is None.

    ``signature`` is a call of it for messages; ``apply`` computes its value.
    """

    signature: str
    least: int
    most: int | None
    apply: Callable[..., int]


def share(total: int, parts: int, part: int) -> int:
    """The size of a part when ``total`` is cut into ``parts`` parts, as evenly as possible, larger parts first.

    Examples
    --------
    >>> [share(7, 3, part) for part in range(3)]
    [3, 2, 2]
    """
    return (total + parts - 1 - part) // parts


def shareable(total: int, parts: int, part: int) -> bool:
    """Whether ``share`` is defined for these arguments."""
    return total >= 0 and 0 <= part < parts


BUILTINS = {
    "min": Builtin("min(a, b)", 2, None, min),
    "max": Builtin("max(a, b)", 2, None, max),
    "abs": Builtin("abs(a)", 1, 1, abs),
    "share": Builtin("share(N, k, i)", 3, 3, share),
}

UNITS = {f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)} | {
    f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)
}
"""The values of the names for units of bytes, such as kB and GiB.

A bound in bytes may use them unless the scheme defines the name itself.
"""

ARITHMETIC: Mapping[Arithmetic, Callable[[int, int], int]] = {
    Arithmetic.ADD: operator.add,
    Arithmetic.SUBTRACT: operator.sub,
    Arithmetic.MULTIPLY: operator.mul,
    Arithmetic.DIVIDE: operator.floordiv,
    Arithmetic.REMAINDER: operator.mod,
}

DIVISIONS = frozenset({Arithmetic.DIVIDE, Arithmetic.REMAINDER})
"""The operators that need a positive right operand."""

COMPARE: Mapping[Comparator, Callable[[int, int], bool]] = {
    Comparator.EQUAL: operator.eq,
    Comparator.UNEQUAL: operator.ne,
    Comparator.AT_MOST: operator.le,
    Comparator.LESS: operator.lt,
    Comparator.AT_LEAST: operator.ge,
    Comparator.GREATER: operator.gt,
}

LOGIC: Mapping[Logic, Callable[[bool, bool], bool]] = {Logic.AND: operator.and_, Logic.OR: operator.or_}
"""``and`` and ``or`` of two known truths."""

DECISIVE = {Logic.AND: False, Logic.OR: True}
"""The left side with which ``and`` or ``or`` has its result already, so that the right side is not needed."""


# The one walk over a formula, which serves everything that a formula is turned into; a domain says what that is.
#
# A domain gives each operation its meaning: closures that give integers (``evaluate``), columns of values (``grid``) or
# quasi-affine laws (``affine``). The walk decides the order, and which parts are walked at all:
#
# - operands come before their operation, from left to right; of a chain of comparisons, all of them;
# - a condition with a fixed value decides: only the chosen branch of a choice is walked, and the right side of an
#   ``and`` or ``or`` only if the left side leaves it open;
# - any other condition leaves both sides to the domain: closures compute the side that is needed, whenever it is
#   needed; columns and laws need both sides to have a value everywhere.

Part = TypeVar("Part")
"""The type of what a formula, and each part of it, is turned into."""


class Domain(Protocol[Part]):
    """Says what each kind of expression is turned into, its part: a closure, a column, a law.

    A method gets the parts of the operands and returns the part of the whole expression, ``node``, which tells where it
    stands in the text.
    """

    def constant(self, value: int) -> Part:
        """The part for a number."""

    def name(self, text: str) -> Part:
        """The part for a variable or another name."""

    def fixed(self, part: Part) -> int | None:
        """The value of a part that depends on no variable; None if it depends on any."""

    def minus(self, operand: Part) -> Part:
        """The negative of an operand."""

    def negation(self, operand: Part) -> Part:
        """``not operand``."""

    def arithmetic(self, node: ast.Binary, left: Part, right: Part) -> Part:
        """``left + right`` and the like."""

    def comparison(self, node: ast.Comparison, comparator: ast.Comparator, left: Part, right: Part) -> Part:
        """``left < right`` and the like, by itself or as a link of a chain."""

    def logical(self, node: ast.Expression, logic: ast.Logic, left: Part, right: Part) -> Part:
        """``left and right`` or ``left or right``."""

    def choice(self, node: ast.Choice, condition: Part, then: Part, otherwise: Part) -> Part:
        """``if condition then .. else ..``, if the condition has no fixed value."""

    def builtin(self, node: ast.Call, arguments: Sequence[Part]) -> Part:
        """A call of a builtin function."""

    def lookup(self, node: ast.Lookup, position: Part) -> Part:
        """The entry of a table at a position."""

    def call(self, node: ast.Call, arguments: Sequence[Part]) -> Part:
        """A call of a function of the scheme; a fault in the function names the call."""


def walk(node: ast.Expression, domain: Domain[Part]) -> Part:
    """Turns a checked formula (see ``checker.check``) into what a domain makes of it."""
    match node:
        case ast.Integer(value):
            return domain.constant(value)
        case ast.Name(text):
            return domain.name(text)
        case ast.Binary():
            return domain.arithmetic(node, walk(node.left, domain), walk(node.right, domain))
        case ast.Minus(operand):
            return domain.minus(walk(operand, domain))
        case ast.Not(operand):
            return domain.negation(walk(operand, domain))
        case ast.Comparison():
            return _chain(node, domain, [walk(operand, domain) for operand in node.operands])
        case ast.Logical():
            return _logical(node, domain, walk(node.left, domain))
        case ast.Choice():
            return _choice(node, domain, walk(node.condition, domain))
        case ast.Call():
            arguments = [walk(argument, domain) for argument in node.arguments]
            return (domain.builtin if node.function.text in BUILTINS else domain.call)(node, arguments)
        case ast.Lookup():
            return domain.lookup(node, walk(node.position, domain))
        case _:
            assert_never(node)


def _chain(node: ast.Comparison, domain: Domain[Part], parts: Sequence[Part]) -> Part:
    """Turns ``a < b <= c`` into ``a < b and b <= c``; ``parts`` are what a, b, c have been turned into."""
    links = (
        domain.comparison(node, comparator, left, right)
        for comparator, left, right in zip(node.comparators, parts, parts[1:], strict=False)
    )
    return reduce(lambda holds, link: domain.logical(node, ast.Logic.AND, holds, link), links)


def _logical(node: ast.Logical, domain: Domain[Part], left: Part) -> Part:
    fixed = domain.fixed(left)
    if fixed is None:
        return domain.logical(node, node.operator, left, walk(node.right, domain))
    return left if bool(fixed) is DECISIVE[node.operator] else walk(node.right, domain)


def _choice(node: ast.Choice, domain: Domain[Part], condition: Part) -> Part:
    fixed = domain.fixed(condition)
    if fixed is None:
        return domain.choice(node, condition, walk(node.then, domain), walk(node.otherwise, domain))
    return walk(node.then if fixed else node.otherwise, domain)


LIMIT = 2**63 - 1
"""The largest absolute value of a number."""

Frame = tuple[int, ...]
"""The values of the variables in a formula, in the order in which its scope numbers them."""

Formula = Callable[[Frame], int]
"""A compiled expression: a function from the values of its variables to its own value."""


class Fault(Exception):
    """Raised by a formula that has no value, as in a division by zero.

    ``describe`` makes the diagnostic, from an `Instance` and the ``calls`` around the place, only when it is needed: a
    constant part of a formula may fail although its value is never used.
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

    def values_in(self, frame: Frame, *formulas: ast.Expression) -> Values:
        """The names in some formulas with their values; without those of formulas that have no value."""
        nodes = chain.from_iterable(map(ast.walk, formulas))
        names = dict.fromkeys(node.text for node in nodes if isinstance(node, ast.Name))
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


class _Closures(NamedTuple):
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
            raise self._fault(say.Overflow, node, frame)

        def quotient(frame: Frame) -> int:
            divisor = second(frame)
            if divisor > 0:
                return apply(first(frame), divisor)
            raise self._fault(say.BadDivisor, node.right, frame, show_expression(node.right), divisor)

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
                raise self._fault(say.BadShare, node, frame, *values)
            return apply(*values)

        formula = share if name == "share" else lambda frame: apply(*[formula(frame) for formula in formulas])
        return self._folded(formula, *arguments)

    def lookup(self, node: ast.Lookup, position: _Closure) -> _Closure:
        entries, place = self.scope.tables[node.table.text], position.formula

        def entry(frame: Frame) -> int:
            number = place(frame)
            if 0 <= number < len(entries):
                return entries[number]
            raise self._fault(say.NoSuchEntry, node, frame, node.table.text, number, len(entries))

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
        return Fault(lambda instance, calls: describe(node.span, scope.values_in(frame, node), instance, calls, *facts))

    def _folded(self, formula: Formula, *parts: _Closure) -> _Closure:
        """The formula or, if all ``parts`` are constant, its value; without a value it stays, to raise when called."""
        if any(part.constant is None for part in parts):
            return _Closure(formula, None)
        try:
            return self.constant(formula(()))
        except Fault:
            return _Closure(formula, None)
