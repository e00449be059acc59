"""An encoder on all workers of a text model: makespan and peaks, as an independent simulator finds them."""

from fractions import Fraction

import pytest

import chimera_ir
from chimera_ir import Options

COSTS = {"image.F": 1, "image.B": 2, "text.F": 4, "text.B": 8}


@pytest.mark.parametrize(("keep", "peaks"), [({}, "6 5 4 3"), ({"image": "1/4"}, "9/2 7/2 5/2 3/2")])
def test_three_phases(keep: dict[str, str], peaks: str) -> None:
    report = chimera_ir.compile("colocated", P=4, N=8, options=Options(costs=COSTS, keep=keep)).report
    assert report.makespan == 138
    assert [*report.activations] == [*map(Fraction, peaks.split())]


@pytest.mark.parametrize(("workers", "micro_batches"), [(2, 2), (2, 6), (3, 9), (4, 16)])
def test_a_worker_keeps_its_images_beside_1f1b_of_the_text(workers: int, micro_batches: int) -> None:
    options = Options(keep={"image": Fraction(2, 7)})
    report = chimera_ir.compile("colocated", P=workers, N=micro_batches, options=options).report
    images = Fraction(2, 7) * (micro_batches // workers)
    assert [*report.activations] == [min(workers - w, micro_batches) + images for w in range(workers)]


@pytest.mark.parametrize(("workers", "rounds"), [(1, 3), (2, 2), (3, 5), (4, 2), (4, 8), (6, 4)])
def test_images_in_time_keep_two_of_them_at_any_number(workers: int, rounds: int) -> None:
    options = Options(costs=COSTS, keep={"image": Fraction(2, 7)})
    report = chimera_ir.compile("colocated_nested", P=workers, N=rounds * workers, options=options).report
    assert [*report.activations] == [workers - w + 2 * Fraction(2, 7) for w in range(workers)]


def test_images_in_time_take_little_longer_than_three_phases() -> None:
    """An order by hand took 142, and no order with these peaks takes less than 135."""
    report = chimera_ir.compile("colocated_nested", P=4, N=8, options=Options(costs=COSTS)).report
    assert (report.makespan, [*report.activations]) == (139, [6, 5, 4, 3])
