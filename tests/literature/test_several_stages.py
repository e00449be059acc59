"""Library schemes with several stages of a pipe on a worker cost what is known of them, at every size tried.

F = 1 and B = 2 for a stage, communication free, P workers, N micro-batches. Every makespan is also that of
`tests.simulator`, which shares no code with the compiler and runs the program with its messages.
"""

import re
from itertools import product

import pytest

from chimera_ir import library
from chimera_ir.compilation import Compilation
from chimera_ir.cost.report import Figures
from chimera_ir.diagnostics.catalogue.schedule import CycleOfClocks
from chimera_ir.diagnostics.catalogue.values import RequirementFails
from chimera_ir.errors import TextError
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE, Cluster
from chimera_ir.profile.costs import StageCosts
from chimera_ir.request import Request
from chimera_ir.source import Source
from tests.repeatable import part
from tests.simulator import Simulator
from tests.timings import stage_timing

STAGE = StageCosts(1, 1, 0, {1: stage_timing(1.0, 2.0, 3.0, 1, 1, 1, 1)})
SIZES = [(P, v, k) for P in (1, 2, 3, 4, 5, 8) for v in (2, 3, 4) for k in (1, 2, 3)]


def compilation(name: str, **settings: int) -> Compilation:
    return Compilation(Request(library.source(name), settings), warn=lambda warning: pytest.fail(warning.code))


def figures(name: str, **settings: int) -> Figures:
    """The figures of a schedule without a warning, whose makespan the simulator of programs confirms."""
    compiled = compilation(name, **settings)
    header = compiled.schedule.header
    setting = Setting((STAGE,) * header.stages, Cluster("free", 4096, 1, 1, 0, FREE, FREE, FREE), 1, 1)
    simulated = Simulator(compiled.program, setting).computes
    assert max(end for *_, end in simulated) == compiled.report.makespan
    return compiled.report


# Interleaved 1F1B.


@pytest.mark.parametrize(("P", "v", "k"), part(SIZES, 4))
@pytest.mark.parametrize("hop", [1, 2])
def test_interleaved_1f1b_has_the_bubbles_of_1f1b_over_v(P: int, v: int, k: int, hop: int) -> None:
    """Section 2.2 of the Megatron-LM paper (SC'21): (P-1)(F+B) of idle time, for stages that are 1/v as large."""
    assert figures("interleaved", P=P, v=v, N=k * P, hop=hop).makespan == 3 * v * k * P + 3 * (P - 1)


@pytest.mark.parametrize(("P", "v", "N", "makespan"), [(4, 2, 8, 57), (4, 4, 8, 105), (8, 4, 32, 405)])
@pytest.mark.parametrize("hop", [1, 2])
def test_interleaved_1f1b_at_sizes_that_others_computed(P: int, v: int, N: int, makespan: int, hop: int) -> None:
    assert figures("interleaved", P=P, v=v, N=N, hop=hop).makespan == makespan


@pytest.mark.parametrize(("P", "v", "k"), part(SIZES, 4))
def test_megatrons_order_keeps_more_than_the_leaner_one(P: int, v: int, k: int) -> None:
    """Worker w runs (v-1)P + 2(P-1-w) forwards before it alternates in Megatron-LM, and P-1-w fewer with hop = 1."""
    N, most = k * P, v * k * P
    assert figures("interleaved", P=P, v=v, N=N, hop=2).activations == tuple(
        min((v - 1) * P + 2 * (P - 1 - w) + 1, most) for w in range(P)
    )
    assert figures("interleaved", P=P, v=v, N=N, hop=1).activations == tuple(
        min((v - 1) * P + (P - 1 - w) + 1, most) for w in range(P)
    )


@pytest.mark.parametrize("N", range(3, 14))
@pytest.mark.parametrize(("P", "v", "hop"), [(2, 2, 1), (3, 2, 2), (3, 3, 1)])
def test_evenly_divided_groups_take_what_a_multiple_of_p_takes(P: int, v: int, hop: int, N: int) -> None:
    """For any N from P on, and any groups: none has fewer than P micro-batches."""
    for g in range(P, N + 1):
        makespan = compilation("interleaved", P=P, v=v, N=N, g=g, hop=hop).timeline.makespan
        assert makespan == 3 * v * N + 3 * (P - 1), g


def megatron(rank: int, P: int, v: int, N: int, g: int) -> list[tuple[str, int, int]]:
    """The order of a rank in Megatron-LM (core/pipeline_parallel/schedules.py), written after its description.

    Groups of g micro-batches go through the chunks in turn; after a warm-up of 2(P-1-rank) + (v-1)g forwards a
    forward and a backward alternate; backwards take the chunks the other way round.
    """
    order = [
        (micro, chunk) for start in range(0, N, g) for chunk in range(v) for micro in range(start, min(start + g, N))
    ]
    forwards = [("F", micro, chunk * P + rank) for micro, chunk in order]
    backwards = [("B", micro, (v - 1 - chunk) * P + rank) for micro, chunk in order]
    warm = min(2 * (P - 1 - rank) + (v - 1) * g, len(order))
    steady = [operation for pair in zip(forwards[warm:], backwards, strict=False) for operation in pair]
    return [*forwards[:warm], *steady, *backwards[len(order) - warm :]]


@pytest.mark.parametrize(
    ("P", "v", "N", "g"), [(4, 2, 8, 4), (4, 2, 8, 8), (2, 3, 8, 4), (8, 2, 16, 8), (3, 3, 12, 4), (4, 2, 4, 4)]
)
def test_with_two_turns_a_hop_every_lane_is_megatrons(P: int, v: int, N: int, g: int) -> None:
    lanes = compilation("interleaved", P=P, v=v, N=N, g=g, hop=2).schedule.lanes
    for rank, lane in enumerate(lanes):
        assert [(each.kind.letter, each.micros[0], each.stage) for each in lane] == megatron(rank, P, v, N, g)


@pytest.mark.parametrize("g", [4, 5, 6, 8])
def test_larger_groups_keep_more_and_take_as_long(g: int) -> None:
    of_groups = figures("interleaved", P=4, v=2, N=2 * g, g=g, hop=2)
    assert of_groups.makespan == 3 * 2 * 2 * g + 3 * 3
    assert max(of_groups.activations) == g + 2 * 3 + 1
    assert figures("interleaved", P=4, v=2, N=8, g=8, hop=2).makespan == 57


def without_room() -> str:
    """The scheme in Megatron's order for every N: a last, smaller group gets no room."""
    text = re.sub(r"let .*\n", "", library.source("interleaved").text)
    text = re.sub(r"fn start\(m\).*\n", "fn start(m) = m/g*g\n", text)
    return re.sub(r"fn room\(m\).*\n", "fn room(m) = min(g, N - m/g*g)\n", text)


def test_groups_of_fewer_micro_batches_than_workers_are_refused_with_the_reason() -> None:
    with pytest.raises(TextError) as refused:
        _ = compilation("interleaved", P=4, g=3).plan
    (diagnostic,) = refused.value.diagnostics
    assert isinstance(diagnostic, RequirementFails)
    assert "a worker waits for one that is behind it in its own order" in str(refused.value)


def test_megatrons_order_of_smaller_groups_is_a_cycle() -> None:
    text = re.sub(r"require g >= P.*\n", "", without_room())
    with pytest.raises(TextError) as refused:
        _ = Compilation(Request(Source("small_groups.chim", text), {"P": 4, "g": 3, "hop": 2})).schedule
    assert {type(diagnostic) for diagnostic in refused.value.diagnostics} == {CycleOfClocks}


@pytest.mark.parametrize(("N", "megatrons", "ours"), [(5, 48, 39), (6, 55, 45), (10, 79, 69)])
def test_evenly_divided_groups_take_less_than_megatrons_last_smaller_one(N: int, megatrons: int, ours: int) -> None:
    """P = 4, v = 2. Megatron-LM gives a last, smaller group no room: what comes back is waited for."""
    unroomy = Compilation(Request(Source("unroomy.chim", without_room()), {"P": 4, "v": 2, "N": N, "hop": 2}))
    assert unroomy.report.makespan == megatrons
    lanes = [[(each.kind.letter, each.micros[0], each.stage) for each in lane] for lane in unroomy.schedule.lanes]
    assert lanes == [megatron(rank, 4, 2, N, 4) for rank in range(4)]
    assert figures("interleaved", P=4, v=2, N=N, hop=2).makespan == ours


# Looped breadth-first.


@pytest.mark.parametrize(("P", "v", "k"), part(SIZES, 4))
def test_breadth_first_takes_as_long_as_interleaved_and_keeps_everything(P: int, v: int, k: int) -> None:
    for N in (k * P, k * P + 1):
        breadth_first = figures("breadth_first", P=P, v=v, N=N)
        assert breadth_first.makespan == 3 * v * N + 3 * (P - 1)
        assert breadth_first.activations == (v * N,) * P


@pytest.mark.parametrize("N", [1, 2, 3])
def test_breadth_first_waits_for_the_micro_batches_that_come_back(N: int) -> None:
    """N < P: every worker begins its next stage P later; the last one runs its N."""
    P, v = 4, 2
    assert figures("breadth_first", P=P, v=v, N=N).makespan == 3 * ((v - 1) * P + N + P - 1)


# Waves.


@pytest.mark.parametrize(("P", "w", "N", "makespan"), [(2, 1, 2, 16), (4, 1, 4, 36), (4, 2, 4, 60)])
def test_a_unit_of_waves_takes_the_proven_optimum(P: int, w: int, N: int, makespan: int) -> None:
    """The optima are those of a constraint solver, for Hanayo's placement and whole backwards."""
    assert figures("waves", P=P, w=w, N=N).makespan == makespan


def test_several_units_of_one_wave_take_the_proven_optimum_with_the_longer_hop() -> None:
    assert figures("waves", P=4, w=1, N=8, hop=3).makespan == 57
    assert figures("waves", P=4, w=1, N=4, hop=3).makespan == 36
    assert figures("waves", P=2, w=1, N=2, hop=3).makespan == 16


@pytest.mark.parametrize(("P", "w", "k"), part(product((1, 2, 3, 4, 6, 8), (1, 2, 3), (1, 2, 4)), 4))
def test_units_of_waves_follow_each_other_without_a_bubble(P: int, w: int, k: int) -> None:
    """4(P-1) in all, and no more memory than one unit needs."""
    waves = figures("waves", P=P, w=w, N=k * P)
    assert waves.makespan == 6 * w * k * P + 4 * (P - 1)
    assert max(waves.activations) == 2 * w * P


@pytest.mark.parametrize("P", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("more", [0, 1, 5, 16])
def test_a_longer_hop_saves_a_quarter_of_the_bubbles_of_one_wave_for_half_as_much_memory_again(
    P: int, more: int
) -> None:
    N = 2 * P + more
    waves = figures("waves", P=P, w=1, N=N, hop=3)
    assert waves.makespan == 6 * N + 3 * (P - 1)
    assert max(waves.activations) <= 3 * P


# Two V-shaped pipelines in opposite directions.


@pytest.mark.parametrize(("P", "makespan"), [(2, 12), (4, 28), (6, 44)])
def test_a_unit_of_two_vs_has_p_minus_2_times_two_bubbles(P: int, makespan: int) -> None:
    unit = figures("bitpipe", P=P, N=P)
    assert unit.makespan == makespan == 6 * P + 2 * (P - 2)
    assert (min(unit.activations), max(unit.activations)) == (3 * P // 2 + 1, 2 * P)
    assert unit.weights == (4,) * P


@pytest.mark.parametrize("P", [2, 4, 6, 8])
@pytest.mark.parametrize("k", [2, 3, 8])
def test_units_of_two_vs_follow_each_other_without_a_bubble(P: int, k: int) -> None:
    units = figures("bitpipe", P=P, N=k * P)
    assert units.makespan == 6 * k * P + 2 * (P - 2)
    assert max(units.activations) == 2 * P


@pytest.mark.parametrize(("P", "w", "N"), [(2, 2, 4), (3, 3, 9), (4, 2, 8), (4, 1, 8), (6, 2, 12)])
def test_waves_without_clocks_take_the_least_that_their_placement_allows(P: int, w: int, N: int) -> None:
    """Worker P-1 begins after P-1, computes for 6wN, and 2(P-1) of backwards follow its last operation."""
    assert figures("waves_tight", P=P, w=w, N=N).makespan == 6 * w * N + 3 * (P - 1)
