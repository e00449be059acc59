"""Models that are no chain, in random programs: proven, run whatever happens when, and no mutant accepted in vain."""

import random
from collections.abc import Iterator
from itertools import product

import pytest

from chimera_ir.ir.levels import Plan, Program, Schedule
from chimera_ir.ir.text.printer import show
from chimera_ir.ir.text.reader import parse
from chimera_ir.lower.lower import forwards, order
from chimera_ir.source import Source
from tests.executor import verdicts
from tests.graphs import Edge, plan
from tests.property.mutations import RIGHT, judged, mutants, rules, table
from tests.property.programs import random_graph, with_absent, with_frozen
from tests.property.test_split_backward import lowered, split
from tests.repeatable import also


def on_one_worker() -> Iterator[tuple[str, Plan]]:
    """Graphs with stages on one worker that read the same activations, which some need for longer than others."""
    graphs = {
        "a decoder": ({"encoder": 2, "decoder": 3}, [Edge(1, 2), Edge(1, 3), Edge(1, 4)], [[0, 1, 2, 3, 2]]),
        "a head": ({"image": 1, "head": 1, "text": 3}, [Edge(0, 1), Edge(0, 2), Edge(0, 4)], [[0, 1, 2, 3, 1]]),
    }
    for (name, graph), together in product(graphs.items(), (1, [2, 4, 2, 1, 1])):
        level = parse(Source("one.sir", plan(graph[0], graph[1], 12, graph[2], together=together)))
        assert isinstance(level, Plan)
        yield f"{name}, {together} together", level
        yield f"{name}, {together} together, frozen", with_frozen(level, 0, 1, 4)


def plans() -> Iterator[tuple[str, Plan]]:
    """Random graphs, some with frozen stages, and some without some micro-batches on some groups."""
    for seed in also(range(12), range(12, 60)):
        whole = random_graph(seed)
        yield f"graph {seed}", whole
        rng = random.Random(seed)
        some = rng.sample(range(whole.header.stages), rng.randint(1, whole.header.stages - 1))
        yield f"graph {seed} frozen", with_frozen(whole, *some)
        if (lacking := with_absent(whole, seed)).header.absent:
            yield f"graph {seed} absent", lacking
            yield f"graph {seed} absent frozen", with_frozen(lacking, *some)


def schedules() -> Iterator[tuple[str, Schedule]]:
    for seed, (name, whole) in enumerate(plans()):
        yield name, order(whole)
        if seed % 2:
            yield f"{name}, split in part", split(order(whole), seed, share=0.5)


SCHEDULES = dict(schedules())
PROGRAMS = {name: lowered(schedule) for name, schedule in SCHEDULES.items()}
ON_ONE_WORKER = {name: order(whole) for name, whole in on_one_worker()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_verified_and_runs_whatever_happens_when(name: str) -> None:
    assert rules(PROGRAMS[name]) == set()
    assert verdicts(PROGRAMS[name], seeds=5) == {"finished"}
    assert verdicts(lowered(forwards(SCHEDULES[name])), seeds=2) == {"finished"}


@pytest.mark.parametrize("name", ON_ONE_WORKER)
def test_activations_that_several_stages_of_a_worker_read_stay_until_the_last_of_them_is_done(name: str) -> None:
    for schedule in (ON_ONE_WORKER[name], forwards(ON_ONE_WORKER[name])):
        program = lowered(schedule)
        assert rules(program) == set()
        assert verdicts(program, seeds=5) == {"finished"}


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
