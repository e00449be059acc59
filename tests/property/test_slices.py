"""Slices: whatever the order, a plan ends verified or diagnosed; what is verified runs, and keeps what is counted."""

from hypothesis import given

from chimera_ir.ir.text.printer import show
from chimera_ir.ir.text.reader import parse
from chimera_ir.lower.lower import lower, order
from chimera_ir.source import Source
from chimera_ir.verify.verify import verify_program, verify_schedule
from tests.executor import verdicts
from tests.property.slices import sliced_plans
from tests.property.test_lifetimes import agrees
from tests.repeatable import examples


@examples(300)
@given(sliced_plans)
def test_slices_are_verified_exactly_if_their_program_finishes(plan):
    schedule = order(plan)
    errors = verify_schedule(schedule, None).findings.errors
    program = lower(schedule)
    verdict = verdicts(program, seeds=1)
    assert (verdict == {"finished"}) == (not errors), verdict
    if not errors:
        agrees(schedule)
        text = show(verify_program(program).program)
        assert show(parse(Source("", text))) == text
