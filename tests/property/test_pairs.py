"""A pair is one operation: it waits for what both need, hands on what both make when both are over, has one clock."""

import random
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera_ir.cost.durations import Costs
from chimera_ir.cost.report import activations
from chimera_ir.cost.simulate import simulate
from chimera_ir.ir.levels import Plan, Program, Schedule
from chimera_ir.ir.ops import Compute, Operation, Pair, Planned, Send, WaitRecv
from chimera_ir.ir.text.printer import show
from chimera_ir.ir.text.reader import parse
from chimera_ir.lower.lower import lower, order
from chimera_ir.source import Source, Span
from chimera_ir.verify.verify import schedule_of, verify_program, verify_schedule
from tests.executor import verdicts
from tests.property.mutations import RIGHT, judged, mutants
from tests.property.programs import doubled, one_direction, plans, two_directions
from tests.repeatable import also, examples


def paired(schedule: Schedule, seed: int, share: float = 1.0) -> Schedule:
    """A share of the neighbours in a lane that can be a pair, as one; that may close a circle of waits."""
    rng = random.Random(seed)
    return replace(schedule, lanes=tuple(tuple(_paired(lane, rng, share)) for lane in schedule.lanes))


def _paired(lane: tuple[Operation, ...], rng: random.Random, share: float) -> list[Operation]:
    joined: list[Operation] = []
    for operation in lane:
        pair = _joined(joined[-1], operation) if joined and rng.random() < share else None
        joined = [*joined[:-1], pair] if pair else [*joined, operation]
    return joined


def _joined(one: Operation, other: Operation) -> Pair | None:
    if isinstance(one, Pair) or isinstance(other, Pair) or len(one.micros) != len(other.micros):
        return None
    by_letter = {each.kind.letter: each for each in (one, other)}
    if set(by_letter) != {"F", "B"} or not set(one.micros).isdisjoint(other.micros):
        return None
    return Pair(by_letter["F"], by_letter["B"], one.origin)


def late(stages: int, micros: int) -> Schedule:
    """1F1B with its clock in turns of two, one turn from stage to stage, so that neighbours in a lane can be pairs."""
    planned = []
    plan = one_direction(stages, micros)
    for clock, worker, operation in plan.operations:
        m, s = operation.micros[0], operation.stage
        later = 2 * (m + s) if operation.kind.letter == "F" else 2 * (m + 2 * stages - s) + 1
        planned.append(Planned(type(clock)(later), worker, operation))
    return order(Plan(plan.header, tuple(planned)))


SCHEDULES = {
    "one direction": paired(late(3, 8), 0),
    "one direction, in part": paired(late(4, 9), 1, 0.5),
    "two directions": paired(order(two_directions(4, 8)), 2, 0.3),
    "groups": paired(order(doubled(4, 2)), 3),
}


def pairs(schedule: Schedule) -> list[Pair]:
    return [each for lane in schedule.lanes for each in lane if isinstance(each, Pair)]


def sound(schedule: Schedule) -> bool:
    return not verify_schedule(schedule, None).findings.errors


def lowered(schedule: Schedule) -> Program:
    return verify_program(lower(schedule)).program


@pytest.mark.parametrize("name", ["one direction", "one direction, in part"])
def test_pairs_are_lowered_verified_and_run(name: str) -> None:
    schedule = SCHEDULES[name]
    assert pairs(schedule)
    program = lowered(schedule)
    assert verdicts(program, seeds=8) == {"finished"}
    assert schedule_of(program) == schedule


@examples(200)
@given(plans, st.integers(0, 2**32), st.sampled_from([0.2, 0.6, 1.0]))
def test_random_pairs_are_rejected_exactly_if_their_program_gets_stuck(plan: Plan, seed: int, share: float) -> None:
    schedule = paired(order(plan), seed, share)
    verdict = verdicts(lower(schedule), seeds=2)
    assert (verdict == {"finished"}) == sound(schedule)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_and_programs_with_pairs_read_back(name: str) -> None:
    schedule = SCHEDULES[name]
    assert parse(Source("", show(schedule))) == schedule
    if sound(schedule):
        program = lowered(schedule)
        assert parse(Source("", show(program))) == program


def test_a_plan_with_pairs_reads_back_and_has_one_clock_for_both() -> None:
    schedule = SCHEDULES["one direction"]
    planned = tuple(
        Planned(place, worker, operation)
        for worker, lane in enumerate(schedule.lanes)
        for place, operation in enumerate(lane)
    )
    plan = Plan(schedule.header, planned)
    assert parse(Source("", show(plan))) == plan
    assert order(plan) == schedule
    assert not verify_schedule(order(plan), plan).findings.errors


def test_both_wait_before_and_send_behind_a_pair() -> None:
    for lane in lowered(SCHEDULES["one direction"]).lanes:
        for place, each in enumerate(lane):
            if not isinstance(each, Pair):
                continue
            ahead = [line.message.micros for line in lane[:place] if isinstance(line, WaitRecv)]
            behind = [line.message.micros for line in lane[place:] if isinstance(line, Send)]
            stage = each.forward.stage
            assert stage == 0 or each.forward.micros in ahead
            assert stage == 2 or each.backward.micros in ahead
            assert stage == 2 or each.forward.micros in behind
            assert stage == 0 or each.backward.micros in behind


@pytest.mark.parametrize("cost", [None, Fraction(5), Fraction(9)])
@pytest.mark.parametrize("name", ["one direction", "one direction, in part"])
def test_the_timeline_is_the_one_found_by_relaxation(name: str, cost: Fraction | None) -> None:
    """Every operation starts with the end of the last one that it needs, found by trying until nothing changes."""
    schedule = SCHEDULES[name]
    costs = Costs(F=Fraction(2), B=Fraction(5), **({} if cost is None else {"pair": cost}))
    lengths = {"F": 2, "B": 5, "pair": cost or 7}
    times = [[Fraction(0)] * len(lane) for lane in schedule.lanes]
    everywhere = [(w, place, each) for w, lane in enumerate(schedule.lanes) for place, each in enumerate(lane)]
    behind = []
    for w, place, each in everywhere:
        before = [(v, q, other) for v, q, other in everywhere if needs(each, other)]
        before += [(w, place - 1, schedule.lanes[w][place - 1])] if place else []
        behind.append((w, place, before))
    stale = True
    while stale:
        stale = False
        for w, place, before in behind:
            start = max((times[v][q] + lengths[letter(other)] for v, q, other in before), default=0)
            if start != times[w][place]:
                times[w][place], stale = Fraction(start), True
    timeline = simulate(schedule, costs)
    assert [[each.start * timeline.tick for each in lane] for lane in timeline.lanes] == times
    counts = timeline.critical_path.counts
    assert sum(counts[key] * lengths[key] for key in counts) == timeline.makespan
    assert timeline.clock_span == simulate(schedule, Costs(B=Fraction(1), pair=Fraction(1))).makespan


def letter(operation: Operation) -> str:
    return "pair" if isinstance(operation, Pair) else operation.kind.letter


def singly(operation: Operation) -> list[Compute]:
    return [operation.forward, operation.backward] if isinstance(operation, Pair) else [operation]


def needs(one: Operation, other: Operation) -> bool:
    """Whether one operation waits for what the other makes; written down apart from the table."""
    return any(_needs(a, b) for a in singly(one) for b in singly(other))


def _needs(one: Compute, other: Compute) -> bool:
    if set(one.micros).isdisjoint(other.micros):
        return False
    match one.kind.letter, other.kind.letter:
        case "F", "F":
            return other.stage == one.stage - 1
        case "B", "F":
            return other.stage == one.stage
        case "B", "B":
            return other.stage == one.stage + 1
    return False


def test_what_both_keep_is_there_at_once() -> None:
    """1F1B frees before it keeps; a pair of the same two keeps one more micro-batch meanwhile."""
    plain, joined = late(3, 8), SCHEDULES["one direction"]
    assert activations(joined) >= activations(plain)
    lane = joined.lanes[0]
    alive, most = 0, 0
    for each in lane:
        alive += letter(each) in ("F", "pair")
        most = max(most, alive)
        alive -= letter(each) in ("B", "pair")
    assert activations(joined)[0] == most


CHANGED = {"two stages": paired(late(2, 6), 0), "three stages, in part": paired(late(3, 8), 3, 0.5)}
"""Schedules with pairs on each of their workers."""


@pytest.mark.parametrize("name", also(CHANGED, ["one direction", "one direction, in part"]))
def test_every_mutant_is_rejected_or_harmless(name: str) -> None:
    schedule = (CHANGED | SCHEDULES)[name]
    assert all(any(isinstance(each, Pair) for each in lane) for lane in schedule.lanes)
    program = lowered(schedule)
    changed = ((f"{name}, {kind}", kind, mutant) for kind, mutant in mutants(program, 1))
    _, failures = judged(changed, RIGHT)
    assert not failures, failures[:5]


def test_a_pair_of_one_micro_batch_waits_for_itself() -> None:
    schedule = SCHEDULES["one direction"]
    first = next(each for each in schedule.lanes[2] if isinstance(each, Pair))
    same = replace(first, backward=replace(first.backward, micros=first.forward.micros), origin=Span(0, 1))
    lanes = (*schedule.lanes[:2], tuple(same if each is first else each for each in schedule.lanes[2]))
    findings = verify_schedule(replace(schedule, lanes=lanes), None).findings
    assert findings.errors
    assert "CH283" in {each.code for each in findings.diagnostics}
