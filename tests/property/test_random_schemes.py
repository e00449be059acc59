"""Whatever the places and clocks: a plan ends verified or diagnosed, and what is verified runs."""

from hypothesis import given
from hypothesis import strategies as st

from chimera_ir.diagnostics.model import Rejected, raise_errors
from chimera_ir.ir.levels import Plan, Program
from chimera_ir.ir.ops import Recv
from chimera_ir.lower.lower import lower, order
from chimera_ir.verify.verify import schedule_of, verify_program, verify_schedule
from tests.executor import verdicts
from tests.property.programs import plans
from tests.repeatable import examples

_FEW = examples(250)


def compiled(plan: Plan, ahead: int = 1) -> Program | None:
    """The verified program, or none if the plan was diagnosed."""
    schedule = order(plan)
    try:
        raise_errors(verify_schedule(schedule, plan).findings.diagnostics)
    except Rejected:
        return None
    return verify_program(lower(schedule, ahead)).program


@_FEW
@given(plans, st.integers(0, 4))
def test_what_is_verified_finishes_with_every_gradient_summed_once(plan, ahead):
    program = compiled(plan, ahead)
    if program is not None:
        assert verdicts(program, seeds=3) == {"finished"}


@_FEW
@given(plans)
def test_a_schedule_is_acyclic_exactly_if_its_program_finishes(plan):
    schedule = order(plan)
    findings = verify_schedule(schedule, None).findings
    verdict = verdicts(lower(schedule), seeds=2)
    assert (verdict == {"finished"}) == (not findings.errors), (verdict, findings)


@_FEW
@given(plans)
def test_a_clock_that_increases_along_all_data_leaves_no_cycle(plan):
    codes = {each.code for each in verify_schedule(order(plan), plan).findings.diagnostics}
    assert "CH310" not in codes or codes & {"CH301", "CH309"}


@_FEW
@given(plans)
def test_communication_is_erased_without_a_trace(plan):
    schedule = order(plan)
    assert schedule_of(lower(schedule)) == schedule


@_FEW
@given(plans, st.integers(0, 3))
def test_slots_are_numbered_without_gaps(plan, ahead):
    for lane in lower(order(plan), ahead).lanes:
        used = {}
        for each in lane:
            if isinstance(each, Recv):
                used.setdefault((each.message.source, each.message.target), set()).add(each.slot)
        assert all(slots == set(range(len(slots))) for slots in used.values())


@_FEW
@given(plans)
def test_diagnostics_fill_their_templates(plan):
    for each in verify_schedule(order(plan), plan).findings.diagnostics:
        assert all(each.fill(text) for text in (each.title, each.label, each.help))
        assert all(note.text for note in each.notes())
