"""Moves of memory: a plan in any order ends verified or diagnosed; what is verified runs, and keeps what is counted."""

import random
from dataclasses import replace
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from chimera_ir.cost.durations import Costs
from chimera_ir.cost.simulate import simulate
from chimera_ir.diagnostics.catalogue.program import NoOrderFits, NoOrderFitsHost
from chimera_ir.diagnostics.model import Rejected
from chimera_ir.ir.kinds import KINDS
from chimera_ir.ir.levels import Bound, Plan, Quantity
from chimera_ir.ir.ops import Unclocked
from chimera_ir.ir.text.printer import show
from chimera_ir.ir.text.reader import parse
from chimera_ir.lower.lower import lower, order
from chimera_ir.orders.ordering import graph_of, scheduled
from chimera_ir.source import Source
from chimera_ir.verify.verify import verify_program, verify_schedule
from tests.executor import verdicts
from tests.property.slices import moving_plans, random_sliced_plan
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


def _unclocked(plan: Plan, rng: random.Random) -> Plan:
    """The plan with clocks for operations of some kinds alone, or for none."""
    clocked = {letter for letter in KINDS if rng.random() < rng.choice([0.0, 0.0, 0.5])}
    operations = (
        planned
        if planned.operation.kind.letter in clocked
        else Unclocked(rng.choice([None, None, rng.randint(0, 9)]), planned.worker, planned.operation)
        for planned in plan.operations
    )
    return replace(plan, operations=tuple(operations))


def _bounded(plan: Plan, limits: dict[Quantity, int]) -> Plan:
    bounds = tuple(Bound(quantity, (limit,) * plan.header.workers) for quantity, limit in limits.items())
    return replace(plan, header=replace(plan.header, bounds=bounds))


@examples(30)
@given(st.integers(0, 10**6))
def test_moves_without_clocks_are_ordered_within_any_bounds_or_the_least_are_stated(seed):
    """With slices, split backwards, recomputation, several pipes, and preferences; under random costs."""
    rng = random.Random(seed)
    plan = _unclocked(random_sliced_plan(seed, 0, 0.7), rng)
    costing = Costs(**{letter: Fraction(rng.randint(1, 3)) for letter in KINDS})
    limits = {quantity: rng.randint(0, 2) for quantity in (Quantity.ACTIVATIONS, Quantity.HOST) if rng.random() < 0.7}
    try:
        schedule = scheduled(_bounded(plan, limits), costing)
    except Rejected as rejected:
        for diagnostic in rejected.diagnostics:
            assert isinstance(diagnostic, NoOrderFits | NoOrderFitsHost)
            quantity = Quantity.HOST if isinstance(diagnostic, NoOrderFitsHost) else Quantity.ACTIVATIONS
            assert diagnostic.peak > limits[quantity]
            limits[quantity] = diagnostic.peak
        schedule = scheduled(_bounded(plan, limits), costing)
    checked = verify_schedule(schedule, None)
    assert not checked.findings.errors
    graph = graph_of(schedule, costing)
    assert graph.makespan(graph.lanes) * graph.tick == simulate(schedule, costing, checked.net).makespan
    for store, amount in zip(graph.instance.stores, graph.peaks(graph.lanes), strict=True):
        assert amount <= limits.get(store.quantity, amount) * schedule.header.units
