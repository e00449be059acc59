"""The library schemes cost what the literature says, at every size tried.

Unless a test says otherwise: F = 1, B = 2, communication free, D stages on D workers, N micro-batches. "Table 2" is the
paper's comparison of pipeline schemes (Chimera, SC'21, section 2); section numbers are the paper's.
"""

from fractions import Fraction
from functools import cache

import pytest

from chimera_ir.cost.durations import Costs
from chimera_ir.cost.report import Report, report, stages_held
from chimera_ir.elaborate.elaborate import elaborate
from chimera_ir.ir.levels import Schedule
from chimera_ir.lower.lower import order
from chimera_ir.predict.prediction import summary
from chimera_ir.source import Source, schemes
from chimera_ir.syntax.parser import parse
from tests.repeatable import part

PAPER = Costs()
EQUAL = Costs(B=Fraction(1))
BASELINE = "dapple"

EVEN = [2, 4, 6, 8, 10, 12, 16]
SIZES = part([(D, N) for D in (1, 2, 3, 4, 5, 8, 13) for N in (1, 2, 3, 4, 7, 8, 16, 33)], 3)
GROUPS = [(D, f) for D in (2, 4, 6, 8, 12, 16) for f in range(1, D // 2 + 1) if D % (2 * f) == 0]
CONCATENATIONS = [(D, K) for D in EVEN[:6] for K in (1, 2, 3, 4, 5)]


@cache
def schedule(name: str, **settings: int) -> Schedule:
    path = schemes() / f"{name}.chim"
    scheme = parse(Source(path.name, path.read_text(encoding="utf-8")))
    plan, _ = elaborate(scheme, settings, 1_000_000)
    return order(plan)


def cost(name: str, costs: Costs = PAPER, **settings: int) -> Report:
    own = schedule(name, **settings)
    return report(own, costs, schedule(BASELINE, D=settings["D"], N=settings["N"]), stages_held(own.header))


@pytest.mark.parametrize("name", ["gpipe", "dapple"])
@pytest.mark.parametrize(("D", "N"), SIZES)
def test_one_direction_with_a_flush_has_2_times_d_minus_1_bubbles_as_section_2_says(name: str, D: int, N: int) -> None:
    figures = cost(name, D=D, N=N)
    assert figures.makespan == 3 * (N + D - 1)
    assert (figures.counts["F"], figures.counts["B"]) == (N + D - 1, N + D - 1)
    assert figures.bubble_ratio == Fraction(D - 1, N + D - 1)  # Table 2
    assert figures.weights == (1,) * D  # Table 2
    assert figures.clock_span == 2 * (N + D - 1)


@pytest.mark.parametrize(("D", "N"), SIZES)
def test_gpipe_keeps_all_micro_batches_as_table_2_says(D: int, N: int) -> None:
    assert cost("gpipe", D=D, N=N).activations == (N,) * D


@pytest.mark.parametrize(("D", "N"), SIZES)
def test_dapple_keeps_at_most_as_many_as_there_are_stages_from_here_on_as_table_2_says(D: int, N: int) -> None:
    assert cost("dapple", D=D, N=N).activations == tuple(min(N, D - s) for s in range(D))


@pytest.mark.parametrize(("D", "N"), SIZES)
def test_gems_runs_two_micro_batches_at_most(D: int, N: int) -> None:
    """FACTS.md: 4D+2 for each pair of micro-batches, D-1 at the end; Table 2: one activation per worker."""
    figures = cost("gems", D=D, N=N)
    assert figures.makespan == Fraction((4 * D + 2) * N, 2) + D - 1
    assert figures.activations == (1,) * D


@pytest.mark.parametrize("D", EVEN)
def test_gems_holds_two_copies_of_the_weights_as_table_2_says(D: int) -> None:
    assert cost("gems", D=D, N=D).weights == (2,) * D


@pytest.mark.parametrize("D", [2, 4, 8])
def test_the_bubble_ratio_of_gems_approaches_that_of_table_2(D: int) -> None:
    limit = (D - 1) / (D + Fraction(1, 2))
    distances = [abs(cost("gems", D=D, N=N).bubble_ratio - limit) for N in (8, 64, 512)]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < Fraction(1, 300)


@pytest.mark.parametrize("D", EVEN)
def test_two_directions_have_d_minus_2_bubbles_as_section_3_1_says(D: int) -> None:
    figures = cost("chimera", D=D, N=D)
    assert figures.makespan == 5 * D - 4
    assert (figures.counts["F"], figures.counts["B"]) == (D, 2 * D - 2)
    assert figures.bubble_ratio == (D - 2) / (Fraction(3 * D, 2) + D - 2)  # Table 2
    assert figures.activations == tuple(D // 2 + 1 + min(w, D - 1 - w) for w in range(D))  # Table 2, ends lowest
    assert figures.weights == (2,) * D  # Table 2


@pytest.mark.parametrize("D", EVEN)
def test_two_directions_with_equal_workloads_as_section_3_1_says(D: int) -> None:
    figures = cost("chimera", EQUAL, D=D, N=D)
    assert figures.makespan == 3 * D - 2
    assert figures.bubble_ratio == Fraction(D - 2, 2 * D + D - 2)  # Table 2, middle bubbles removed


def test_the_critical_path_of_six_stages_is_that_of_the_figure_in_section_3_4() -> None:
    figures = cost("chimera", D=6, N=6)
    assert (figures.counts["F"], figures.counts["B"]) == (6, 10)


@pytest.mark.parametrize(("D", "N", "makespan"), [(4, 1, 12), (4, 2, 12), (4, 3, 16), (8, 5, 32)])
def test_fewer_micro_batches_than_stages(D: int, N: int, makespan: int) -> None:
    """FACTS.md, after section 3.1: any N < D is scheduled as evenly over the two pipelines as it can be."""
    assert cost("chimera", D=D, N=N).makespan == makespan


def test_five_micro_batches_on_eight_stages_beat_the_baseline() -> None:
    """FACTS.md: 32 against 36."""
    assert cost("chimera", D=8, N=5).baseline.makespan == 36


@pytest.mark.parametrize(("D", "f"), GROUPS)
def test_more_than_two_pipelines_as_section_3_6_and_table_3_say(D: int, f: int) -> None:
    figures = cost("chimera", EQUAL, D=D, N=D, f=f)
    assert figures.makespan == 2 * D + D // f - 2
    assert figures.bubble_ratio == Fraction(D - 2 * f, 2 * f * D + D - 2 * f)
    assert (min(figures.activations), max(figures.activations)) == (D - D // (2 * f) + 1, D)
    assert figures.weights == (2 * f,) * D


@pytest.mark.parametrize(("D", "K"), CONCATENATIONS)
def test_direct_concatenation_with_equal_workloads_leaves_no_bubble_between_units(D: int, K: int) -> None:
    """Section 3.5: the bubbles at the end of a unit are filled by the forward passes of the next."""
    figures = cost("chimera", EQUAL, D=D, N=K * D)
    assert figures.makespan == 2 * K * D + D - 2
    assert figures.activations == cost("chimera", D=D, N=D).activations


@pytest.mark.parametrize(("D", "K"), CONCATENATIONS)
def test_direct_concatenation_with_twice_the_work_backward_has_bubbles_in_between(D: int, K: int) -> None:
    """Section 3.5 names the intermediate bubbles; FACTS.md counts them."""
    figures = cost("chimera", D=D, N=K * D)
    assert figures.makespan == 3 * K * D + (K + 1) * (D - 2)
    assert figures.counts["F"] == K * D - (K - 1) * (D - 2)
    assert figures.counts["B"] == K * D + K * (D - 2)
    assert figures.activations == cost("chimera", D=D, N=D).activations


@pytest.mark.parametrize(("D", "K"), CONCATENATIONS)
def test_the_report_says_when_direct_concatenation_loses_to_the_baseline(D: int, K: int) -> None:
    """FACTS.md: from K = 3 on for D >= 6, from K = 4 on for D = 4; never for D = 2, which has no bubble."""
    loses = (K >= 3 and D >= 6) or (K >= 4 and D == 4)
    said = cost("chimera", D=D, N=K * D)
    assert (said.makespan > said.baseline.makespan) == loses
    assert (summary(said, None, None).speed.times_as_fast < 1) == loses
