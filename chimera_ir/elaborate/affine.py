"""Finds quasi-affine laws of formulas: derived from the formula alone, and exact for every integer.

A formula in m is quasi-affine if f(m + p) = f(m) + d for all integers m, with a period p > 0 and an increment d. With
p, d and the values f(0) .. f(p-1), the formula is given everywhere:

    2*m + 1         values 1         increment 2
    m / 2           values 0, 0      increment 1
    m % 3           values 0, 1, 2   increment 0
    max(0, m - 3)   values -3        increment 1, for m >= 3

Sums, multiples, and quotients and remainders by constants, of quasi-affine formulas are quasi-affine; so is any
function of formulas that repeat (d = 0). The maximum and minimum of growing formulas are quasi-affine from some m on,
where one of the arguments stays ahead.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial, reduce
from math import gcd, lcm
from typing import assert_never, cast

from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.catalogue.values import Called, Values
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.elaborate.evaluate import BUILTINS, COMPARE, LIMIT, LOGIC, Fault, Scope, shareable, walk
from chimera_ir.source import Span
from chimera_ir.syntax import ast
from chimera_ir.syntax.formatter import show_expression


@dataclass(frozen=True, slots=True)
class Law:
    """The law of a formula in m: ``f(m) = values[m % p] + increment * (m // p)`` with p the number of values.

    It holds for all integers m or, if it comes from a maximum or minimum of growing values, for m >= ``since``. The
    values of a condition are truths, and its increment is 0.
    """

    values: tuple[int, ...]
    increment: int
    since: int = 0

    @property
    def period(self) -> int:
        """The period p, with which f(m + p) = f(m) + ``increment``."""
        return len(self.values)

    @property
    def rate(self) -> Fraction:
        """The growth of the values from one m to the next, on average over a period."""
        return Fraction(self.increment, self.period)

    @property
    def constant(self) -> bool:
        """Whether the value is the same for every m."""
        return self.period == 1 and self.increment == 0

    def at(self, m: int) -> int:
        """The value f(m), by the law, for any integer m."""
        turn, position = divmod(m, self.period)
        return self.values[position] + self.increment * turn

    def stretched(self, period: int) -> list[int]:
        """Returns the values f(0) .. f(period-1), where ``period`` is any multiple of the law's own period."""
        turns = range(period // self.period)
        return [value + self.increment * turn for turn in turns for value in self.values]


COUNT = Law((0,), 1)
"""The law of m itself."""

ALWAYS = Law((True,), 0)
"""The law of a guard that holds for every m: that of an operation line without a guard."""

_Fold = Callable[[Law, Law, int], Law]


def law(expression: ast.Expression, scope: Scope, variable: str, most: int) -> Law:
    """Returns the law of a checked formula in the name ``variable``; ``scope`` has the meaning of all other names.

    Raises `Fault` if the formula is not quasi-affine, or its period is longer than ``most``.

    Examples
    --------
    >>> from chimera_ir.source import Span
    >>> here = Span(0, 0)
    >>> m, two = ast.Name("m", span=here), ast.Integer(2, span=here)
    >>> law(ast.Binary(ast.Arithmetic.DIVIDE, m, two, span=here), Scope({}, {}, {}), "m", 100)
    Law(values=(0, 0), increment=1, since=0)
    """
    return walk(expression, _Laws(scope, {variable: COUNT}, most, {}))


def eventual_law(expression: ast.Expression, scope: Scope, variable: str, most: int) -> Law:
    """The law that a formula has for large m, as `law`; arguments of ``max`` and ``min`` may grow with m."""
    return walk(expression, _Laws(scope, {variable: COUNT}, most, {"max": _larger, "min": _smaller}))


def limited(count: int, most: int, span: Span) -> int:
    """Returns ``count``, a number of micro-batches; raises a ``Fault`` at ``span`` if it is more than ``most``."""
    if count > most:
        raise Fault(partial(say.RepeatsTooLate, span, (), count=min(count, LIMIT), most=most))
    return count


@dataclass(frozen=True, slots=True)
class _Laws:
    """The domain (see `evaluate`) that turns each part of a formula into its law, with periods of at most ``most``.

    ``names`` has the laws of the variable, or of the parameters within a function; ``of_growing`` has the builtins that
    may take growing values, each as a function from two laws to the law of the result.
    """

    scope: Scope
    names: Mapping[str, Law]
    most: int
    of_growing: Mapping[str, _Fold]

    def constant(self, value: int) -> Law:
        return Law((value,), 0)

    def name(self, text: str) -> Law:
        if text in self.names:
            return self.names[text]
        formula = self.scope.formulas.get(text)
        return self.constant(self.scope.values[text]) if formula is None else walk(formula, self)

    def fixed(self, part: Law) -> int | None:
        return part.values[0] if part.constant and not part.since else None

    def minus(self, operand: Law) -> Law:
        return _scaled(operand, -1)

    def negation(self, operand: Law) -> Law:
        return _reduced(map(operator.not_, operand.values), 0, operand.since)

    def arithmetic(self, node: ast.Binary, left: Law, right: Law) -> Law:
        combined = self._arithmetic(node, left, right)
        if max(abs(combined.increment), max(combined.values), -min(combined.values)) > LIMIT:
            raise self._fault(say.Overflow, node)
        return combined

    def comparison(self, node: ast.Comparison, comparator: ast.Comparator, left: Law, right: Law) -> Law:
        difference = self._sum(node, left, _scaled(right, -1))
        if difference.increment:
            raise self._fault(say.GrowingCondition, node)
        return _reduced((COMPARE[comparator](value, 0) for value in difference.values), 0, difference.since)

    def logical(self, node: ast.Expression, logic: ast.Logic, left: Law, right: Law) -> Law:
        return self._pointwise(node, LOGIC[logic], [left, right])

    def choice(self, node: ast.Choice, condition: Law, then: Law, otherwise: Law) -> Law:
        if condition.constant:
            return _later(then if condition.values[0] else otherwise, condition)
        if then.rate != otherwise.rate:
            rates = str(then.rate), str(otherwise.rate)
            raise self._fault(say.BranchesDrift, node, then=rates[0], otherwise=rates[1])
        return self._along(node, lambda holds, yes, no: yes if holds else no, [condition, then, otherwise], then.rate)

    def builtin(self, node: ast.Call, arguments: Sequence[Law]) -> Law:
        name = node.function.text
        if not any(argument.increment for argument in arguments):
            return self._pointwise(node, partial(self._applied, node), arguments)
        if name not in self.of_growing:
            raise self._fault(
                say.GrowingExtreme if name in ("min", "max") else say.GrowingArgument, node, function=name
            )
        fold, period = self.of_growing[name], self._period(node, arguments)
        return reduce(lambda extreme, argument: fold(extreme, argument, period), arguments)

    def lookup(self, node: ast.Lookup, position: Law) -> Law:
        table = node.table.text
        if position.increment:
            raise self._fault(say.GrowingPosition, node, table=table)
        return self._pointwise(node, partial(self._entry, node, self.scope.tables[table]), [position])

    def call(self, node: ast.Call, arguments: Sequence[Law]) -> Law:
        function = self.scope.functions[node.function.text]
        key = tuple(arguments), self.most, bool(self.of_growing)
        try:
            if key not in function.laws:
                within = replace(self, names=function.bound(arguments))
                function.laws[key] = walk(function.definition.body, within)
            return cast("Law", function.laws[key])
        except Fault as fault:
            texts = tuple(map(show_expression, node.arguments))
            raise fault.through(Called(node.function.text, texts, node.span)) from None

    def _arithmetic(self, node: ast.Binary, left: Law, right: Law) -> Law:
        match node.operator:
            case ast.Arithmetic.ADD:
                return self._sum(node, left, right)
            case ast.Arithmetic.SUBTRACT:
                return self._sum(node, left, _scaled(right, -1))
            case ast.Arithmetic.MULTIPLY:
                return self._product(node, left, right)
            case ast.Arithmetic.DIVIDE:
                return self._quotient(node, left, right)
            case ast.Arithmetic.REMAINDER:
                return self._sum(node, left, _scaled(self._quotient(node, left, right), -right.values[0]))
            case _:
                assert_never(node.operator)

    def _sum(self, node: ast.Expression, left: Law, right: Law) -> Law:
        period = self._period(node, [left, right])
        values = map(operator.add, left.stretched(period), right.stretched(period))
        return _reduced(values, int((left.rate + right.rate) * period), max(left.since, right.since))

    def _product(self, node: ast.Binary, left: Law, right: Law) -> Law:
        for factor, other in ((left, right), (right, left)):
            if factor.constant:
                return _later(_scaled(other, factor.values[0]), factor)
        if left.increment or right.increment:
            texts = show_expression(node.left), show_expression(node.right)
            raise self._fault(say.GrowingProduct, node, left=texts[0], right=texts[1])
        return self._pointwise(node, operator.mul, [left, right])

    def _quotient(self, node: ast.Binary, left: Law, right: Law) -> Law:
        text = show_expression(node.right)
        if not right.constant:
            raise self._fault(say.ChangingDivisor, node.right, divisor=text)
        divisor = right.values[0]
        if divisor < 1:
            raise self._fault(say.BadDivisor, node.right, divisor=text, value=divisor)
        times = divisor // gcd(divisor, left.increment)
        period = limited(left.period * times, self.most, node.span)
        quotients = (value // divisor for value in left.stretched(period))
        return _reduced(quotients, left.increment * times // divisor, max(left.since, right.since))

    def _applied(self, node: ast.Call, *arguments: int) -> int:
        name = node.function.text
        if name == "share" and not shareable(*arguments):
            total, parts, part = arguments
            raise self._fault(say.BadShare, node, total=total, parts=parts, part=part)
        return BUILTINS[name].apply(*arguments)

    def _entry(self, node: ast.Lookup, entries: Sequence[int], position: int) -> int:
        if not 0 <= position < len(entries):
            raise self._fault(say.NoSuchEntry, node, table=node.table.text, position=position, entries=len(entries))
        return entries[position]

    def _pointwise(self, node: ast.Expression, apply: Callable[..., int], laws: Sequence[Law]) -> Law:
        return self._along(node, apply, laws, Fraction(0))

    def _along(self, node: ast.Expression, apply: Callable[..., int], laws: Sequence[Law], rate: Fraction) -> Law:
        """The law of what ``apply`` gives at each m, which grows by ``rate`` on average."""
        period = self._period(node, laws)
        values = map(apply, *(part.stretched(period) for part in laws))
        return _reduced(values, int(rate * period), max(part.since for part in laws))

    def _period(self, node: ast.Expression, laws: Sequence[Law]) -> int:
        return limited(lcm(*(part.period for part in laws)), self.most, node.span)

    def _fault(self, describe: Callable[..., Diagnostic], node: ast.Expression, **facts: int | str) -> Fault:
        return Fault(partial(describe, node.span, self._values(node), **facts))

    def _values(self, node: ast.Expression) -> Values:
        names = dict.fromkeys(part.text for part in ast.walk(node) if isinstance(part, ast.Name))
        values = ((name, self.fixed(self.name(name))) for name in names)
        return tuple((name, value) for name, value in values if value is not None)


def _later(part: Law, bound: Law) -> Law:
    return replace(part, since=max(part.since, bound.since))


def _scaled(part: Law, factor: int) -> Law:
    return _reduced((factor * value for value in part.values), factor * part.increment, part.since)


def _larger(left: Law, right: Law, period: int) -> Law:
    """The law of the maximum of two laws for large m; ``period`` is a multiple of both periods."""
    since = max(left.since, right.since)
    if left.rate == right.rate:
        values = map(max, left.stretched(period), right.stretched(period))
        return _reduced(values, int(left.rate * period), since)
    # The law that grows faster wins from the m on at which it has caught up at every place of the period.
    high, low = (left, right) if left.rate > right.rate else (right, left)
    lead = map(operator.sub, high.stretched(period), low.stretched(period))
    gain = int((high.rate - low.rate) * period)
    return replace(high, since=max(since, *(_ahead(m, value, gain, period) for m, value in enumerate(lead))))


def _ahead(m: int, lead: int, gain: int, period: int) -> int:
    """The first number from which on ``lead`` at ``m``, plus ``gain`` > 0 for each period, is never negative."""
    turns = -(lead // gain)
    return m + (turns - 1) * period + 1


def _smaller(left: Law, right: Law, period: int) -> Law:
    return _scaled(_larger(_scaled(left, -1), _scaled(right, -1), period), -1)


def _reduced(values: Iterable[int], increment: int, since: int) -> Law:
    """Returns the law with these values, increment and start, with the shortest period that gives the same formula."""
    whole = tuple(values)
    size = len(whole)
    period = next(
        period
        for period in range(1, size + 1)
        if size % period == 0 == increment * period % size
        if all(b - a == increment * period // size for a, b in zip(whole, whole[period:], strict=False))
    )
    return Law(whole[:period], increment * period // size, since)
