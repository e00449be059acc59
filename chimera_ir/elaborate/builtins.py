"""The builtin functions of the scheme language, and the meaning of its operators."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from chimera_ir.syntax.ast import Arithmetic, Comparator, Logic


@dataclass(frozen=True, slots=True)
class Builtin:
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
