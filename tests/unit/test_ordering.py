"""Operations without clocks: what a list schedule makes of them, beside clocks, under costs and under bounds."""

from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import Any

import pytest

import chimera_ir
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.simulate import simulate
from chimera_ir.diagnostics.catalogue.program import NoOrderFits, NoTurnFound
from chimera_ir.diagnostics.model import Rejected
from chimera_ir.elaborate.elaborate import elaborate
from chimera_ir.flow import live
from chimera_ir.ir.levels import Bound, Plan, Quantity, Schedule
from chimera_ir.ir.text.printer import line, show
from chimera_ir.ir.text.reader import parse as parse_ir
from chimera_ir.orders.ordering import scheduled
from chimera_ir.source import Source
from chimera_ir.syntax.parser import parse
from chimera_ir.verify.verify import verify_schedule

UNIT = Costs()
EQUAL = Costs(F=Fraction(1), I=Fraction(1), W=Fraction(1))


def plan_of(lines: str, stages: str = "stages s in 0..P on s", bound: str = "", **settings: int) -> Plan:
    """The plan of a scheme of one pipe on P workers with N micro-batches."""
    text = f"scheme mine(P = 4, N = 8)\nworkers P\n{bound}\npipe p {{\n{stages}\nmicros m in 0..N\n{lines}\n}}"
    plan, warnings = elaborate(parse(Source("", text)), settings, 100_000)
    assert warnings == ()
    return plan


WAVES = "stages s in 0..2*P on min(s, 2*P-1 - s)"
WHOLE = "F(m, s)\nB(m, s) prefer m"
SPLIT = "F(m, s)\nI(m, s)\nW(m, s)"


def verified(plan: Plan, costing: Costs = UNIT) -> Schedule:
    schedule = scheduled(plan, costing)
    assert verify_schedule(schedule, plan).findings.diagnostics == ()
    return schedule


def lane(schedule: Schedule, worker: int) -> list[str]:
    return [line(operation, schedule.header) for operation in schedule.lanes[worker]]


@pytest.mark.parametrize(("micros", "makespan"), [(4, 36), (8, 65), (16, 110), (32, 213)])
def test_a_list_schedule_of_waves_takes_as_long_as_that_of_an_independent_simulator(micros: int, makespan: int) -> None:
    schedule = verified(plan_of(WHOLE, WAVES, N=micros))
    assert simulate(schedule, UNIT).makespan == makespan


@pytest.mark.parametrize(
    ("lines", "costing", "settings", "makespan"),
    [
        (SPLIT, EQUAL, {"bound": "memory activations <= 4", "P": 4, "N": 8}, 59),
        (SPLIT, EQUAL, {"bound": "memory activations <= 8", "P": 4, "N": 8}, 51),
        ("F(m, s)\nB(m, s)", UNIT, {"P": 2, "N": 2}, 16),
        ("F(m, s)\nB(m, s)", UNIT, {"P": 4, "N": 4}, 36),
        ("F(m, s)\nB(m, s)", UNIT, {"P": 4, "N": 8}, 57),
        ("F(m, s)\nB(m, s)", UNIT, {"P": 8, "N": 8}, 76),
    ],
)
def test_an_order_there_and_back_is_as_short_as_a_solver_proves_possible(
    lines: str, costing: Costs, settings: dict[str, Any], makespan: int
) -> None:
    """Optima of a model of CP-SAT that shares nothing with the compiler; where memory is short, a timetable has one."""
    schedule = verified(plan_of(lines, WAVES, **settings), costing)
    assert simulate(schedule, costing).makespan == makespan


@pytest.mark.parametrize("limit", [4, 5])
def test_many_micro_batches_take_little_more_than_their_work_where_memory_has_room_for_that(limit: int) -> None:
    """Worker 0 works 6 for each, and keeps its two stages for 8 + 8 + 1 and 3 at least: 20, less than 6 times 4."""
    schedule = verified(plan_of(SPLIT, WAVES, f"memory activations <= {limit}", N=100), EQUAL)
    assert 600 < simulate(schedule, EQUAL).makespan < 618


def test_weight_gradients_fill_what_clocks_leave_free() -> None:
    """Split backwards of 1F1B: clocks for F and I, none for W; by hand for two workers and three micro-batches."""
    clocks = "F(m, s) @ 2*m + s\nI(m, s) @ 2*m + 2*P-1 - s\nW(m, s)"
    schedule = verified(plan_of(clocks, P=2, N=3), EQUAL)
    first = ["F m0", "F m1", "I m0", "F m2", "I m1", "W m0", "I m2", "W m1", "W m2"]  # W m0 while I m2 s1 runs
    last = ["F m0", "I m0", "F m1", "I m1", "F m2", "I m2", "W m0", "W m1", "W m2"]
    assert lane(schedule, 0) == [f"{operation} s0" for operation in first]
    assert lane(schedule, 1) == [f"{operation} s1" for operation in last]


def test_what_a_line_prefers_runs_first() -> None:
    last_first = verified(plan_of("F(m, s) prefer -m\nB(m, s) prefer -100"))
    assert lane(last_first, 0)[:4] == [f"F m{m} s0" for m in (7, 6, 5, 4)]
    # A preference comes before none: forwards before backwards, which a list schedule would take first.
    assert lane(verified(plan_of("F(m, s) prefer 0\nB(m, s)")), 3)[:8] == [f"F m{m} s3" for m in range(8)]


def test_costs_decide_the_order() -> None:
    lines = "F(m, s)\nB(m, s)"
    slow = Costs(B=Fraction(10))
    assert lane(verified(plan_of(lines)), 1) != lane(verified(plan_of(lines), slow), 1)


MOVING = "F(m, s)\noffload(m, s) when s < P-1\nreload(m, s) when s < P-1\nB(m, s)"


@pytest.mark.parametrize("bound", ["memory activations <= 3", "memory host <= 2", "memory activations <= 1"])
@pytest.mark.parametrize("clocked", [False, True])
def test_moves_without_clocks_keep_the_bounds_of_a_chain(bound: str, clocked: bool) -> None:
    """With room for 3 no time is lost: 3 N + 3 (D-1), as long as 1F1B without moves and bounds; with less some is."""
    lines = MOVING.replace("F(m, s)", "F(m, s) @ 2*m + s").replace("B(m, s)", "B(m, s) @ 2*m + 2*P-1 - s")
    schedule = verified(plan_of(lines if clocked else MOVING, bound=bound))
    makespan = simulate(schedule, UNIT).makespan
    assert makespan > 33 if bound == "memory activations <= 1" else makespan == 33


def test_a_reload_is_launched_beside_the_last_operation_before_its_backward() -> None:
    """1F1B of two workers: stage 0 runs F0 F1 B0 F2 B1 B2, with moves as early as they are useful."""
    lines = MOVING.replace("F(m, s)", "F(m, s) @ 2*m + s").replace("B(m, s)", "B(m, s) @ 2*m + 2*P-1 - s")
    schedule = verified(plan_of(lines, P=2, N=3))
    moving = "F0 offload0 F1 offload1 reload0 B0 reload1 F2 offload2 B1 reload2 B2"
    assert [step.replace(" m", "").replace(" s0", "") for step in lane(schedule, 0)] == moving.split()


def test_the_order_of_lines_is_not_that_of_moves() -> None:
    """A backward waits for its reload also where the line of the forward is the last."""
    verified(plan_of("\n".join(reversed(MOVING.split("\n"))), bound="memory host <= 2"))


def random_plan(random: Random) -> Plan:
    """A small plan without clocks, with stages on random workers and perhaps a second pipe, slices, pairs of stages."""
    workers, stages = random.randint(1, 3), random.randint(1, 5)
    places = [*range(workers), *(random.randrange(workers) for _ in range(stages))][: max(stages, workers)]
    on = " + ".join(f"{worker}*(if s == {s} then 1 else 0)" for s, worker in enumerate(places))
    lines = random.choice(["F(m, s)\nB(m, s)", SPLIT, "F(m, s)\nB(m, s)\nrecompute when s % 2 == 0"])
    if random.random() < 0.3:
        lines = "slices q in 0..2\n" + lines.replace("(m, s)", "(m, s, q)")
    micros = random.randint(1, 5)
    return plan_of(lines, f"stages s in 0..{len(places)} on {on}", P=workers, N=micros)


def bounded(plan: Plan, limit: int) -> Plan:
    bound = Bound(Quantity.ACTIVATIONS, (limit,) * plan.header.workers)
    return replace(plan, header=replace(plan.header, bounds=(bound,)))


def stream_of(lines: str, micros: int, age: int, **costs: int) -> chimera_ir.Compilation:
    """A scheme without a flush on a V of stages, or with one stage on each of four workers if no costs are given."""
    places = "0..6 on s % 3" if costs else "0..4 on s"
    text = f"""scheme mine()
workers {3 if costs else 4}
memory activations <= 8
update every {micros}
pipe p {{ stages s in {places}
micros m in 0..
reads version max(0, m/{micros} - {age})
{lines} }}"""
    return chimera_ir.compile(Source("mine.chim", text), options=chimera_ir.Options(costs=costs))


def test_turns_without_clocks_are_those_of_a_scheme_with_clocks() -> None:
    """With a preference for forwards that are due, 1F1B without a flush; its period is the work of a worker."""
    compilation = stream_of("F(m, s) prefer m\nB(m, s) prefer m - 1", 4, 1)
    stream = compilation.schedule
    assert (stream.header.period, compilation.report.makespan, compilation.report.bubble_ratio) == (4, 12, 0)
    assert compilation.verified.weights == (2, 2, 2, 2)
    again = chimera_ir.compile(Source("mine.sir", show(compilation.plan)))
    assert again.schedule == stream


def test_a_turn_may_be_longer_than_that_of_the_formulas() -> None:
    compilation = stream_of("F(m, s)\nI(m, s)\nW(m, s)", 3, 3, F=3, W=2)
    assert compilation.schedule.header.period > 3
    assert compilation.verified


def test_an_order_that_does_not_repeat_is_refused() -> None:
    with pytest.raises(chimera_ir.errors.TextError) as refused:
        _ = stream_of("F(m, s)\nB(m, s)", 3, 3, F=2, B=2).schedule
    (diagnostic,) = refused.value.diagnostics
    assert isinstance(diagnostic, NoTurnFound)


def test_a_plan_without_clocks_has_a_text() -> None:
    plan = plan_of("F(m, s) @ 2*m + s\nI(m, s) prefer m - 3\nW(m, s)", P=2, N=2)
    text = show(plan)
    assert "  F m1 s0 @ 2 on w0\n" in text
    assert "  I m1 s0 prefer -2 on w0\n" in text
    assert "  W m1 s0 on w0\n" in text
    assert parse_ir(Source("", text)) == plan
    assert scheduled(parse_ir(Source("", text)), UNIT) == scheduled(plan, UNIT)


@pytest.mark.parametrize("seed", range(40))
def test_any_order_under_any_bound_verifies_or_the_least_bound_is_stated(seed: int) -> None:
    """The least bound is that of one micro-batch after another: where it turns, a worker keeps all its stages.

    Stages that recompute keep their inputs alone until then.
    """
    random = Random(seed)
    plan = random_plan(random)
    with pytest.raises(Rejected) as rejected:
        scheduled(bounded(plan, 0), UNIT)
    (diagnostic,) = rejected.value.diagnostics
    assert isinstance(diagnostic, NoOrderFits)
    held = max(map(len, plan.header.stages_of))
    assert diagnostic.peak == held or (plan.header.recomputing and diagnostic.peak < held)
    for limit in range(1, diagnostic.peak):
        with pytest.raises(Rejected):
            scheduled(bounded(plan, limit), UNIT)
    for limit in range(diagnostic.peak, diagnostic.peak + 3):
        schedule = verified(bounded(plan, limit))
        assert max(live.whole(schedule.header, live.activations(schedule))) <= limit
