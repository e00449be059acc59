"""Exact numbers and times as text for people."""

from collections.abc import Collection
from enum import Enum
from fractions import Fraction
from typing import TypeVar, assert_never

_Content = TypeVar("_Content")

_TIMES = ((1, "s"), (1000, "ms"), (1_000_000, "us"))
"""The number of each unit in a second, the largest unit first."""


def decimal(value: Fraction) -> str:
    """A number for people: an integer in full, otherwise six significant digits.

    Examples
    --------
    >>> decimal(Fraction(33)), decimal(Fraction(1, 8)), decimal(Fraction(100, 3))
    ('33', '0.125', '33.3333')
    """
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def exact(value: Fraction) -> str:
    """A number as a user would write it: a decimal if six digits show it exactly, else a fraction.

    Examples
    --------
    >>> exact(Fraction(1, 8)), exact(Fraction(5, 3))
    ('0.125', '5/3')
    """
    return decimal(value) if Fraction(decimal(value)) == value else str(value)


def seconds(value: float) -> str:
    """A time in seconds as text, with four digits and a fitting unit.

    Examples
    --------
    >>> seconds(1.9618), seconds(0.0004344), seconds(0.0)
    ('1.962 s', '434.4 us', '0')
    """
    factor, unit = time_unit(value)
    return f"{value * factor:.4g} {unit}" if value else "0"


def rounded(content: _Content) -> _Content:
    """Rounds all floats in the content of a JSON file to twelve digits; further ones are rounding errors of sums.

    Examples
    --------
    >>> rounded({"T": 1.3970000000000011, "counts": [1, 0.1 + 0.2]})
    {'T': 1.397, 'counts': [1, 0.3]}
    """
    match content:
        case float():
            return float(f"{content:.12g}")  # type: ignore[return-value]
        case dict():
            return {name: rounded(value) for name, value in content.items()}  # type: ignore[return-value]
        case list():
            return [rounded(value) for value in content]  # type: ignore[return-value]
        case _:
            return content


def number(value: Fraction) -> int | float:
    """A number of a JSON file: an integer where it is integral, else a float."""
    return value.numerator if value.denominator == 1 else float(value)


def time_unit(value: float) -> tuple[int, str]:
    """Chooses seconds, milliseconds or microseconds: the largest unit that is not longer than ``value`` seconds.

    Returns how many of the unit make a second, and its name. A shorter time gets microseconds.
    """
    return next((unit for unit in _TIMES if value * unit[0] >= 1), _TIMES[-1])


class Unit(Enum):
    """The unit of times: the unit of the costs, which is the user's choice, or seconds."""

    COST = None
    SECOND = "s"

    def show(self, time: Fraction) -> str:
        """A time in this unit as text."""
        match self:
            case Unit.COST:
                return decimal(time)
            case Unit.SECOND:
                return seconds(float(time))
            case _:
                assert_never(self)

    def show_range(self, times: Collection[Fraction]) -> str:
        """The smallest and the largest of some times as text; one text if both are equal."""
        least, most = self.show(min(times)), self.show(max(times))
        return least if least == most else f"{least} to {most}"

    def axis(self, span: Fraction) -> tuple[int, str]:
        """Chooses the unit of a picture's time axis for times up to ``span``.

        Returns how many of the chosen unit make one of this unit, and its name.
        """
        match self:
            case Unit.COST:
                return 1, ""
            case Unit.SECOND:
                return time_unit(float(span))
            case _:
                assert_never(self)


def percent(ratio: Fraction) -> str:
    """A share as a percentage with one decimal."""
    return f"{float(100 * ratio):.1f}%"
