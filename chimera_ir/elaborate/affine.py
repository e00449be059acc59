"""How formulas go on for ever: a symbolic derivation, exact for every integer, that samples nothing.

A formula in m is quasi-affine if f(m + p) = f(m) + d for all integers m, with a period p > 0 and an increment d. Sums,
multiples, quotients and remainders by constants of quasi-affine formulas are quasi-affine; so is any function of
formulas that repeat (d = 0). With p, d and the p values from f(0) on, a formula is known everywhere.

The maximum and minimum of formulas that grow are quasi-affine from some m on: one of the arguments wins for good.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial, reduce
from math import gcd, lcm
from typing import assert_never

from chimera_ir.diagnostics.catalogue import endless as say
from chimera_ir.diagnostics.catalogue.values import BadDivisor, BadShare, Called, Overflow, Values
from chimera_ir.elaborate.builtins import BUILTINS, COMPARE, shareable
from chimera_ir.elaborate.evaluate import LIMIT, Fault, Scope
from chimera_ir.source import Span
from chimera_ir.syntax import ast
from chimera_ir.syntax.printer import show_expression


@dataclass(frozen=True, slots=True)
class Law:
    """A formula in m: ``f(m) = values[m % p] + increment * (m // p)`` with p the number of values.

    It holds for all integers m, but for m >= ``since`` only where a maximum or minimum of growing values took part.
    A condition has truths for values, and the increment 0.
    """

    values: tuple[int, ...]
    increment: int
    since: int = 0

    @property
    def period(self) -> int:
        """After how many m it repeats, up to the increment."""
        return len(self.values)

    @property
    def rate(self) -> Fraction:
        """How much it grows per m."""
        return Fraction(self.increment, self.period)

    @property
    def constant(self) -> bool:
        """Whether it does not depend on m."""
        return self.period == 1 and self.increment == 0

    def at(self, m: int) -> int:
        """The value for an m."""
        turn, position = divmod(m, self.period)
        return self.values[position] + self.increment * turn

    def stretched(self, period: int) -> list[int]:
        """The values of 0 .. period-1, for a multiple of the period."""
        turns = range(period // self.period)
        return [value + self.increment * turn for turn in turns for value in self.values]


COUNT = Law((0,), 1)
"""The law of m itself."""

ALWAYS = Law((True,), 0)
"""The law of a guard that is not there."""

_Fold = Callable[[Law, Law, int], Law]


def law(expression: ast.Expression, scope: Scope, variable: str, most: int) -> Law:
    """The law of a checked formula in a variable, all other names being known in the scope.

    Raises
    ------
    Fault
        If the formula is not quasi-affine, or its period is longer than ``most``.

    Examples
    --------
    >>> from chimera_ir.source import Span
    >>> here = Span(0, 0)
    >>> m, two = ast.Name("m", here), ast.Integer(2, here)
    >>> law(ast.Binary(ast.Arithmetic.DIVIDE, m, two, here), Scope({}, {}, {}), "m", 100)
    Law(values=(0, 0), increment=1, since=0)
    """
    return _Deriver(scope, most, {}).law(expression, {variable: COUNT})


def eventual_law(expression: ast.Expression, scope: Scope, variable: str, most: int) -> Law:
    """The same, of a formula that may take the maximum and minimum of growing values: its law for large m."""
    return _Deriver(scope, most, {"max": _larger, "min": _smaller}).law(expression, {variable: COUNT})


def limited(count: int, most: int, span: Span) -> int:
    """A number of micro-batches that is not more than ``most``, or else a ``Fault`` at a place in the text."""
    if count > most:
        raise Fault(partial(say.RepeatsTooLate, span, (), count=min(count, LIMIT), most=most))
    return count


class _Deriver:
    """Derives the law of a formula from those of its parts; ``unending`` are functions that may take growing values."""

    def __init__(self, scope: Scope, most: int, unending: Mapping[str, _Fold]) -> None:
        self._scope = scope
        self._most = most
        self._unending = unending

    def law(self, node: ast.Expression, bound: Mapping[str, Law]) -> Law:
        """The law of an expression in which names stand for laws, or else for what the scope says."""
        match node:
            case ast.Integer(value):
                return Law((value,), 0)
            case ast.Name(text):
                return bound[text] if text in bound else Law((self._scope.values[text],), 0)
            case ast.Minus(operand):
                return _scaled(self.law(operand, bound), -1)
            case ast.Binary():
                return self._within(node, self._binary(node, bound), bound)
            case ast.Comparison():
                return self._comparison(node, bound)
            case ast.Not(operand):
                return self._pointwise(node, operator.not_, [self.law(operand, bound)])
            case ast.Logical():
                return self._logical(node, bound)
            case ast.Choice():
                return self._choice(node, bound)
            case ast.Call():
                return self._call(node, bound)
            case _:
                assert_never(node)

    def _binary(self, node: ast.Binary, bound: Mapping[str, Law]) -> Law:
        left, right = self.law(node.left, bound), self.law(node.right, bound)
        match node.operator:
            case ast.Arithmetic.ADD:
                return self._sum(node, left, right)
            case ast.Arithmetic.SUBTRACT:
                return self._sum(node, left, _scaled(right, -1))
            case ast.Arithmetic.MULTIPLY:
                return self._product(node, left, right, bound)
            case ast.Arithmetic.DIVIDE:
                return self._division(node, left, right, bound, remainder=False)
            case ast.Arithmetic.REMAINDER:
                return self._division(node, left, right, bound, remainder=True)
            case _:
                assert_never(node.operator)

    def _within(self, node: ast.Expression, found: Law, bound: Mapping[str, Law]) -> Law:
        """The law, if its numbers have 64 bits."""
        if max(abs(found.increment), max(found.values), -min(found.values)) > LIMIT:
            raise Fault(partial(Overflow, node.span, self._values(node, bound)))
        return found

    def _sum(self, node: ast.Expression, left: Law, right: Law) -> Law:
        period = self._period(node, [left, right])
        values = map(operator.add, left.stretched(period), right.stretched(period))
        return _reduced(values, int((left.rate + right.rate) * period), max(left.since, right.since))

    def _product(self, node: ast.Binary, left: Law, right: Law, bound: Mapping[str, Law]) -> Law:
        for factor, other in ((left, right), (right, left)):
            if factor.constant:
                return _scaled(other, factor.values[0])
        if left.increment or right.increment:
            texts = show_expression(node.left), show_expression(node.right)
            raise Fault(
                partial(say.GrowingProduct, node.span, self._values(node, bound), left=texts[0], right=texts[1])
            )
        return self._pointwise(node, operator.mul, [left, right])

    def _division(self, node: ast.Binary, left: Law, right: Law, bound: Mapping[str, Law], *, remainder: bool) -> Law:
        text, values = show_expression(node.right), self._values(node.right, bound)
        if not right.constant:
            raise Fault(partial(say.ChangingDivisor, node.right.span, values, divisor=text))
        divisor = right.values[0]
        if divisor < 1:
            raise Fault(partial(BadDivisor, node.right.span, values, divisor=text, value=divisor))
        times = divisor // gcd(divisor, left.increment)
        period = limited(left.period * times, self._most, node.span)
        dividends = left.stretched(period)
        if remainder:
            return _reduced((value % divisor for value in dividends), 0, left.since)
        return _reduced((value // divisor for value in dividends), left.increment * times // divisor, left.since)

    def _comparison(self, node: ast.Comparison, bound: Mapping[str, Law]) -> Law:
        laws = [self.law(operand, bound) for operand in node.operands]
        truth = ALWAYS
        for comparator, left, right in zip(node.comparators, laws, laws[1:], strict=False):
            difference = self._sum(node, left, _scaled(right, -1))
            if difference.increment:
                raise Fault(partial(say.GrowingCondition, node.span, self._values(node, bound)))
            holds = _reduced((COMPARE[comparator](value, 0) for value in difference.values), 0, difference.since)
            truth = self._pointwise(node, _both, [truth, holds])
        return truth

    def _logical(self, node: ast.Logical, bound: Mapping[str, Law]) -> Law:
        decisive, combined = _LOGIC[node.operator]
        left = self.law(node.left, bound)
        if left.constant:
            return left if bool(left.values[0]) is decisive else self.law(node.right, bound)
        return self._pointwise(node, combined, [left, self.law(node.right, bound)])

    def _choice(self, node: ast.Choice, bound: Mapping[str, Law]) -> Law:
        condition = self.law(node.condition, bound)
        if condition.constant:
            return self.law(node.one if condition.values[0] else node.other, bound)
        one, other = self.law(node.one, bound), self.law(node.other, bound)
        if one.rate != other.rate:
            values, rates = self._values(node, bound), (str(one.rate), str(other.rate))
            raise Fault(partial(say.BranchesDrift, node.span, values, one=rates[0], other=rates[1]))
        return self._along(node, lambda truth, yes, no: yes if truth else no, [condition, one, other], one.rate)

    def _call(self, node: ast.Call, bound: Mapping[str, Law]) -> Law:
        name = node.function.text
        arguments = [self.law(argument, bound) for argument in node.arguments]
        if name in BUILTINS:
            return self._builtin(node, arguments, bound)
        function = self._scope.functions[name].definition
        try:
            parameters = (word.text for word in function.parameters)
            return self.law(function.body, dict(zip(parameters, arguments, strict=True)))
        except Fault as fault:
            raise fault.through(Called(name, tuple(map(show_expression, node.arguments)), node.span)) from None

    def _builtin(self, node: ast.Call, arguments: Sequence[Law], bound: Mapping[str, Law]) -> Law:
        name, values = node.function.text, self._values(node, bound)
        if not any(argument.increment for argument in arguments):
            return self._pointwise(node, partial(self._applied, node, values), arguments)
        if name not in self._unending:
            raise Fault(partial(say.GrowingArgument, node.span, values, function=name))
        fold, period = self._unending[name], self._period(node, arguments)
        return reduce(lambda one, other: fold(one, other, period), arguments)

    def _applied(self, node: ast.Call, values: Values, *arguments: int) -> int:
        name = node.function.text
        if name == "share" and not shareable(*arguments):
            total, parts, part = arguments
            raise Fault(partial(BadShare, node.span, values, total=total, parts=parts, part=part))
        return BUILTINS[name].apply(*arguments)

    def _pointwise(self, node: ast.Expression, apply: Callable[..., int], laws: Sequence[Law]) -> Law:
        """The law of a function of laws that repeat."""
        return self._along(node, apply, laws, Fraction(0))

    def _along(self, node: ast.Expression, apply: Callable[..., int], laws: Sequence[Law], rate: Fraction) -> Law:
        """The law of a function of laws that is known to grow at a rate."""
        period = self._period(node, laws)
        values = map(apply, *(each.stretched(period) for each in laws))
        return _reduced(values, int(rate * period), max(each.since for each in laws))

    def _period(self, node: ast.Expression, laws: Sequence[Law]) -> int:
        return limited(lcm(*(each.period for each in laws)), self._most, node.span)

    def _values(self, node: ast.Expression, bound: Mapping[str, Law]) -> Values:
        """The names in an expression that have one value."""
        names = dict.fromkeys(each.text for each in ast.walk(node) if isinstance(each, ast.Name))
        laws = {name: self.law(ast.Name(name, node.span), bound) for name in names}
        return tuple((name, known.values[0]) for name, known in laws.items() if known.constant)


def _both(one: int, other: int) -> bool:
    return bool(one and other)


def _either(one: int, other: int) -> bool:
    return bool(one or other)


_LOGIC = {ast.Logic.AND: (False, _both), ast.Logic.OR: (True, _either)}
"""The truth of the left side that decides, and what both sides mean where neither decides."""


def _scaled(one: Law, factor: int) -> Law:
    return _reduced((factor * value for value in one.values), factor * one.increment, one.since)


def _larger(one: Law, other: Law, period: int) -> Law:
    """What the maximum of two laws is for large m; ``period`` is common to both."""
    since = max(one.since, other.since)
    if one.rate == other.rate:
        values = map(max, one.stretched(period), other.stretched(period))
        return _reduced(values, int(one.rate * period), since)
    high, low = (one, other) if one.rate > other.rate else (other, one)
    lead = map(operator.sub, high.stretched(period), low.stretched(period))
    gain = int((high.rate - low.rate) * period)
    return replace(high, since=max(since, *(_ahead(m, value, gain, period) for m, value in enumerate(lead))))


def _ahead(m: int, lead: int, gain: int, period: int) -> int:
    """From where on a lead is not negative that is ``lead`` at m and gains ``gain`` > 0 with every period."""
    turns = -(lead // gain)
    return m + (turns - 1) * period + 1


def _smaller(one: Law, other: Law, period: int) -> Law:
    return _scaled(_larger(_scaled(one, -1), _scaled(other, -1), period), -1)


def _reduced(values: Iterable[int], increment: int, since: int) -> Law:
    """The law with these values, as short as can be: of two periods the greatest common divisor is one, too."""
    known = tuple(values)
    for factor in _prime_factors(len(known)):
        shorter, rest = len(known) // factor, increment % factor
        if not rest and all(b - a == increment // factor for a, b in zip(known, known[shorter:], strict=False)):
            known, increment = known[:shorter], increment // factor
    return Law(known, increment, since)


def _prime_factors(number: int) -> Iterator[int]:
    """With multiplicity, ascending."""
    factor = 2
    while factor * factor <= number:
        while number % factor == 0:
            yield factor
            number //= factor
        factor += 1
    if number > 1:
        yield number
