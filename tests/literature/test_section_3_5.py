"""Forward doubling, backward halving and recomputation cost what section 3.5 and FACTS.md say, at every size tried.

D stages on D workers, N = K D micro-batches. B = 2 stands for the equal workloads of section 3.5: a forward over two
micro-batches beside a backward over one that recomputes, or a forward over one beside a backward over half of it.
"""

from fractions import Fraction

import pytest

from chimera_ir import library
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.report import report, stages_held
from chimera_ir.elaborate.elaborate import elaborate
from chimera_ir.ir.levels import Schedule
from chimera_ir.lower.lower import lower, order
from chimera_ir.predict.prediction import summary
from chimera_ir.source import Source
from chimera_ir.syntax.parser import parse
from chimera_ir.verify.verify import verify_program, verify_schedule
from tests.literature.test_facts import BASELINE, cost, schedule
from tests.repeatable import part

EQUAL = Costs().using("B", "2")
SIZES = part([(D, K) for D in (2, 4, 6, 8, 12, 16) for K in (1, 2, 3, 4, 5, 6, 9)], 2)


def one_direction(D: int, N: int) -> Schedule:
    """1F1B with a flush that recomputes everywhere."""
    text = (
        "scheme plain(D = 4, N = 8) pipe down { stages s in 0..D on s  micros m in 0..N  recompute"
        "  F(m, s) @ 2*m + s  B(m, s) @ 2*m + 2*D-1 - s }"
    )
    return order(elaborate(parse(Source("plain.chim", text)), {"D": D, "N": N}, 1_000_000)[0])


@pytest.mark.parametrize(("D", "K"), SIZES)
def test_forward_doubling_costs_what_facts_says(D: int, K: int) -> None:
    """2(3DJ + D-2) for N = 2DJ, 3N + 2(D-2) for K odd with the residual unit first: the same formula in N."""
    figures = cost("chimera_doubling", EQUAL, D=D, N=K * D)
    assert figures.makespan == 3 * K * D + 2 * (D - 2)
    if K % 2 == 0:
        assert figures.makespan == 2 * (3 * D * (K // 2) + D - 2)


@pytest.mark.parametrize(("D", "K"), [(D, K) for D, K in SIZES if K > 1])
def test_forward_doubling_keeps_d_plus_2_to_2d_inputs_and_the_activations_of_one_backward(D: int, K: int) -> None:
    figures = cost("chimera_doubling", EQUAL, D=D, N=K * D)
    assert figures.stashed_inputs == tuple(D + 2 + 2 * min(w, D - 1 - w) for w in range(D))
    assert figures.activations == (1,) * D


@pytest.mark.parametrize(("D", "K"), [(D, K) for D, K in SIZES if K % 2 == 0])
def test_forward_doubling_has_d_minus_2_bubbles_of_a_forward_over_two(D: int, K: int) -> None:
    figures = cost("chimera_doubling", EQUAL, D=D, N=K * D)
    assert figures.bubble_ratio * figures.makespan == 2 * (D - 2)


@pytest.mark.parametrize(("D", "K"), SIZES)
def test_backward_halving_has_d_minus_2_bubbles_of_a_forward_over_one(D: int, K: int) -> None:
    """The clock of doubling in boxes of half the length: with J units of D micro-batches 3DJ + D-2."""
    figures = cost("chimera_halving", D=D, N=K * D)
    assert figures.makespan == 3 * K * D + D - 2
    assert figures.bubble_ratio * figures.makespan == D - 2
    assert figures.makespan == figures.counts["F"] + 2 * figures.counts["B"]
    assert figures.header.whole_micro_batches == K * D
    assert figures.activations == cost("chimera", D=D, N=D).activations, "those of one unit"
    assert figures.stashed_inputs == (0,) * D


@pytest.mark.parametrize(("D", "K"), SIZES)
def test_neither_loses_to_the_baseline_at_equal_workloads(D: int, K: int) -> None:
    for name in ("chimera_doubling", "chimera_halving"):
        said = cost(name, EQUAL, D=D, N=K * D)
        assert said.makespan <= said.baseline.makespan == 3 * (K * D + D - 1)


@pytest.mark.parametrize(("D", "N", "makespan", "plain"), [(4, 8, 36, 33), (8, 48, 204, 165)])
def test_with_the_cost_of_recomputation_doubling_loses_to_the_baseline(
    D: int, N: int, makespan: int, plain: int
) -> None:
    """4N + 2(D-2): a worker computes all the time, but for D-2 forwards over two micro-batches."""
    said = cost("chimera_doubling", D=D, N=N)
    assert (said.makespan, said.baseline.makespan) == (makespan, plain)
    assert makespan == 4 * N + 2 * (D - 2)
    assert said.as_json()["costs"] == {"F": 1, "B": 2, "I": 1, "W": 1, "recompute": 1}
    assert summary(said, None, None).speed.times_as_fast == Fraction(plain, makespan)


def test_doubling_wins_against_a_baseline_that_recomputes_too() -> None:
    """The baseline takes 4N + 3(D-1): it hides all recomputations but those that nothing is waited for after."""
    recomputing = one_direction(8, 48)
    own = report(recomputing, Costs(), schedule(BASELINE, D=8, N=48), stages_held(recomputing.header))
    assert own.makespan == 4 * 48 + 3 * 7 > cost("chimera_doubling", D=8, N=48).makespan
    assert own.stashed_inputs == tuple(8 - s for s in range(8))
    assert own.activations == (1,) * 8


@pytest.mark.parametrize("name", ["chimera_doubling", "chimera_halving"])
@pytest.mark.parametrize(("D", "K"), [(2, 1), (2, 3), (4, 2), (4, 3), (6, 4), (8, 5)])
def test_the_clock_is_free_of_conflicts_and_rises_along_the_data(name: str, D: int, K: int) -> None:
    plan, warnings = elaborate(parse(library.source(name)), {"D": D, "N": K * D}, 1_000_000)
    assert (*warnings, *verify_schedule(order(plan), plan).findings.diagnostics) == ()
    verify_program(lower(order(plan)))


@pytest.mark.parametrize("K", [2, 3, 4])
def test_halves_are_counted_as_halves(K: int) -> None:
    told = cost("chimera_halving", D=4, N=4 * K).as_json()
    assert told["micro_batches"] == 4 * K
    assert Fraction(str(told["makespan"])) == 12 * K + 2
