"""An encoder on all workers of a text model: makespan and peaks, as an independent simulator finds them."""

from fractions import Fraction
from pathlib import Path

import pytest

import chimera_ir
from chimera_ir import Options

SCHEME = Path(__file__).resolve().parents[2] / "docs" / "examples" / "colocated.chim"
COSTS = {"F": [1, 4, 4, 4, 4], "B": [2, 8, 8, 8, 8]}


@pytest.mark.parametrize(("keep", "peaks"), [({}, "6 5 4 3"), ({0: "1/4"}, "9/2 7/2 5/2 3/2")])
def test_three_phases(keep: dict[int, str], peaks: str) -> None:
    report = chimera_ir.compile(SCHEME, P=4, N=8, options=Options(stage_costs=COSTS, keep=keep)).report
    assert report.makespan == 138
    assert [*report.activations] == [*map(Fraction, peaks.split())]


@pytest.mark.parametrize(("workers", "micro_batches"), [(2, 2), (2, 6), (3, 9), (4, 16)])
def test_a_worker_keeps_its_images_beside_1f1b_of_the_text(workers: int, micro_batches: int) -> None:
    options = Options(keep={"first": Fraction(2, 7)})
    report = chimera_ir.compile(SCHEME, P=workers, N=micro_batches, options=options).report
    images = Fraction(2, 7) * (micro_batches // workers)
    assert [*report.activations] == [min(workers - w, micro_batches) + images for w in range(workers)]
