"""An encoder on all workers of a text model: makespan and peaks, as an independent simulator finds them."""

from fractions import Fraction
from importlib.util import find_spec

import pytest

import chimera_ir
from chimera_ir import Compilation, Options, library
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE, Cluster
from chimera_ir.profile.costs import StageCosts
from chimera_ir.source import Source
from tests.simulator import Simulator
from tests.timings import stage_timing

COSTS = {"image.F": 1, "image.B": 2, "text.F": 4, "text.B": 8}
FROZEN_COSTS = {kind: cost for kind, cost in COSTS.items() if kind != "image.B"}
searching = pytest.mark.skipif(find_spec("ortools") is None, reason="OR-Tools is not installed: the extra search")


def variant(name: str, *changes: tuple[str, str]) -> Source:
    text = library.source(name).text
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return Source(f"{name}.chim", text)


def bounded(peaks: str) -> tuple[str, str]:
    return "workers P\n", f"workers P\nmemory activations on w <= {peaks}\n"


FROZEN = ("workers P\n", "frozen image\nworkers P\n"), ("  B(m, image[0]) @ end + m\n", "")


def simulated(made: Compilation) -> float:
    image, text = (StageCosts(1, 1, 0, {1: stage_timing(f, 2 * f, 3 * f, 1, 1, 1, 1, halves=(f, f))}) for f in (1, 4))
    cluster = Cluster("free", 4096, 1, 1, 0, FREE, FREE, FREE)
    setting = Setting((image, *(text,) * (made.header.stages - 1)), cluster, 1, 1)
    return max(end for *_, end in Simulator(made.program, setting).computes)


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


@pytest.mark.parametrize(("late", "makespan"), [("3*P", 139), ("2*P", 142)])
def test_images_in_time_take_little_longer_than_three_phases(late: str, makespan: int) -> None:
    """With their gradients P + 1 clocks late; as soon as the text hands them back, they hold it up."""
    source = variant("colocated_nested", ("3*(2*n + 3*P) + 2", f"3*(2*n + {late}) + 2"))
    made = chimera_ir.compile(source, P=4, N=8, options=Options(costs=COSTS))
    assert (made.report.makespan, [*made.report.activations]) == (makespan, [6, 5, 4, 3])
    assert simulated(made) == makespan


@searching
def test_no_order_with_these_peaks_takes_less_than_135() -> None:
    source = variant("colocated", bounded("6 - w"))
    result = chimera_ir.compile(source, P=4, N=8, options=Options(costs=COSTS, search=60)).improvement.result
    assert (result.proven, result.makespan) == (True, 135)
    assert result.hints["colocated"] == 138


def test_a_frozen_encoder_has_its_images_first_and_keeps_nothing() -> None:
    made = chimera_ir.compile(variant("colocated", *FROZEN), P=4, N=8, options=Options(costs=FROZEN_COSTS))
    assert (made.report.makespan, [*made.report.activations]) == (134, [4, 3, 2, 1])
    assert simulated(made) == 134


@searching
def test_with_a_frozen_encoder_the_shortest_order_takes_133() -> None:
    source = variant("colocated", *FROZEN, bounded("4 - w"))
    result = chimera_ir.compile(source, P=4, N=8, options=Options(costs=FROZEN_COSTS, search=60)).improvement.result
    assert (result.proven, result.makespan) == (True, 133)
