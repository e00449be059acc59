"""Whatever the places and clocks: a plan ends verified or diagnosed, and what is verified runs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from chimera_ir.diagnostics.model import Rejected, Severity, raise_errors
from chimera_ir.ir.levels import Plan, Program
from chimera_ir.ir.ops import Recv
from chimera_ir.lower.lower import lower
from chimera_ir.lower.order import order
from chimera_ir.verify.erase import schedule_of
from chimera_ir.verify.verify import verify_plan, verify_program, verify_schedule
from tests.executor import verdicts
from tests.property.programs import plans

_FEW = settings(max_examples=250, deadline=None)


def compiled(plan: Plan, ahead: int = 1) -> Program | None:
    """The verified program, or none if the plan was diagnosed."""
    schedule = order(plan)
    try:
        raise_errors((*verify_plan(plan), *verify_schedule(schedule, plan)))
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
    cyclic = [each for each in verify_schedule(schedule, plan) if each.severity is Severity.ERROR]
    verdict = verdicts(lower(schedule), seeds=2)
    assert (verdict == {"finished"}) == (not cyclic), (verdict, cyclic)


@_FEW
@given(plans)
def test_a_clock_that_increases_along_all_data_leaves_no_cycle(plan):
    found = verify_plan(plan)
    if not found:
        assert verify_schedule(order(plan), plan) == ()


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
    for each in (*verify_plan(plan), *verify_schedule(order(plan), plan)):
        assert all(each.fill(text) for text in (each.title, each.label, each.help))
        assert all(note.text for note in each.notes())
