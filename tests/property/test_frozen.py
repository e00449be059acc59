"""Frozen stages in random programs: they are proven, run whatever happens when, and no mutant is accepted in vain."""

import random
from collections.abc import Iterator
from itertools import combinations

import pytest

from chimera_ir.cost.report import activations
from chimera_ir.ir.levels import Plan, Program, Schedule
from chimera_ir.ir.ops import AllReduce, Send, Step
from chimera_ir.ir.text.printer import show
from chimera_ir.ir.text.reader import parse
from chimera_ir.lower.lower import forwards, order
from chimera_ir.source import Source
from tests.executor import verdicts
from tests.property.mutations import RIGHT, judged, mutants, rules, table
from tests.property.programs import doubled, one_direction, random_plan, two_directions, with_frozen
from tests.property.slices import offloading, random_sliced_plan, seq1f1b
from tests.property.test_split_backward import lowered, split
from tests.repeatable import also


def plans() -> Iterator[tuple[str, Plan]]:
    """All proper subsets of three stages in one direction, and some in other schemes."""
    for size in (1, 2):
        yield from ((f"one direction {some}", with_frozen(one_direction(3, 4), *some)) for some in _some(3, size))
    yield "two directions 0, 1", with_frozen(two_directions(4, 4), 0, 1)
    yield "two directions 0, 2", with_frozen(two_directions(4, 8), 0, 2)
    yield "doubled 0", with_frozen(doubled(2, 1), 0)
    yield "slices 0", with_frozen(seq1f1b(2, 2, 3), 0)
    yield "slices 1", with_frozen(seq1f1b(3, 2, 2), 1)
    yield "moves 1", with_frozen(offloading(3, 3), 1)
    yield "slices at random 0", with_frozen(random_sliced_plan(3, 0.0), 0)
    for seed in also(range(12), range(12, 40)):
        plan = random_plan(seed, 0.0)
        if stages := plan.header.stages - 1:
            rng = random.Random(seed)
            yield f"random {seed}", with_frozen(plan, *rng.sample(range(stages + 1), rng.randint(1, stages)))


def _some(stages: int, size: int) -> Iterator[tuple[int, ...]]:
    return combinations(range(stages), size)


def schedules() -> Iterator[tuple[str, Schedule]]:
    for seed, (name, plan) in enumerate(plans()):
        yield name, order(plan)
        if not plan.header.moves and plan.header.slices == 1:
            yield f"{name}, split in part", split(order(plan), seed, share=0.5)


SCHEDULES = dict(schedules())
PROGRAMS = {name: lowered(schedule) for name, schedule in SCHEDULES.items()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_verified_and_runs_whatever_happens_when(name: str) -> None:
    assert rules(PROGRAMS[name]) == set()
    assert verdicts(PROGRAMS[name], seeds=5) == {"finished"}
    assert verdicts(lowered(forwards(SCHEDULES[name])), seeds=2) == {"finished"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_prints_and_reads_back(name: str) -> None:
    for level in (SCHEDULES[name], PROGRAMS[name]):
        assert parse(Source("frozen.sir", show(level))) == level


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_frozen_stage_has_no_sum_and_nothing_goes_back_to_the_first_ones(name: str) -> None:
    program = PROGRAMS[name]
    frozen, lines = {*program.header.frozen}, [line for lane in program.lanes for line in lane]
    first = min({*range(program.header.stages)} - frozen)
    assert not any(frozen & {*line.group} for line in lines if isinstance(line, AllReduce | Step))
    messages = [line.message for line in lines if isinstance(line, Send)]
    assert all(message.source < message.target for message in messages if message.target < first)


def test_the_first_stages_keep_nothing() -> None:
    header = PROGRAMS["one direction (0, 1)"].header
    assert header.frozen == (0, 1)
    assert [*activations(PROGRAMS["one direction (0, 1)"])] == [0, 0, 1]
    assert [*activations(PROGRAMS["one direction (1, 2)"])] == [3, 2, 1]


def test_every_mutant_is_rejected_by_the_rule_that_should_or_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    changed = [
        (f"{name}, {kind}", kind, mutant)
        for number, (name, program) in enumerate(PROGRAMS.items())
        for kind, mutant in _mutants(program, number)
    ]
    score, failures = judged(changed, RIGHT)
    with capsys.disabled():
        print(f"\n{table(score)}")
    assert not failures, failures[:5]


def _mutants(program: Program, seed: int) -> list[tuple[str, Program]]:
    return [*mutants(program, seed)]
