"""Numbers before nouns, in the singular or the plural, and lists of things."""

import re
from collections.abc import Iterable
from fractions import Fraction


def counted(number: int | Fraction, noun: str) -> str:
    """A number of things, with separators of thousands if it is an integer.

    Examples
    --------
    >>> counted(1, "micro-batch"), counted(3, "copy"), counted(1024, "more stage"), counted(Fraction(9, 2), "copy")
    ('1 micro-batch', '3 copies', '1,024 more stages', '9/2 copies')
    """
    digits = f"{number:,}" if isinstance(number, int) else str(number)
    return f"{digits} {noun if number == 1 else plural(noun)}"


def listed(things: Iterable[object], conjunction: str = "and") -> str:
    """Things one after another, with a conjunction before the last.

    Examples
    --------
    >>> listed([0]), listed([0, 1, 3]), listed(["left", "right"], "or")
    ('0', '0, 1 and 3', 'left or right')
    """
    *most, last = map(str, things)
    return f"{', '.join(most)} {conjunction} {last}" if most else last


def and_more(count: int) -> str:
    """Words that are added to a thing that stands for ``count`` equal ones; empty if ``count`` is 1.

    Examples
    --------
    >>> and_more(3), and_more(1)
    (' (and 2 more like it)', '')
    """
    return f" (and {count - 1} more like it)" if count > 1 else ""


def plural(noun: str) -> str:
    """The plural of a noun, or of the last of some words."""
    if re.search("[^aeiou]y$", noun):
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("ch", "sh", "s", "x")) else "s")
