"""Library schemes with two stages on a worker, down and up again, and split backwards, cost what is known of them.

P workers, stages s and 2P-1-s on worker s, N micro-batches, communication free. ZB-V is that of Qi et al., "Zero
Bubble Pipeline Parallelism" (2024), section 6; V-Min and V-Half are those of "Pipeline Parallelism with Controllable
Memory" (2024), by the same authors.
Every makespan is also that of `tests.simulator`, which shares no code with the compiler.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

from chimera_ir.compilation import Compilation
from chimera_ir.cost.report import Figures
from chimera_ir.request import Request
from chimera_ir.source import Source
from tests.literature.split import EQUAL, Times, compilation, figures, spans

SIZES = [(1, 3), (2, 3), (2, 6), (3, 5), (3, 8), (4, 7), (4, 8), (4, 11), (5, 9), (6, 12), (8, 16), (8, 23)]
"""P and N, at least 2P - 1 micro-batches."""
FEW = [(2, 1), (2, 2), (3, 2), (4, 1), (4, 3), (4, 5), (8, 5)]
UNEQUAL: list[Times] = [(2, 2, 1), (1, 2, 1), (2, 3, 4), (1, 1, 2), (3, 4, 2)]
NAMES = ["zb_v", "v_half", "v_min"]


def priced(name: str, times: Times, P: int, N: int) -> Figures:
    return figures(name, times, P=P, N=N)


# ZB-V.


@pytest.mark.parametrize(("P", "N"), SIZES)
def test_zb_v_has_no_bubbles_within_the_span_of_a_worker(P: int, N: int) -> None:
    of = priced("zb_v", EQUAL, P, N)
    assert of.makespan == 6 * N + P - 1
    assert spans("zb_v", EQUAL, P=P, N=N) == [6 * N] * P
    assert of.activations == (2 * P,) * P
    assert of.weights == (2,) * P


def test_zb_v_at_the_size_that_others_computed() -> None:
    assert priced("zb_v", EQUAL, 4, 8).makespan == 51


@pytest.mark.parametrize(("P", "N"), [*SIZES, *FEW])
def test_every_lane_of_zb_v_is_in_the_order_of_torch(P: int, N: int) -> None:
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    schedule = compilation("zb_v", EQUAL, P=P, N=N).schedule
    theirs = SimpleNamespace(pp_group_size=P, num_stages=2 * P, _n_microbatches=N)
    for worker, lane in enumerate(schedule.lanes):  # type: ignore[union-attr]
        order = ScheduleZBVZeroBubble._calculate_single_rank_operations(theirs, worker)  # type: ignore[arg-type]
        expected = [str(operation) for operation in order if operation is not None]
        assert [f"{o.stage}{o.kind.letter}{o.micros[0]}" for o in lane] == expected


# V-Min and V-Half.


@pytest.mark.parametrize(("P", "N"), SIZES)
def test_v_min_keeps_a_third(P: int, N: int) -> None:
    of = priced("v_min", EQUAL, P, N)
    assert max(of.activations) <= 2 * ((P + 4) // 3)
    assert of.makespan == 6 * N + (4 * P - 5 + (2 if P % 3 == 0 else P == 2) if P > 1 else 0)
    assert of.weights == (2,) * P


@pytest.mark.parametrize(("P", "N", "makespan"), [(3, 6, 45), (4, 8, 59), (5, 10, 75), (6, 12, 93), (8, 16, 123)])
def test_v_min_takes_what_the_building_block_of_its_authors_takes(P: int, N: int, makespan: int) -> None:
    """By their code, without moving operations of warm-up and drain."""
    of = priced("v_min", EQUAL, P, N)
    assert of.makespan == makespan
    assert max(of.activations) == 2 * ((P + 4) // 3)


@pytest.mark.parametrize(("P", "N"), SIZES)
def test_v_half_keeps_half(P: int, N: int) -> None:
    of = priced("v_half", EQUAL, P, N)
    assert max(of.activations) <= 2 * ((P + 2) // 2)
    assert of.makespan >= 6 * N + P - 1
    assert of.weights == (2,) * P


@pytest.mark.parametrize(("P", "N", "repeated"), [(4, 8, 60), (5, 10, 74), (6, 12, 91), (8, 16, 122)])
def test_v_half_takes_less_than_with_the_slots_of_its_authors(P: int, N: int, repeated: int) -> None:
    """What the authors' code takes without moving operations of warm-up and drain."""
    of = priced("v_half", EQUAL, P, N)
    assert of.makespan < repeated
    assert max(of.activations) == 2 * ((P + 2) // 2)


def test_the_order_of_the_authors_of_v_half_is_a_schedule_that_takes_what_they_say() -> None:
    path = Path(__file__).parent.parent.parent / "docs" / "examples" / "v_half_reordered.sir"
    report = Compilation(Request(Source(path.name, path.read_text(encoding="utf-8")))).report
    assert report.makespan == 53
    assert max(report.activations) == 6


# All of them.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("P", "N"), FEW)
def test_fewer_micro_batches_than_stages_are_priced(name: str, P: int, N: int) -> None:
    of = priced(name, EQUAL, P, N)
    assert of.makespan >= max(4 * P + 1, 6 * N)
    assert max(of.activations) <= 2 * N


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("times", UNEQUAL)
@pytest.mark.parametrize(("P", "N"), [(3, 8), (4, 8), (4, 2)])
def test_unequal_operations_are_priced(name: str, times: Times, P: int, N: int) -> None:
    of = priced(name, times, P, N)
    f, b, w = times
    assert of.makespan >= max(2 * N * (f + b + w), 2 * P * (f + b) + w)
    assert of.makespan == f * of.counts["F"] + b * of.counts["I"] + w * of.counts["W"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("P", "N"), [(2, 4), (3, 9), (4, 8), (5, 10), (6, 12), (8, 16)])
def test_iterations_that_overlap_take_no_longer_than_the_work_and_the_way(name: str, P: int, N: int) -> None:
    of = priced(name, EQUAL, P, N)
    assert 6 * N <= of.steady_period <= of.makespan
