"""Random formulas as text, and what they are worth by an evaluation that shares nothing with the compiler's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import strategies as st

LARGEST = 2**63 - 1


class Undefined(Exception):
    """A formula has no value."""


Names = Mapping[str, Any]
Value = Callable[[Names], int]


@dataclass(frozen=True)
class Formula:
    """A formula in brackets, so that it may stand anywhere, and its value once its names have values."""

    text: str
    value: Value

    def __repr__(self) -> str:
        return self.text


def _within(value: int) -> int:
    if abs(value) > LARGEST:
        raise Undefined
    return value


def _quotient(dividend: int, divisor: int) -> tuple[int, int]:
    if divisor < 1:
        raise Undefined
    return divmod(dividend, divisor)


def _share(total: int, parts: int, part: int) -> int:
    if total < 0 or not 0 <= part < parts:
        raise Undefined
    each, rest = divmod(total, parts)
    return each + (1 if part < rest else 0)


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: _within(a + b),
    "-": lambda a, b: _within(a - b),
    "*": lambda a, b: _within(a * b),
    "/": lambda a, b: _quotient(a, b)[0],
    "%": lambda a, b: _quotient(a, b)[1],
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<=": lambda a, b: a <= b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    ">": lambda a, b: a > b,
}
_FUNCTIONS: dict[str, Callable[..., int]] = {
    "min": lambda *values: sorted(values)[0],
    "max": lambda *values: sorted(values)[-1],
    "abs": lambda a: a if a > 0 else -a,
    "share": _share,
}


def _integer(value: int) -> Formula:
    return Formula(str(value), lambda names: value)


def _name(name: str) -> Formula:
    return Formula(name, lambda names: names[name])


def _negative(operand: Formula) -> Formula:
    return Formula(f"(-{operand.text})", lambda names: -operand.value(names))


def _binary(symbol: str, left: Formula, right: Formula) -> Formula:
    apply = _ARITHMETIC[symbol]
    return Formula(f"({left.text} {symbol} {right.text})", lambda names: apply(left.value(names), right.value(names)))


def _call(name: str, arguments: tuple[Formula, ...]) -> Formula:
    apply = _FUNCTIONS[name]
    text = f"{name}({', '.join(argument.text for argument in arguments)})"
    return Formula(text, lambda names: apply(*[argument.value(names) for argument in arguments]))


def _choice(condition: Formula, one: Formula, other: Formula) -> Formula:
    def value(names: Names) -> int:
        return one.value(names) if condition.value(names) else other.value(names)

    return Formula(f"(if {condition.text} then {one.text} else {other.text})", value)


def _comparison(operands: tuple[Formula, ...], symbols: tuple[str, ...]) -> Formula:
    """A chain, which is read from left to right and no further than needed."""

    def value(names: Names) -> bool:
        left = operands[0].value(names)
        for symbol, operand in zip(symbols, operands[1:], strict=True):
            right = operand.value(names)
            if not _COMPARISONS[symbol](left, right):
                return False
            left = right
        return True

    rest = "".join(f" {symbol} {operand.text}" for symbol, operand in zip(symbols, operands[1:], strict=True))
    return Formula(f"({operands[0].text}{rest})", value)


def _opposite(operand: Formula) -> Formula:
    return Formula(f"(not {operand.text})", lambda names: not operand.value(names))


def _both(left: Formula, right: Formula) -> Formula:
    return Formula(f"({left.text} and {right.text})", lambda names: left.value(names) and right.value(names))


def _either(left: Formula, right: Formula) -> Formula:
    return Formula(f"({left.text} or {right.text})", lambda names: left.value(names) or right.value(names))


_SMALL = st.integers(0, 3).map(_integer)
_LARGE = st.sampled_from([2**31, 2**62, LARGEST - 1, LARGEST]).map(_integer)


@cache
def numbers(*names: str) -> st.SearchStrategy[Formula]:
    """Formulas of numbers in some names, with every operator and every builtin function.

    Some have a name only in a branch that is dead, so that their value is known without that of the name.
    """
    known = [st.just(_name(name)) for name in names]
    hidden = st.builds(_choice, _conditions_on(_SMALL), _SMALL, st.one_of(known))
    return st.recursive(st.one_of(_SMALL, _LARGE, hidden, *known), _larger, max_leaves=12)


def around(*parts: st.SearchStrategy[Formula]) -> st.SearchStrategy[Formula]:
    """Formulas of numbers that are made of some others and of small numbers: few lack a value."""
    leaves = st.one_of(*parts, _SMALL)
    sums = st.builds(_binary, st.sampled_from(["+", "-"]), leaves, leaves)
    return st.recursive(leaves | sums, _larger, max_leaves=6)


@cache
def variable(*names: str) -> st.SearchStrategy[Formula]:
    """Any of some names."""
    return st.sampled_from(names).map(_name)


def call_of_function(name: str, parameters: tuple[str, ...], arguments: tuple[Formula, ...]) -> Formula:
    """A call of a function of the scheme, which reads its parameters and D; all arguments have a value first.

    The body of the function is a formula, the value of its name.
    """

    def value(names: Names) -> int:
        values = [argument.value(names) for argument in arguments]
        return names[name].value({"D": names["D"], **dict(zip(parameters, values, strict=True))})

    return Formula(f"{name}({', '.join(argument.text for argument in arguments)})", value)


@cache
def conditions(*names: str) -> st.SearchStrategy[Formula]:
    """The same of conditions."""
    return _conditions_on(numbers(*names))


def _larger(inner: st.SearchStrategy[Formula]) -> st.SearchStrategy[Formula]:
    several = st.lists(inner, min_size=2, max_size=3).map(tuple)
    return st.one_of(
        st.builds(_binary, st.sampled_from([*_ARITHMETIC, "/", "%"]), inner, inner),
        st.builds(_choice, _conditions_on(inner), inner, inner),
        st.builds(_negative, inner),
        st.builds(_call, st.sampled_from(["min", "max"]), several),
        st.builds(_call, st.just("abs"), st.tuples(inner)),
        st.builds(_call, st.just("share"), st.tuples(inner, inner, inner)),
    )


def _conditions_on(inner: st.SearchStrategy[Formula]) -> st.SearchStrategy[Formula]:
    symbols = st.sampled_from([*_COMPARISONS])
    pairs = st.builds(_comparison, st.tuples(inner, inner), st.tuples(symbols))
    chains = st.builds(_comparison, st.tuples(inner, inner, inner), st.tuples(symbols, symbols))
    simple = pairs | chains
    return st.one_of(
        simple, st.builds(_opposite, simple), st.builds(_both, simple, simple), st.builds(_either, simple, simple)
    )
