"""Library schemes with split backwards cost what is known of them, at every size tried.

f, b and w are the times of F, I and W over a micro-batch, D stages on D workers, N micro-batches, communication free.
The schedules are those of Qi et al., "Zero Bubble Pipeline Parallelism" (2024), sections 2 and 3. Every makespan is
also that of `tests.simulator`, which shares no code with the compiler and runs the program with its messages.
"""

import pytest

from tests.literature.split import EQUAL, Times, compilation, figures, spans

TIMES: list[Times] = [EQUAL, (2, 2, 1), (1, 2, 1), (2, 3, 4), (1, 1, 2), (3, 4, 2), (1, 3, 1), (4, 1, 5)]
MANY = [(1, 3), (2, 3), (2, 5), (3, 5), (4, 7), (4, 8), (5, 11), (8, 16)]
"""D and N, at least 2D - 1 micro-batches."""
FEW = [(2, 1), (4, 1), (4, 3), (8, 5)]


# ZB-H1.


@pytest.mark.parametrize(("D", "N", "makespan"), [(4, 8, 27), (8, 16, 55)])
def test_zb_h1_at_sizes_that_others_computed(D: int, N: int, makespan: int) -> None:
    of = figures("zb_h1", EQUAL, D=D, N=N)
    assert of.makespan == makespan
    assert of.activations == (D,) * D
    assert of.between_halves == tuple(range(1, D + 1)), (
        "worker s runs a W right before the I of s + 1 micro-batches later"
    )
    assert of.weights == (1,) * D


@pytest.mark.parametrize(("D", "N"), [*MANY, (4, 4), (8, 8)])
@pytest.mark.parametrize("times", TIMES)
def test_zb_h1_takes_what_its_paper_says_where_that_can_be(times: Times, D: int, N: int) -> None:
    """N (f + b + w) + (D - 1) max(f, f + b - w), as long as b is no larger than that maximum.

    With D micro-batches in its memory, worker 0 waits (D - 1) b after its first D forwards: less is not possible.
    """
    f, b, w = times
    of = figures("zb_h1", times, D=D, N=N)
    assert of.makespan == N * (f + b + w) + (D - 1) * max(f, b, f + b - w)
    assert of.activations == (min(D, N),) * D
    assert of.makespan == f * of.counts["F"] + b * of.counts["I"] + w * of.counts["W"]


def test_zb_h1_leaves_every_worker_fewer_bubbles_than_the_one_before() -> None:
    """Zero bubble is a statement about a worker's own span, not about the makespan."""
    assert spans("zb_h1", EQUAL, D=4, N=8) == [27, 26, 25, 24]


# ZB-H2.


@pytest.mark.parametrize(("D", "N"), MANY)
@pytest.mark.parametrize("times", TIMES)
def test_zb_h2_takes_what_its_paper_says(times: Times, D: int, N: int) -> None:
    """N (f + b + w) + (D - 1) f where 2b <= w + 2f; else the first input gradients come too late for worker 0."""
    f, b, w = times
    of = figures("zb_h2", times, D=D, N=N)
    ideal = N * (f + b + w) + (D - 1) * f
    assert of.makespan == ideal if 2 * b <= w + 2 * f else of.makespan >= ideal
    assert of.activations == (2 * D - 1,) * D


def test_zb_h2_has_no_bubbles_within_the_span_of_a_worker() -> None:
    assert spans("zb_h2", EQUAL, D=4, N=8) == [24, 24, 24, 24]
    assert figures("zb_h2", EQUAL, D=4, N=8).makespan == figures("zb_h1", EQUAL, D=4, N=8).makespan == 27


# Both.


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
@pytest.mark.parametrize(("D", "N"), FEW)
@pytest.mark.parametrize("times", TIMES)
def test_fewer_micro_batches_than_stages_are_priced(name: str, times: Times, D: int, N: int) -> None:
    f, b, w = times
    of = figures(name, times, D=D, N=N)
    assert of.makespan >= D * (f + b) + w + (N - 1) * max(f, b)
    assert of.activations == (N,) * D


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
@pytest.mark.parametrize(("D", "N"), MANY)
def test_the_baseline_s_backward_takes_as_long_as_both_halves(name: str, D: int, N: int) -> None:
    report = compilation(name, (2, 3, 2), D=D, N=N).report
    assert report.baseline.makespan == (2 + 5) * (N + D - 1)
    assert report.makespan < report.baseline.makespan or D == 1


@pytest.mark.parametrize(("D", "N"), [(2, 2), (4, 4), (4, 8), (6, 12), (8, 8), (8, 16)])
def test_two_directions_with_split_backwards_take_the_least_that_their_placement_allows(D: int, N: int) -> None:
    """F = I = W = 1: the two workers in the middle begin after D/2 - 1, and each worker computes for 3N."""
    assert figures("chimera_zb", EQUAL, D=D, N=N).makespan == 3 * N + D // 2 - 1
