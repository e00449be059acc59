"""Lower bounds of the makespan: never above the optimum of a plain model, and as high as it where memory is short."""

from collections.abc import Mapping
from importlib.util import find_spec
from random import Random

import pytest

from chimera_ir.orders.constraints import Constraints, constraints_of
from chimera_ir.orders.flow_bound import FlowBound
from chimera_ir.orders.lower_bound import lower_bound
from tests.unit.plain_orders import costs, instance, plain_optimum, with_random_durations

pytestmark = pytest.mark.skipif(find_spec("ortools") is None, reason="OR-Tools is not installed: the extra search")


def flow_bound(constraints: Constraints, most: int) -> int:
    """The bound of the linear programs, up to ``most``."""
    bounds = FlowBound(constraints)
    least = lower_bound(constraints)
    while (attempt := bounds.next_attempt(least, most)) is not None:
        least = max(least, attempt.run(60).bound)
        bounds.learn(attempt)
    return least


@pytest.mark.parametrize(
    ("scheme", "limit", "parameters"),
    [
        ("zb_h1", 2, {"D": 2, "N": 3}),
        ("dapple", 1, {"D": 3, "N": 3}),
        ("zb_v", 2, {"P": 2, "N": 2}),
        ("waves", 3, {"P": 2, "N": 2}),
        ("chimera", 2, {"D": 2, "N": 4}),
        ("seq1f1b", 1, {"D": 2, "N": 1, "k": 2}),
    ],
)
def test_no_bound_is_above_the_optimum_of_a_plain_model(scheme: str, limit: int, parameters: Mapping[str, int]) -> None:
    random, problem = Random(scheme), instance(scheme, costs(F=1, B=2), limit, **parameters)
    for _ in range(20):
        varied = with_random_durations(problem, random, most=4)
        constraints, optimum = constraints_of(varied), plain_optimum(varied)
        assert lower_bound(constraints) <= flow_bound(constraints, optimum) <= optimum


@pytest.mark.parametrize(
    ("scheme", "limit", "parameters", "kinds", "bound"),
    [
        ("zb_v", 6, {"P": 4, "N": 8}, {"F": 1, "I": 1, "W": 1}, 53),
        ("waves", 6, {"P": 4, "N": 8}, {"F": 1, "B": 2}, 63),
    ],
)
def test_a_bound_counts_memory_together_with_machines(
    scheme: str, limit: int, parameters: Mapping[str, int], kinds: Mapping[str, int], bound: int
) -> None:
    """The optima, which the machines alone do not show: the solver finds them within minutes."""
    constraints = constraints_of(instance(scheme, costs(**kinds), limit, **parameters))
    assert lower_bound(constraints) < bound == flow_bound(constraints, 2 * bound)


def test_multipliers_that_are_wrong_exclude_nothing() -> None:
    """A linear program is trusted for what its rows add up to, never for what the solver says."""
    from ortools.linear_solver.python.model_builder import Solver

    constraints = constraints_of(instance("waves", costs(F=1, B=2), 6, P=4, N=8))
    program = FlowBound(constraints).attempt(60).program()
    good = program.multipliers(Solver("GLOP"))
    assert program.contradicts(good)
    assert not program.contradicts([0] * len(good))
    assert not program.contradicts([1] * len(good))
