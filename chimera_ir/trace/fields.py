"""Fields of what a rank has recorded, which may be damaged: each check raises a ValueError that says what is wrong."""

from collections.abc import Sequence
from reprlib import repr as brief
from typing import Any, TypeVar

_T = TypeVar("_T")

LONGEST = 2**63 - 1
"""The largest number in a file: nanoseconds of a clock, 292 years."""


def of_type(kind: type[_T], noun: str, value: object) -> _T:
    """The value, if it is of a type; ``noun`` names the type in the error."""
    if not isinstance(value, kind):
        raise ValueError(f"{brief(value)} is not {noun}")
    return value


def whole(value: Any, least: int = 0) -> int:
    """The value, if it is a whole number from ``least`` on."""
    if type(value) is not int or not least <= value <= LONGEST:
        raise ValueError(f"{brief(value)} is not a whole number from {least} to {LONGEST}")
    return value


def word(value: Any, allowed: Sequence[str] = ()) -> str:
    """The value, if it is a text and, unless ``allowed`` is empty, one of these."""
    if not isinstance(value, str) or (allowed and value not in allowed):
        raise ValueError(f"{brief(value)} is not {' or '.join(allowed) or 'a text'}")
    return value
