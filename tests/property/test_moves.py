"""Moves of memory: a plan in any order ends verified or diagnosed; what is verified runs, and keeps what is counted."""

from hypothesis import given

from chimera_ir.ir.text.printer import show
from chimera_ir.ir.text.reader import parse
from chimera_ir.lower.lower import lower
from chimera_ir.lower.order import order
from chimera_ir.source import Source
from chimera_ir.verify.verify import verify_program, verify_schedule
from tests.executor import verdicts
from tests.property.slices import moving_plans
from tests.property.test_lifetimes import moving_agrees
from tests.repeatable import examples


@examples(60)
@given(moving_plans)
def test_moves_are_verified_exactly_if_their_program_finishes(plan):
    """With slices, split backwards, recomputation and ties; its text reads back, on every level."""
    schedule = order(plan)
    errors = verify_schedule(schedule, None).findings.errors
    program = lower(schedule)
    verdict = verdicts(program, seeds=1)
    assert (verdict == {"finished"}) == (not errors), verdict
    if not errors:
        proven = verify_program(program).program
        moving_agrees(proven)
        for level in (plan, schedule, proven):
            assert parse(Source("", show(level))) == level
