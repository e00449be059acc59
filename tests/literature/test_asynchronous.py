"""The library's asynchronous schemes cost what the literature says, at every size tried.

F = 1, B = 2, communication free, D stages on D workers; figures are of one update in the steady state (CONTRACT.md), of
N micro-batches in PipeDream-2BW and of one in PipeDream. "Table 2" is the paper's comparison of pipeline schemes.
"""

from fractions import Fraction
from functools import cache

import pytest

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.host_plan import launches, with_events
from chimera_ir.cost.report import Report, activations, report
from chimera_ir.cost.simulate import Window, simulate, steady_window
from chimera_ir.request import Request
from chimera_ir.verify.versions import copies
from tests.literature.test_facts import BASELINE, EQUAL, PAPER, schedule
from tests.lowered import lowered
from tests.repeatable import part

DEPTHS = [1, 2, 3, 4, 5, 8, 16]
SIZES = part([(D, N) for D in (1, 2, 3, 4, 8) for N in (D, D + 1, 2 * D, 3 * D + 2)], 3)


@cache
def streamed(name: str, costs: Costs = PAPER, **settings: int) -> Report:
    own = schedule(name, **settings)
    program = lowered(own)
    flushed = schedule(BASELINE, D=settings["D"], N=settings.get("N", 1))
    return report(own, costs, flushed, copies(program), launches(program, simulate(own, costs)))


@pytest.mark.parametrize("costs", [PAPER, EQUAL, Costs(F=Fraction(2, 3), B=Fraction(7, 5))])
@pytest.mark.parametrize("D", DEPTHS)
def test_pipedream_takes_one_forward_and_one_backward_per_update(D: int, costs: Costs) -> None:
    figures = streamed("pipedream", costs, D=D)
    assert (figures.counts["F"], figures.counts["B"]) == (1, 1)
    assert figures.makespan == costs["F"] + costs["B"]
    assert figures.bubble_ratio == 0  # Table 2
    assert figures.clock_span == 2


@pytest.mark.parametrize("D", DEPTHS)
def test_pipedream_keeps_d_minus_s_activations_and_copies_of_the_weights_as_table_2_says(D: int) -> None:
    figures = streamed("pipedream", D=D)
    assert figures.activations == tuple(D - s for s in range(D))
    assert figures.weights == tuple(D - s for s in range(D))


@pytest.mark.parametrize("D", DEPTHS)
def test_pipedream_trains_stage_s_on_weights_d_minus_1_minus_s_updates_old(D: int) -> None:
    """Narayanan et al., SOSP 2019, section 3.3: w(t+1) = w(t) - nu * gradient at (w1(t-n+1), ..., wn(t))."""
    assert streamed("pipedream", D=D).staleness == tuple(D - 1 - s for s in range(D))


@pytest.mark.parametrize("costs", [PAPER, EQUAL])
@pytest.mark.parametrize(("D", "N"), SIZES)
def test_2bw_takes_n_forwards_and_n_backwards_per_update(D: int, N: int, costs: Costs) -> None:
    figures = streamed("pipedream_2bw", costs, D=D, N=N)
    assert (figures.counts["F"], figures.counts["B"]) == (N, N)
    assert figures.makespan == N * (costs["F"] + costs["B"])
    assert figures.bubble_ratio == 0  # Table 2
    assert figures.clock_span == 2 * N


@pytest.mark.parametrize(("D", "N"), SIZES)
def test_2bw_keeps_two_copies_of_the_weights_as_table_2_says(D: int, N: int) -> None:
    figures = streamed("pipedream_2bw", D=D, N=N)
    assert figures.activations == tuple(D - s for s in range(D))
    assert figures.weights == (2,) * D


@pytest.mark.parametrize(("D", "N"), SIZES)
def test_2bw_trains_on_weights_one_update_old(D: int, N: int) -> None:
    """Narayanan et al., ICML 2021, section 3.1: w(t+1) = w(t) - nu * gradient at w(t-1)."""
    assert streamed("pipedream_2bw", D=D, N=N).staleness == (1,) * D


@pytest.mark.parametrize("D", DEPTHS)
def test_the_peak_of_activations_does_not_depend_on_the_updates_shown(D: int) -> None:
    """The baseline with a flush, and micro-batches enough to fill it, keeps as many."""
    assert streamed("pipedream", D=D).activations == activations(schedule(BASELINE, D=D, N=2 * D))


@pytest.mark.parametrize("D", [2, 4, 8])
def test_an_update_with_a_flush_takes_longer_by_the_bubbles(D: int) -> None:
    said = streamed("pipedream_2bw", D=D, N=2 * D)
    assert said.baseline.makespan - said.makespan == 3 * (D - 1)


@pytest.mark.parametrize(("name", "settings", "length"), [("pipedream", {}, 3), ("pipedream_2bw", {"N": 5}, 15)])
def test_the_timeline_shows_one_update_of_the_steady_state(name: str, settings: dict[str, int], length: int) -> None:
    timeline = simulate(schedule(name, D=4, **settings), PAPER)
    window = steady_window(timeline)
    assert isinstance(window, Window)
    assert (window.end - window.start, window.updates) == (length, 1)
    for lane in timeline.lanes:
        inside = [each.operation for each in lane if window.start <= each.start < window.end]
        assert len(inside) == 2 * timeline.header.per_update


def test_every_worker_launches_one_sum_and_makes_one_step_per_update() -> None:
    own = schedule("pipedream_2bw", D=4, N=4)
    program, timeline = lowered(own), simulate(own, PAPER)
    assert [(each.worker, each.group[0], each.flush) for each in launches(program, timeline)] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 2, 0),
        (3, 3, 0),
    ]
    steps = with_events(timeline, program).events
    assert len(steps) == 4 * own.header.updates


def test_the_report_of_a_compilation_is_that_of_the_contract() -> None:
    own = Compilation(Request(library.source("pipedream"), {"D": 4}), warn=pytest.fail).report
    shown = own.as_json()
    expected = {
        "micro_batches": 1,
        "critical_path": {"C_f": 1, "C_b": 1},
        "makespan": 3,
        "bubble_ratio": 0,
        "clock_span": 2,
        "weights": [4, 3, 2, 1],
        "activations": [4, 3, 2, 1],
        "asynchronous": True,
        "staleness": [3, 2, 1, 0],
    }
    assert {name: shown[name] for name in expected} == expected
    assert (
        "without a flush, gradients of all micro-batches come from old weights: 3 updates old on stage 0, 0 on stage 3"
        in own.remarks
    )


@pytest.mark.parametrize(("D", "N"), [(4, 4), (4, 12), (8, 16)])
def test_the_remark_counts_the_micro_batches_that_read_old_weights(D: int, N: int) -> None:
    """In AMDP those that enter while the update before is still under way: the first D of each update."""
    own = Compilation(Request(library.source("amdp"), {"D": D, "N": N}), warn=pytest.fail).report
    late = "all micro-batches" if D == N else f"{D} of {N} micro-batches"
    assert f"without a flush, gradients of {late} come from old weights: 1 update old" in own.remarks
    assert own.as_json()["stale_micro_batches"] == D
