"""The integer program of a fit: few unknowns and many inequalities, solved by CP-SAT of OR-Tools.

minimize    w * |x|             the unknowns x are whole numbers; w > 0
such that   a * x >= b          for every inequality (a, b)

Few inequalities decide. The solver gets those that its last solution violates, until there are none.
"""

from collections.abc import Sequence
from typing import NamedTuple

LARGEST = 1_000
"""The largest size of a number of a solution."""

_AT_ONCE = 20
"""Violated inequalities that join the model before it is solved again."""

_WORK = 2.0
"""The most deterministic time of a call of the solver; a program that takes longer counts as one without a solution."""


class Inequality(NamedTuple):
    """``sum(factor * x[n] for n, factor in factors) >= least``; an unknown x[n] that is left out has the factor 0."""

    factors: tuple[tuple[int, int], ...]
    least: int = 1

    def room(self, values: Sequence[int]) -> int:
        """Returns by how much the sum is above ``least``; negative if the inequality is violated."""
        return sum(factor * values[name] for name, factor in self.factors) - self.least


def least_solution(inequalities: Sequence[Inequality], weights: Sequence[int]) -> list[int] | None:
    """Finds whole numbers that satisfy all inequalities, with the least sum of ``weights`` times absolute values.

    The result is None if there are none, or if none are found in the time allowed.

    Examples
    --------
    >>> least_solution([Inequality(((0, 1), (1, -1))), Inequality(((1, 2),))], [1, 1])
    [2, 1]
    """
    from ortools.sat.python import cp_model

    model, solver = cp_model.CpModel(), cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = _WORK
    unknowns = [model.new_int_var(-LARGEST, LARGEST, "") for _ in weights]
    sizes = [model.new_int_var(0, LARGEST, "") for _ in weights]
    for unknown, size in zip(unknowns, sizes, strict=True):
        model.add_abs_equality(size, unknown)
    model.minimize(cp_model.LinearExpr.weighted_sum(sizes, weights))
    values = [0] * len(weights)
    while violated := sorted((room, n) for n, row in enumerate(inequalities) if (room := row.room(values)) < 0):
        for _, number in violated[:_AT_ONCE]:
            names, factors = zip(*inequalities[number].factors, strict=True)
            model.add(
                cp_model.LinearExpr.weighted_sum([unknowns[name] for name in names], factors)
                >= inequalities[number].least
            )
        if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        values = [solver.value(unknown) for unknown in unknowns]
    return values
