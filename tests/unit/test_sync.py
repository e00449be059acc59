"""Section 3.2: when the gradients of a stage are summed over its replicas."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera_ir.cost.durations import Costs
from chimera_ir.cost.host_plan import launches
from chimera_ir.cost.simulate import simulate, ticks
from chimera_ir.diagnostics.model import Rejected, raise_errors
from chimera_ir.elaborate.elaborate import elaborate
from chimera_ir.ir.kinds import BACKWARD
from chimera_ir.ir.levels import Plan, Program, Strategy
from chimera_ir.ir.ops import AllReduce, Compute, Stage
from chimera_ir.ir.text.printer import show
from chimera_ir.ir.text.reader import parse as parse_ir
from chimera_ir.lower.lower import lower, order
from chimera_ir.source import Source
from chimera_ir.syntax.parser import parse
from chimera_ir.verify.verify import verify_program, verify_schedule
from tests.executor import verdicts
from tests.instructions import what
from tests.property.programs import one_direction, plans, two_directions
from tests.repeatable import examples

PLAIN = Costs()


def lowered(plan: Plan, costs: Costs = PLAIN) -> Program:
    _, duration = ticks(plan.header, costs)
    return lower(order(plan), duration=duration)


def asking(plan: Plan, strategy: Strategy, *stages: int) -> Plan:
    wishes = tuple((Stage(stage), strategy) for stage in stages)
    return replace(plan, header=replace(plan.header, strategies=wishes))


def overtaken(program: Program) -> list[dict[int, int]]:
    """For each worker and stage, how many operations the worker still runs after the launch of the stage's sum."""
    found = []
    for lane in program.lanes:
        compute = [isinstance(instruction, Compute) for instruction in lane]
        found.append({i.group[0]: sum(compute[at:]) for at, i in enumerate(lane) if isinstance(i, AllReduce)})
    return found


def test_section_3_2_example_end_stages_eagerly_middle_stages_not() -> None:
    first, *middle, last = overtaken(lowered(two_directions(4, 4)))
    assert first == last == {3: 2, 0: 0}, "P0 and P3 launch stage 3 while they have two backwards to go"
    assert middle == [{2: 0, 1: 0}] * 2, "P1 and P2 have no bubble after stage 2"


def test_eager_is_right_after_the_last_backward_of_the_stage() -> None:
    for lane in lowered(asking(two_directions(4, 4), Strategy.EAGER, 0, 1, 2, 3)).lanes:
        for at, instruction in enumerate(lane):
            if isinstance(instruction, AllReduce):
                before = next(i for i in reversed(lane[:at]) if isinstance(i, Compute))
                assert what(before) is BACKWARD
                assert (before.stage,) == instruction.group


def test_lazy_is_after_all_compute() -> None:
    for lane in overtaken(lowered(asking(two_directions(4, 4), Strategy.LAZY, 0, 1, 2, 3))):
        assert set(lane.values()) == {0}


def test_whether_there_is_a_bubble_depends_on_the_costs() -> None:
    uneven = overtaken(lowered(two_directions(4, 8), Costs()))
    even = overtaken(lowered(two_directions(4, 8), Costs().using("B", "1")))
    assert uneven[1][2] == 0
    assert even[0] == uneven[0], "the flush leaves the end stages their bubble"


def test_launches_are_told_with_the_free_regions_of_figure_6() -> None:
    plan = two_directions(6, 6)
    program = lowered(plan)
    told = {(each.worker, each.group[0]): each for each in launches(program, simulate(order(plan), Costs()))}
    end = told[0, 5]
    assert (end.at, end.free, end.flush) == (14, 6, 0), "12 + 14 - 5D+4: regions (a) and (b) of P0 for N=D=6"
    assert told[0, 0].free == 0
    assert told[2, 2].flush == told[3, 2].flush == 4, "region (c) of the middle workers"


@pytest.mark.parametrize("strategy", [Strategy.LAZY, Strategy.EAGER])
def test_strategies_read_back(strategy: Strategy) -> None:
    program = lowered(asking(two_directions(4, 4), strategy, 0, 2, 3))
    assert f"sync {strategy.value} 0..1 2..4" in show(program)
    assert parse_ir(Source("x.sir", show(program))) == program


def test_the_last_clause_that_speaks_of_a_stage_counts() -> None:
    text = """scheme a(D = 4) pipe p { stages s in 0..D on s  micros m in 0..2  sync lazy  sync eager when s > 1
              F(m, s) @ 2*m + s  B(m, s) @ 2*m + 2*D-1 - s }"""
    plan, _ = elaborate(parse(Source("a.chim", text)), {}, 1000)
    assert [plan.header.strategy((Stage(s),)).value for s in range(4)] == ["lazy", "lazy", "eager", "eager"]


@examples(250)
@given(plans, st.lists(st.sampled_from(Strategy), min_size=4, max_size=4), st.integers(1, 3))
def test_any_mixture_of_strategies_is_proven_and_finishes(plan, strategies, cost) -> None:
    wishes = [(Stage(s), strategies[s % 4]) for s in range(plan.header.stages)]
    asked = tuple(wish for wish in wishes if wish[1] is not Strategy.EAGER_OPT)
    plan = replace(plan, header=replace(plan.header, strategies=asked))
    try:
        raise_errors(verify_schedule(order(plan), plan).findings.diagnostics)
    except Rejected:
        return
    program = verify_program(lowered(plan, Costs().using("B", str(cost)))).program
    assert verdicts(program, seeds=2) == {"finished"}


def test_one_direction_without_bubbles_at_its_end_is_lazy_everywhere() -> None:
    assert all(set(lane.values()) == {0} for lane in overtaken(lowered(one_direction(4, 8))))
