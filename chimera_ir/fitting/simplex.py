"""An integer program with few unknowns and many inequalities: branch and bound over the dual simplex method.

minimize    w * |x|             the unknowns x are whole numbers; w > 0
such that   a * x >= b          for every inequality (a, b)

At x = 0 nothing is paid, so the start is dual feasible; each pivot repairs a violated inequality. Only violated ones
are in the tableau; one that holds with room to spare is dropped, and comes back if it is violated again. Arithmetic is
in floats; the result is rounded and checked exactly.
"""

from collections.abc import Sequence
from fractions import Fraction
from heapq import heappop, heappush
from math import floor, lcm
from typing import NamedTuple

_TOLERANCE = 1e-7
_WHOLE = 1e-5
"""The distance from a whole number up to which a value counts as one."""

_AT_ONCE = 8
"""Violated inequalities that join the tableau before it is repaired."""

_PIVOTS = 600
"""The most pivots at a node; a program that needs more counts as one without a solution."""

_DENOMINATORS, _LARGEST = 12, 60
"""The largest denominator of a number of a solution that is multiplied, and the largest multiple."""

_WORK = 2_000
"""The most nodes of the search for whole numbers, times the number of unknowns."""


class Inequality(NamedTuple):
    """``sum(factors[n] * x[n]) >= least``; unknowns that are left out have the factor 0."""

    factors: tuple[tuple[int, int], ...]
    least: int = 1

    def room(self, values: Sequence[float]) -> float:
        """Amount above the least; negative if the inequality is violated."""
        return sum(factor * values[name] for name, factor in self.factors) - self.least


def least_solution(inequalities: Sequence[Inequality], weights: Sequence[int]) -> list[int] | None:
    """Whole numbers with the least weighted sum of sizes that satisfy all inequalities.

    None if there are none. If the search for whole numbers ends early, multiples of the least fractions: where every
    ``least`` is 0 or more, a multiple of a solution is one, too.

    Examples
    --------
    >>> least_solution([Inequality(((0, 1), (1, -1))), Inequality(((1, 2),))], [1, 1])
    [2, 1]
    """
    fractions: list[int] | None = None
    nodes: list[tuple[float, int, tuple[Inequality, ...], list[float]]] = []
    pending: list[tuple[Inequality, ...]] = [()]
    for number in range(_WORK // len(weights) + 1):
        # Relax the branches of the last node, then take the node with the least price: if it is whole, it is the best.
        for branches in pending:
            if (values := _relaxed([*branches, *inequalities], weights)) is not None:
                price = sum(weight * abs(value) for weight, value in zip(weights, values, strict=True))
                heappush(nodes, (price, len(nodes) + 2 * number, branches, values))
        if not nodes:
            break
        _, _, branches, values = heappop(nodes)
        if not branches:
            fractions = _multiplied(inequalities, values)
        name = next((name for name, value in enumerate(values) if abs(value - round(value)) > _WHOLE), None)
        if name is None:
            whole = [round(value) for value in values]
            return whole if all(inequality.room(whole) >= 0 for inequality in inequalities) else None
        below = floor(values[name])
        pending = [(*branches, Inequality(((name, -1),), -below)), (*branches, Inequality(((name, 1),), below + 1))]
    return fractions


def _multiplied(inequalities: Sequence[Inequality], values: Sequence[float]) -> list[int] | None:
    """The values as fractions times their common denominator; None if that violates an inequality."""
    fractions = [Fraction(value).limit_denominator(_DENOMINATORS) for value in values]
    scale = lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * scale) for fraction in fractions]
    return whole if scale <= _LARGEST and all(inequality.room(whole) >= 0 for inequality in inequalities) else None


def _relaxed(inequalities: Sequence[Inequality], weights: Sequence[int]) -> list[float] | None:
    """The least numbers, whole or not, that satisfy all inequalities; None if there are none."""
    tableau = _Tableau(weights)
    while True:
        values = tableau.values()
        rooms = ((inequality.room(values), number) for number, inequality in enumerate(inequalities))
        violated = sorted(entry for entry in rooms if entry[0] < -_TOLERANCE)
        if not violated:
            return values
        for _, number in violated[:_AT_ONCE]:
            tableau.add(inequalities[number])
        if not tableau.repaired():
            return None


class _Tableau:
    """Basic variables as sums of the others: ``basic = right[r] + sum(rows[r][c] * columns[c])``.

    The variables 2n and 2n+1 are the positive and the negative part of unknown n; larger numbers are the room of a row.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self._unknowns = len(weights)
        self._columns = list(range(2 * self._unknowns))
        self._prices = [float(weight) for weight in weights for _ in range(2)]
        self._names: list[int] = []
        self._rows: list[list[float]] = []
        self._right: list[float] = []
        self._next = 2 * self._unknowns
        self._pivots = 0

    def values(self) -> list[float]:
        """The values of the unknowns."""
        parts = [0.0] * (2 * self._unknowns)
        for name, value in zip(self._names, self._right, strict=True):
            if name < len(parts):
                parts[name] = value
        return [parts[2 * unknown] - parts[2 * unknown + 1] for unknown in range(self._unknowns)]

    def add(self, inequality: Inequality) -> None:
        """Adds an inequality as a row."""
        places = {name: place for place, name in enumerate(self._columns)}
        basic = {name: place for place, name in enumerate(self._names)}
        right, line = -float(inequality.least), [0.0] * len(self._columns)
        for unknown, factor in inequality.factors:
            for name, signed in ((2 * unknown, float(factor)), (2 * unknown + 1, -float(factor))):
                if name in places:
                    line[places[name]] += signed
                else:
                    other = self._rows[basic[name]]
                    right += signed * self._right[basic[name]]
                    line = [value + signed * more for value, more in zip(line, other, strict=True)]
        self._names.append(self._next)
        self._rows.append(line)
        self._right.append(right)
        self._next += 1

    def repaired(self) -> bool:
        """Pivots until no basic variable is negative, then drops rows with room; False if that is impossible."""
        while self._right and (worst := min(self._right)) < -_TOLERANCE:
            row = self._right.index(worst)
            line = self._rows[row]
            ratios = [
                (price / value, column)
                for column, (price, value) in enumerate(zip(self._prices, line, strict=True))
                if value > _TOLERANCE
            ]
            self._pivots += 1
            if not ratios or self._pivots > _PIVOTS:
                return False
            self._pivot(row, min(ratios)[1])
        slack = 2 * self._unknowns
        keep = [place for place, name in enumerate(self._names) if name < slack]
        self._names = [self._names[place] for place in keep]
        self._rows = [self._rows[place] for place in keep]
        self._right = [self._right[place] for place in keep]
        return True

    def _pivot(self, row: int, column: int) -> None:
        """Exchanges the basic variable of a row and the variable of a column."""
        line, pivot = self._rows[row], self._rows[row][column]
        solved = [-value / pivot for value in line]
        solved[column] = 1 / pivot
        right = -self._right[row] / pivot
        for place, other in enumerate(self._rows):
            if place != row and (factor := other[column]):
                other[column] = 0.0
                self._rows[place] = [value + factor * more for value, more in zip(other, solved, strict=True)]
                self._right[place] += factor * right
        factor, self._prices[column] = self._prices[column], 0.0
        self._prices = [price + factor * more for price, more in zip(self._prices, solved, strict=True)]
        self._rows[row], self._right[row] = solved, right
        self._names[row], self._columns[column] = self._columns[column], self._names[row]
