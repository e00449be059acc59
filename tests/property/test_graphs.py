"""Models that are no chain, in random programs: proven, run whatever happens when, and no mutant accepted in vain."""

import random
from collections.abc import Iterator

import pytest

from chimera_ir.ir.levels import Plan, Program, Schedule
from chimera_ir.ir.text.printer import show
from chimera_ir.ir.text.reader import parse
from chimera_ir.lower.lower import forwards, order
from chimera_ir.source import Source
from tests.executor import verdicts
from tests.property.mutations import RIGHT, judged, mutants, rules, table
from tests.property.programs import random_graph, with_absent, with_frozen
from tests.property.test_split_backward import lowered, split
from tests.repeatable import also


def plans() -> Iterator[tuple[str, Plan]]:
    """Random graphs, some with frozen stages, and some without some micro-batches on some groups."""
    for seed in also(range(12), range(12, 60)):
        plan = random_graph(seed)
        yield f"graph {seed}", plan
        rng = random.Random(seed)
        some = rng.sample(range(plan.header.stages), rng.randint(1, plan.header.stages - 1))
        yield f"graph {seed} frozen", with_frozen(plan, *some)
        if (lacking := with_absent(plan, seed)).header.absent:
            yield f"graph {seed} absent", lacking
            yield f"graph {seed} absent frozen", with_frozen(lacking, *some)


def schedules() -> Iterator[tuple[str, Schedule]]:
    for seed, (name, plan) in enumerate(plans()):
        yield name, order(plan)
        if seed % 2:
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
        assert parse(Source("graph.sir", show(level))) == level


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
