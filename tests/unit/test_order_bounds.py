"""Lower bounds of the makespan: never above the optimum of a plain model, and as high as it where memory is short."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from random import Random

import pytest

from chimera_ir.orders import lower_bound as sequences
from chimera_ir.orders.instance import Constraints, OrderInstance, constraints_of
from chimera_ir.orders.lower_bound import FlowAttempt, FlowBound, lower_bound, sequence_bound
from tests.repeatable import tries
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
    for _ in range(tries(6)):
        varied = with_random_durations(problem, random, most=4)
        constraints, optimum = constraints_of(varied), plain_optimum(varied)
        assert lower_bound(constraints) <= flow_bound(constraints, optimum) <= optimum
        assert sequence_bound(constraints, 0, 2 * optimum)[0] <= optimum


def weighed(problem: OrderInstance, random: Random) -> OrderInstance:
    """The instance with random costs of its stages, weights of its micro-batches and delays between machines."""
    stages, weights = ([random.randint(1, 4) for _ in range(8)] for _ in range(2))
    durations = [
        duration * stages[operation.parts[0].stage] * weights[operation.parts[0].micros[0]]
        for duration, operation in zip(problem.durations, problem.operations, strict=True)
    ]
    delay = random.choice((0, 0, 3))
    machines = problem.machines
    delays = [
        tuple(random.randint(0, delay) if machines[other] != machines[number] else 0 for other in others)
        for number, others in enumerate(problem.waits)
    ]
    return replace(problem, durations=durations, delays=delays)


@pytest.mark.parametrize(
    ("scheme", "limit", "parameters", "kinds"),
    [
        ("dapple", 3, {"D": 3, "N": 4}, {"F": 1, "B": 2}),
        ("zb_h1", 2, {"D": 2, "N": 4}, {"F": 2, "I": 3, "W": 2}),
        ("zb_v", 4, {"P": 2, "N": 3}, {"F": 1, "I": 1, "W": 1}),
        ("chimera", 2, {"D": 2, "N": 4}, {"F": 1, "B": 2}),
    ],
)
def test_no_bound_of_sequences_is_above_the_optimum(
    scheme: str, limit: int, parameters: Mapping[str, int], kinds: Mapping[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches of any weights on stages of any cost, also where groups are merged to have few states."""
    random, problem = Random(scheme), instance(scheme, costs(**kinds), limit, **parameters)
    for _ in range(tries(5)):
        varied = weighed(problem, random)
        constraints, optimum = constraints_of(varied), plain_optimum(varied)
        for states in (30, 1000):
            monkeypatch.setattr(sequences, "MOST_STATES", states)
            assert sequence_bound(constraints, 0, 2 * optimum)[0] <= optimum


@pytest.mark.parametrize(
    ("weights", "machines", "optimum"),
    [((1, 2, 1, 4, 1, 2, 1, 4), 60, 72), ((4, 1, 3, 1, 2, 4, 4, 1), 72, 84), ((2, 1, 3, 1, 4, 4, 4, 4), 84, 94)],
)
def test_a_bound_of_sequences_is_the_optimum_of_chains_whose_micro_batches_differ(
    weights: Sequence[int], machines: int, optimum: int
) -> None:
    """Orders of these lengths are known; the machines alone show far less."""
    problem = instance("dapple", costs(F=1, B=2), 4, D=4, N=8)
    weight_of = [weights[operation.parts[0].micros[0]] for operation in problem.operations]
    durations = [duration * weight for duration, weight in zip(problem.durations, weight_of, strict=True)]
    constraints = constraints_of(replace(problem, durations=durations))
    assert lower_bound(constraints) == machines
    assert sequence_bound(constraints, machines, 2 * optimum)[0] == optimum


@pytest.mark.parametrize(
    ("scheme", "limit", "parameters", "kinds", "bound"),
    [("zb_v", 6, {"P": 4, "N": 8}, {"F": 1, "I": 1, "W": 1}, 53), ("waves", 6, {"P": 4, "N": 8}, {"F": 1, "B": 2}, 63)],
)
def test_a_bound_counts_memory_together_with_machines(
    scheme: str, limit: int, parameters: Mapping[str, int], kinds: Mapping[str, int], bound: int
) -> None:
    """The optima, which the machines alone do not show: the solver finds them within minutes."""
    constraints = constraints_of(instance(scheme, costs(**kinds), limit, **parameters))
    assert lower_bound(constraints) < bound == flow_bound(constraints, 2 * bound)


def test_multipliers_that_are_wrong_exclude_nothing() -> None:
    """A linear program is trusted for what its rows add up to, never for what the solver says."""
    constraints = constraints_of(instance("waves", costs(F=1, B=2), 6, P=4, N=8))
    program = FlowAttempt(FlowBound(constraints), 60)
    assert program.make()
    good = program.multipliers()
    assert program.contradicts(good)
    assert not program.contradicts([0] * len(good))
    assert not program.contradicts([1] * len(good))
