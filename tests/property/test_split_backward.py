"""A split backward is two rows of the table of kinds: it lowers, is proven, simulated and printed as the others are.

I  reads a, dx of the stage behind   makes dx, g   frees a
W  reads g                           makes -       frees g   adds to the weights' gradients
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import chain

import pytest

from chimera_ir.cost.durations import Costs
from chimera_ir.cost.report import activations
from chimera_ir.cost.simulate import Timeline, simulate
from chimera_ir.ir.kinds import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from chimera_ir.ir.levels import Plan, Program, Schedule
from chimera_ir.ir.ops import AllReduce, Compute, Micro, Recv, Stage
from chimera_ir.ir.text.printer import show
from chimera_ir.ir.text.reader import parse
from chimera_ir.lower.lower import lower, order
from chimera_ir.source import Source
from chimera_ir.verify.verify import verify_program, verify_schedule
from tests.executor import verdicts
from tests.property.mutations import RIGHT, judged, mutants, rules
from tests.property.programs import one_direction, random_plan, two_directions
from tests.property.test_streams import STREAMS, shown


def split(schedule: Schedule, seed: int, share: float = 1.0) -> Schedule:
    """A share of the backwards in two: the input gradient in its place, the weight gradient anywhere behind it."""
    rng = random.Random(seed)
    return replace(schedule, lanes=tuple(tuple(_split(lane, rng, share)) for lane in schedule.lanes))


def _split(lane: tuple[Compute, ...], rng: random.Random, share: float) -> list[Compute]:
    halves: list[Compute] = []
    for operation in reversed(lane):
        if operation.kind is BACKWARD and rng.random() < share:
            halves.insert(rng.randint(0, min(3, len(halves))), replace(operation, kind=WEIGHT_GRADIENT))
            operation = replace(operation, kind=INPUT_GRADIENT)
        halves.insert(0, operation)
    return halves


def together(schedule: Schedule) -> Schedule:
    """Every backward in two halves, the second right behind the first: a lane that repeats does so still."""
    return replace(schedule, lanes=tuple(tuple(chain.from_iterable(map(_halves, lane))) for lane in schedule.lanes))


def _halves(operation: Compute) -> list[Compute]:
    return [
        replace(operation, kind=kind)
        for kind in ((INPUT_GRADIENT, WEIGHT_GRADIENT) if operation.kind is BACKWARD else (FORWARD,))
    ]


def programs() -> Iterator[tuple[str, Schedule]]:
    plans: dict[str, Plan] = {
        "one direction": one_direction(3, 4),
        "two directions": two_directions(4, 4),
        **{f"random {seed}": random_plan(seed, 0.0) for seed in range(10)},
    }
    for seed, (name, plan) in enumerate(plans.items()):
        yield name, split(order(plan), seed)
        yield f"{name}, in part", split(order(plan), seed, share=0.5)


SCHEDULES = dict(programs())


def lowered(schedule: Schedule) -> Program:
    checked = verify_schedule(schedule, None)
    assert not checked.findings.errors, [each.fill(each.title) for each in checked.findings.diagnostics]
    return verify_program(lower(checked.level), checked).program


@pytest.mark.parametrize("name", SCHEDULES)
def test_it_is_verified_and_runs_whatever_happens_when(name: str) -> None:
    assert verdicts(lowered(SCHEDULES[name]), seeds=5) == {"finished"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_it_prints_and_reads_back(name: str) -> None:
    program = lowered(SCHEDULES[name])
    for level in (SCHEDULES[name], program):
        assert parse(Source("split.sir", show(level))) == level


@pytest.mark.parametrize("stream", STREAMS)
def test_without_a_flush_as_well(stream: str) -> None:
    program = lowered(together(STREAMS[stream].schedule(shown(STREAMS[stream]))))
    assert verdicts(program, seeds=3) == {"finished"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_sum_waits_for_the_last_weight_gradient_and_a_gradient_leaves_before(name: str) -> None:
    for lane in lowered(SCHEDULES[name]).lanes:
        for place, each in enumerate(lane):
            if isinstance(each, AllReduce):
                behind = [
                    later for later in lane[place:] if isinstance(later, Compute) and (later.stage,) == each.group
                ]
                assert not any(later.kind.sums for later in behind)


def zero_bubble(stages: int, micros: int) -> Schedule:
    """ZB-H1: 1F1B, on stage s with the weight gradient of a micro-batch s input gradients late."""
    schedule = order(one_direction(stages, micros))
    lanes = []
    for s, lane in enumerate(schedule.lanes):
        halves: list[Compute] = []
        for each in lane:
            halves.append(replace(each, kind=INPUT_GRADIENT) if each.kind is BACKWARD else each)
            if each.kind is BACKWARD and each.micros[0] >= s:
                halves.append(Compute(WEIGHT_GRADIENT, (Micro(each.micros[0] - s),), each.stage))
        late = (Compute(WEIGHT_GRADIENT, (Micro(m),), Stage(s)) for m in range(max(micros - s, 0), micros))
        lanes.append((*halves, *late))
    return replace(schedule, lanes=tuple(lanes))


@pytest.mark.parametrize(("stages", "micros", "makespan"), [(4, 8, 27), (8, 16, 55)])
def test_zb_h1_takes_what_its_paper_says(stages: int, micros: int, makespan: int) -> None:
    """Zero Bubble Pipeline Parallelism (2024), ZB-H1: N (f + b + w) + (P - 1) max(f, f + b - w), and P on a worker."""
    schedule = zero_bubble(stages, micros)
    lowered(schedule)
    costs = Costs(F=Fraction(1), I=Fraction(1), W=Fraction(1))
    timeline = simulate(schedule, costs)
    assert timeline.makespan == makespan == micros * 3 + stages - 1
    counts = timeline.critical_path.counts
    assert counts["F"] + counts["I"] + counts["W"] == makespan
    assert max(activations(schedule)) == stages


def starts(timeline: Timeline) -> list[list[Fraction]]:
    return [[each.start * timeline.tick for each in lane] for lane in timeline.lanes]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_timeline_is_the_one_found_by_relaxation(name: str) -> None:
    """Every operation starts with the end of the last one that it needs, found by trying until nothing changes."""
    schedule = SCHEDULES[name]
    costs = Costs(F=Fraction(2), B=Fraction(5), I=Fraction(3), W=Fraction(1), recompute=Fraction(2))
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
            start = max((times[v][q] + length(other) for v, q, other in before), default=0)
            if start != times[w][place]:
                times[w][place], stale = Fraction(start), True
    parts = schedule.header.parts
    assert starts(simulate(schedule, costs)) == [[time / parts for time in lane] for lane in times]


def length(operation: Compute) -> int:
    """Of as many parts of a micro-batch as there are."""
    return {"F": 2, "B": 5, "I": 3, "W": 1, "recompute": 2}[operation.kind.letter] * len(operation.micros)


def needs(one: Compute, other: Compute) -> bool:
    """Whether one operation waits for what the other makes; written down apart from the table."""
    if set(one.micros).isdisjoint(other.micros):
        return False
    match one.kind.letter, other.kind.letter:
        case "F", "F":
            return other.stage == one.stage - 1
        case (("B" | "I"), "F"):
            return other.stage == one.stage
        case ("recompute", "F") | (("B" | "I"), "recompute"):
            return other.stage == one.stage
        case (("B" | "I"), ("B" | "I")):
            return other.stage == one.stage + 1
        case "W", "I":
            return other.stage == one.stage
    return False


@pytest.mark.parametrize("name", ["one direction", "two directions, in part", "random 3", "random 7, in part"])
def test_every_mutant_is_rejected_or_harmless(name: str) -> None:
    program = lowered(SCHEDULES[name])
    changed = ((f"{name}, {kind}", kind, mutant) for kind, mutant in mutants(program, 1))
    _, failures = judged(changed, RIGHT)
    assert not failures, failures[:5]


def test_half_a_backward_alone_is_missed_and_both_ways_at_once_are_one_too_many() -> None:
    program = lowered(SCHEDULES["one direction"])
    for letter in "IW":
        lanes = tuple(
            tuple(each for each in lane if not (isinstance(each, Compute) and each.kind.letter == letter))
            for lane in program.lanes
        )
        assert "complete, placed" in rules(replace(program, lanes=lanes))
    whole = Compute(BACKWARD, (Micro(0),), Stage(2))
    lanes = (*program.lanes[:2], (*program.lanes[2], whole))
    assert "complete, placed" in rules(replace(program, lanes=lanes))


def test_a_buffer_is_in_use_until_the_weight_gradient() -> None:
    """What a weight gradient still needs may be the memory that activations and gradients were received into."""
    schedule = zero_bubble(3, 6)
    program = lowered(schedule)
    slots = [max((each.slot for each in lane if isinstance(each, Recv)), default=0) + 1 for lane in program.lanes]
    plain = lower(order(one_direction(3, 6)))
    fewer = [max((each.slot for each in lane if isinstance(each, Recv)), default=0) + 1 for lane in plain.lanes]
    assert slots[2] > fewer[2]
