"""Schedules that only figures of the paper (Chimera, SC'21) show are related to the library's as the text says."""

from pathlib import Path

import pytest

from chimera_ir.compilation import Compilation
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.simulate import Timeline
from chimera_ir.ir.ops import Compute
from chimera_ir.request import Request
from chimera_ir.source import Source
from tests.literature.test_facts import EQUAL, cost

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures"
DOUBLED = Costs().using("B", "2")
"""Section 3.5: a forward over two micro-batches is as long as a backward over one, recomputation included."""


def compilation(name: str, costs: Costs, **settings: int) -> Compilation:
    source = Source(name, (FIGURES / f"{name}.chim").read_text(encoding="utf-8"))
    return Compilation(Request(source, settings, costs), warn=lambda warning: pytest.fail(warning.code))


def timeline(name: str, costs: Costs, **settings: int) -> Timeline:
    return compilation(name, costs, **settings).timeline


def slots(**settings: int) -> list[tuple[int, int]]:
    """Every worker and clock at which a direction, or both, has an operation."""
    plan = compilation("directions", EQUAL, **settings).plan
    return sorted((planned.worker, planned.clock) for planned in plan.operations)


def kind_and_stage(operation: Compute) -> tuple[str, int]:
    return operation.kind.noun, operation.stage


@pytest.mark.parametrize("D", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("K", [1, 2, 3, 4, 8])
def test_units_at_half_their_distance_have_no_bubbles_between_them(D: int, K: int) -> None:
    """Section 3.5 counts (K+1)(D-2) bubbles for units one after the other; clocks.md lets them overlap."""
    source = Source("closer", (FIGURES.parent / "examples" / "closer.chim").read_text(encoding="utf-8"))
    closer = Compilation(Request(source, {"D": D, "N": K * D}), warn=lambda warning: pytest.fail(warning.code))
    assert closer.report.makespan == 3 * K * D + 2 * (D - 2)
    assert max(closer.report.activations) == D
    assert closer.report.clock_span == cost("chimera", D=D, N=K * D).clock_span


@pytest.mark.parametrize("D", [2, 4, 6, 8, 16])
def test_figure_3_the_two_directions_fit_into_each_other_without_conflict(D: int) -> None:
    """Section 3.1: "at most one micro-batch occupies the same time slot on each worker"."""
    down, up = slots(D=D, upward=0), slots(D=D, downward=0)
    assert set(down) & set(up) == set()
    assert slots(D=D) == sorted(down + up)
    alone = {timeline("directions", EQUAL, D=D, **{other: 0}).makespan for other in ("downward", "upward")}
    assert alone == {cost("chimera", EQUAL, D=D, N=D).makespan}


@pytest.mark.parametrize("D", [2, 4, 6, 8, 16])
def test_figure_7_fine_tuning_saves_half_of_the_bubbles(D: int) -> None:
    """Section 3.5: of 2(D-2) bubbles, each as long as a forward over two micro-batches, D-2 remain."""
    chunks = timeline("chunks", DOUBLED, D=D)
    tuned = cost("chimera_doubling", DOUBLED, D=D, N=2 * D)
    work = 3 * 2 * D
    assert chunks.makespan - work == 2 * 2 * (D - 2)
    assert tuned.makespan - work == 2 * (D - 2)


@pytest.mark.parametrize("D", [2, 4, 6, 8])
def test_figure_7_the_second_chunk_of_backwards_is_the_first_one_again(D: int) -> None:
    for lane in timeline("chunks", DOUBLED, D=D).lanes:
        backwards = [each.operation for each in lane if len(each.operation.micros) == 1]
        first, second = backwards[:D], backwards[D:]
        assert [kind_and_stage(each) for each in first] == [kind_and_stage(each) for each in second]
        assert [each.micros[0] + 1 for each in first] == [each.micros[0] for each in second]
