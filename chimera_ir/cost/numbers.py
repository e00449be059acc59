"""Exact numbers, written for people."""

from fractions import Fraction


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


def percent(ratio: Fraction) -> str:
    """A share as a percentage with one decimal."""
    return f"{float(100 * ratio):.1f}%"
