"""The table of kinds with rows that it does not have yet: values that are read and left, made twice, kept elsewhere."""

import pytest

from chimera_ir.cost.durations import Costs
from chimera_ir.cost.simulate import simulate
from chimera_ir.flow.flow import Flow, preceding
from chimera_ir.ir.kinds import (
    BACKWARD,
    FORWARD,
    FORWARD_ALONE,
    FORWARD_OF_INPUT,
    INPUT_GRADIENT,
    INPUT_GRADIENT_ALONE,
    KEPT,
    KINDS,
    OFFLOAD,
    OFFLOAD_OPERANDS,
    RECOMPUTATION,
    RELOAD,
    RELOAD_OPERANDS,
    WEIGHT_GRADIENT,
    Kind,
    all_kinds,
)
from chimera_ir.ir.levels import Header, Pipe, Plan, Schedule
from chimera_ir.ir.ops import Clock, Compute, Micro, Planned, Stage, Worker, alternatives
from chimera_ir.picture import svg, terminal
from chimera_ir.verify.holdings import KEPT_UNITS
from chimera_ir.verify.messages import conflict_free
from chimera_ir.verify.verify import verify_schedule

PREFETCH = Kind("P", "prefetch", reads=(KEPT,), makes=())


def of_one_stage(*kinds: Kind, recompute: tuple[Stage, ...] = ()) -> Schedule:
    """Two micro-batches, one after the other, each with one operation of each kind."""
    pipe = Pipe("down", (Worker(0),), (Micro(0), Micro(1)), recompute)
    header = Header("test", (), 1, 1, 2, (pipe,), moves=True)
    return Schedule(header, (tuple(Compute(kind, (Micro(micro),), Stage(0)) for micro in range(2) for kind in kinds),))


SPLIT = FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
OPERANDS = OFFLOAD_OPERANDS, RELOAD_OPERANDS
PASSING_AND_MOVING = FORWARD, INPUT_GRADIENT_ALONE, OFFLOAD, RELOAD


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((FORWARD, BACKWARD, OFFLOAD, RELOAD), ((FORWARD, BACKWARD), (FORWARD, BACKWARD, OFFLOAD, RELOAD))),
        # Moves make what they read of one another, in a circle that nothing begins.
        ((FORWARD, BACKWARD, *OPERANDS), ((FORWARD, BACKWARD),)),
        ((*SPLIT, *OPERANDS), (SPLIT, (*SPLIT, *OPERANDS))),
        (
            (FORWARD, FORWARD_OF_INPUT, RECOMPUTATION, BACKWARD),
            ((FORWARD, BACKWARD), (FORWARD_OF_INPUT, RECOMPUTATION, BACKWARD)),
        ),
        ((FORWARD, INPUT_GRADIENT_ALONE, OFFLOAD, RELOAD), ((FORWARD, INPUT_GRADIENT_ALONE), PASSING_AND_MOVING)),
        ((FORWARD_ALONE,), ((FORWARD_ALONE,),)),
        ((PREFETCH, BACKWARD), ()),
        ((FORWARD, PREFETCH, BACKWARD), ((FORWARD, BACKWARD), (FORWARD, PREFETCH, BACKWARD))),
    ],
    ids=["made again", "no operands", "operands", "one kind or another", "frozen", "first", "frees nothing", "left"],
)
def test_the_complete_sets_of_kinds(kinds: tuple[Kind, ...], expected: tuple[tuple[Kind, ...], ...]) -> None:
    assert alternatives(kinds) == expected


def test_a_kind_comes_after_those_that_make_all_that_it_can_read() -> None:
    before = preceding(all_kinds())
    assert before[OFFLOAD] == before[BACKWARD] == frozenset()
    assert before[RELOAD] == {OFFLOAD}
    assert before[WEIGHT_GRADIENT] == {INPUT_GRADIENT}
    assert before[OFFLOAD_OPERANDS] == {INPUT_GRADIENT}
    assert before[RELOAD_OPERANDS] == {INPUT_GRADIENT, OFFLOAD_OPERANDS}
    assert preceding((FORWARD, OFFLOAD, RELOAD))[RELOAD] == {FORWARD, OFFLOAD}


def test_an_operation_reads_what_was_made_last_before_it() -> None:
    schedule = of_one_stage(FORWARD, OFFLOAD, RELOAD, BACKWARD)
    assert not verify_schedule(schedule, None).findings.errors
    (lane,) = schedule.lanes
    assert [*map(Flow(schedule.header, enumerate(lane)).needs, lane)] == [(), (0,), (1,), (2,), (), (4,), (5,), (6,)]


OVERLAPPED = tuple(zip((FORWARD, OFFLOAD) * 2 + (RELOAD,) * 2 + (BACKWARD,) * 2, (0, 0, 1, 1, 0, 1, 0, 1), strict=True))
"""Operations, each with its micro-batch: the transfers of one run while the other computes."""


def overlapped() -> Schedule:
    schedule = of_one_stage()
    return Schedule(schedule.header, (tuple(Compute(kind, (Micro(micro),), Stage(0)) for kind, micro in OVERLAPPED),))


def test_a_transfer_occupies_the_host_link_while_the_lane_computes() -> None:
    """Transfers take 1 each, one after the other, and the lane waits for the first reload alone."""
    schedule = overlapped()
    timeline = simulate(verify_schedule(schedule, None).schedule, Costs())
    lane, link = timeline.tracks
    assert [(track.resource.value, track.worker) for track in timeline.tracks] == [("lane", 0), ("host link", 0)]
    assert [(timed.start, timed.end) for timed in lane.timed] == [(0, 1), (1, 2), (4, 6), (6, 8)]
    assert [(timed.start, timed.end) for timed in link.timed] == [(1, 2), (2, 3), (3, 4), (4, 5)]
    assert (timeline.work, timeline.spans, timeline.makespan) == ((6,), (8,), 8)


def test_pictures_have_a_row_for_a_host_link_that_is_used() -> None:
    timeline = simulate(overlapped(), Costs())
    text = terminal.picture(timeline, 80).plain.splitlines()
    assert [line[:6] for line in text[1:3]] == ["P0    ", "host 0"]
    chart = svg.picture(timeline).chart
    assert [row.name for row in chart.rows] == ["P0", "host 0"]
    assert chart.bottom >= chart.rows[1].y + chart.scale.row
    plain = simulate(of_one_stage(FORWARD, BACKWARD), Costs())
    assert [row.name for row in svg.picture(plain).chart.rows] == ["P0"]


@pytest.mark.parametrize(("second", "conflicts"), [(OFFLOAD, 0), (BACKWARD, 1)])
def test_operations_on_one_clock_conflict_if_they_occupy_the_same(second: Kind, conflicts: int) -> None:
    operations = [Compute(FORWARD, (Micro(0),), Stage(0)), Compute(second, (Micro(0),), Stage(0))]
    plan = Plan(of_one_stage().header, tuple(Planned(Clock(3), Worker(0), each) for each in operations))
    assert len([*conflict_free(plan)]) == conflicts


def test_whatever_a_stage_keeps_is_counted_in_a_column_of_its_own() -> None:
    """A kind that is right in time and wrong in memory would keep a value of a unit that no column has."""
    kept = {value.counted for row in KINDS.values() for value in row.keeps}
    assert kept <= {*KEPT_UNITS}
