"""The forwards of any schedule alone: verified, run by the executor, and every change of them rejected or harmless."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera_ir.ir.kinds import FORWARD
from chimera_ir.ir.levels import Program, Schedule
from chimera_ir.ir.text.printer import show
from chimera_ir.ir.text.reader import parse
from chimera_ir.lower.lower import forwards, lower, order
from chimera_ir.source import Source
from chimera_ir.verify.verify import verify_lowered, verify_schedule
from tests.executor import verdicts
from tests.property.mutations import RIGHT, judged, mutants, rules
from tests.property.programs import doubled, one_direction, random_plan, two_directions


def evaluated(schedule: Schedule, ahead: int = 1) -> Program:
    checked = verify_schedule(forwards(schedule), None)
    assert not checked.findings.errors
    return verify_lowered(lower(checked.level, ahead, net=checked.net), checked).program


@given(st.integers(0, 10**6), st.integers(0, 3))
def test_the_forwards_of_any_schedule_are_verified_and_run(seed: int, ahead: int) -> None:
    program = evaluated(order(random_plan(seed, 0.0)), ahead)
    assert verdicts(program, seeds=2) == {"finished"}
    assert parse(Source("evaluate.sir", show(program))) == program


@given(st.integers(0, 10**6))
def test_the_forwards_in_any_order_are_lowered_as_well(seed: int) -> None:
    """The order of the schedule that trains: waits for sends follow from when operations run, whatever the order is."""
    schedule = order(random_plan(seed, 0.0))
    lanes = tuple(tuple(replace(each, kind=FORWARD) for each in lane if each.kind.opens) for lane in schedule.lanes)
    checked = verify_schedule(Schedule(forwards(schedule).header, lanes), None)
    program = verify_lowered(lower(checked.level, net=checked.net), checked).program
    assert verdicts(program, seeds=2) == {"finished"}


PROGRAMS = {
    "one direction": evaluated(order(one_direction(3, 4))),
    "two directions": evaluated(order(two_directions(4, 4))),
    "doubled": evaluated(order(doubled(2, 1))),
    **{f"random {seed}": evaluated(order(random_plan(seed, 0.0))) for seed in range(6)},
}

LEFT_OUT = {"no update", "versions", "copies", "not held", "launch order"}
"""Rules about what forwards alone have not."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_mutant_is_rejected_by_the_rule_that_should_or_harmless(name: str) -> None:
    changed = ((f"{name}, {kind}", kind, mutant) for kind, mutant in mutants(PROGRAMS[name], 1))
    score, failures = judged(changed, RIGHT)
    assert not failures, failures[:5]
    assert not {rule for _, rule in score} & LEFT_OUT


def test_a_header_that_has_all_kinds_misses_the_backwards() -> None:
    program = PROGRAMS["one direction"]
    assert "complete, placed" in rules(replace(program, header=replace(program.header, only=())))
