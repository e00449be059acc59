"""Exact numbers, and times, written for people."""

from enum import Enum
from fractions import Fraction
from typing import assert_never

_TIMES = ((1, "s"), (1000, "ms"), (1_000_000, "us"))
"""How many of a unit there are in a second, the largest unit first."""


def decimal(value: Fraction) -> str:
    """A number for people: an integer in full, otherwise six significant digits.

    Examples
    --------
    >>> decimal(Fraction(33)), decimal(Fraction(1, 8)), decimal(Fraction(100, 3))
    ('33', '0.125', '33.3333')
    """
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def exact(value: Fraction) -> str:
    """A number as its user would write it: a decimal where it has one of six digits, else a fraction.

    Examples
    --------
    >>> exact(Fraction(1, 8)), exact(Fraction(5, 3))
    ('0.125', '5/3')
    """
    return decimal(value) if Fraction(decimal(value)) == value else str(value)


def seconds(value: float) -> str:
    """A time with four digits.

    Examples
    --------
    >>> seconds(1.9618), seconds(0.0004344), seconds(0.0)
    ('1.962 s', '434.4 us', '0')
    """
    number, unit = time_unit(value)
    return f"{value * number:.4g} {unit}" if value else "0"


def time_unit(value: float) -> tuple[int, str]:
    """The largest unit of which a time of so many seconds has at least one, after how many of it are in a second."""
    return next((unit for unit in _TIMES if value * unit[0] >= 1), _TIMES[-1])


class Unit(Enum):
    """What times are counted in: the unit of the costs, which is the user's choice, or seconds."""

    COST = None
    SECOND = "s"

    def show(self, time: Fraction) -> str:
        """A time for people."""
        match self:
            case Unit.COST:
                return decimal(time)
            case Unit.SECOND:
                return seconds(float(time))
            case _:
                assert_never(self)

    def axis(self, span: Fraction) -> tuple[int, str]:
        """What numbers along a picture of so much time count: how many of it make one of this unit, and its name."""
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
