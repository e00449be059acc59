"""The steady period against iterations that are really laid one behind the other, by arithmetic of the tests' own."""

from collections.abc import Iterator, Mapping
from fractions import Fraction

import pytest

import chimera_ir
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.ops import Compute

LONG = 24


Key = tuple[str, int, int]
"""Letter, micro-batch and stage."""


def keys(operation: Compute) -> list[Key]:
    return [(operation.kind.letter, micro, operation.stage) for micro in operation.micros]


def needs(operation: Compute) -> Iterator[Key]:
    """All operations that have to be over before this one, where they are there."""
    for letter, micro, stage in keys(operation):
        match letter:
            case "F":
                yield "F", micro, stage - 1
            case "W":
                yield "I", micro, stage
            case "recompute":
                yield "F", micro, stage
            case _:
                yield from [
                    ("recompute", micro, stage),
                    ("F", micro, stage),
                    ("B", micro, stage + 1),
                    ("I", micro, stage + 1),
                ]


def makespans(schedule: Schedule, duration: Mapping[str, int], count: int) -> list[int]:
    """When 1, 2, .. iterations are over, each worker going on as soon as its weights' gradients are complete."""
    placed = [(stage, worker) for pipe in schedule.header.pipes for stage, worker in enumerate(pipe.workers)]
    stages_of = [{stage for stage, worker in placed if worker == w} for w in workers(schedule)]
    there = {key for lane in schedule.lanes for operation in lane for key in keys(operation)}
    over, free = [], [0] * len(schedule.lanes)
    for _ in range(count):
        ends: dict[Key, int] = {}
        ready, places, summed = list(free), [0] * len(schedule.lanes), dict.fromkeys(range(schedule.header.stages), 0)
        while len(ends) < len(there):
            for worker, lane in enumerate(schedule.lanes):
                while places[worker] < len(lane):
                    operation = lane[places[worker]]
                    wanted = [key for key in needs(operation) if key in there]
                    if not all(key in ends for key in wanted):
                        break
                    letter, stage = operation.kind.letter, operation.stage
                    start = max([ready[worker], *(ends[key] for key in wanted)])
                    ready[worker] = start + duration[letter] * len(operation.micros)
                    ends |= dict.fromkeys(keys(operation), ready[worker])
                    if letter in "BW":
                        summed[stage] = max(summed[stage], ready[worker])
                    places[worker] += 1
        over.append(max(ready))
        free = [max([ready[w], *(summed[s] for s in stages_of[w])]) for w in workers(schedule)]
    return over


def workers(schedule: Schedule) -> range:
    return range(len(schedule.lanes))


CASES = [
    ("gpipe", {"D": 4, "N": 6}),
    ("dapple", {"D": 4, "N": 8}),
    ("dapple", {"D": 4, "N": 2}),
    ("gems", {"D": 4, "N": 5}),
    ("chimera", {"D": 4, "N": 4}),
    ("chimera", {"D": 8, "N": 16, "f": 2}),
    ("chimera_doubling", {"D": 4, "N": 8}),
    ("interleaved", {"P": 4, "v": 2, "N": 6}),
    ("waves", {"P": 4}),
    ("bitpipe", {"P": 4, "N": 8}),
    ("zb_h1", {"D": 4, "N": 8}),
    ("zb_h2", {"D": 4, "N": 8}),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_the_makespan_of_many_iterations_grows_by_the_steady_period(name: str, settings: dict[str, int]) -> None:
    """In the long run: over a whole number of rounds, whatever their number up to the longest that is looked for."""
    compilation = chimera_ir.compile(name, **settings)
    schedule = compilation.schedule
    over = makespans(schedule, {"F": 1, "B": 2, "I": 1, "W": 1, "recompute": 1}, 2 * LONG)
    growth = {Fraction(over[-1] - over[-1 - rounds], rounds) for rounds in range(1, LONG)}
    figures = compilation.report
    assert over[0] == figures.makespan
    assert figures.steady_period in growth
    assert figures.steady_period >= max(figures.work)
    assert over[-1] - len(over) * figures.steady_period <= figures.makespan
    assert abs(Fraction(over[-1], len(over)) - figures.steady_period) <= figures.makespan / LONG


@pytest.mark.parametrize(("name", "spans"), [("zb_h1", (27, 26, 25, 24)), ("zb_h2", (24, 24, 24, 24))])
def test_zero_bubble_is_a_statement_about_a_worker_s_own_span(name: str, spans: tuple[int, ...]) -> None:
    report = chimera_ir.compile(name, D=4, N=8).report
    assert (report.makespan, report.spans) == (27, spans)
    said = report.as_json()
    assert said["spans"] == list(spans)
    assert said["span_bubble_ratio"] == float(1 - Fraction(96, sum(spans)))


def test_a_schedule_without_a_flush_has_no_spans_and_its_makespan_is_its_steady_period() -> None:
    report = chimera_ir.compile("pipedream_2bw").report
    assert report.spans == ()
    assert report.steady_period == report.makespan
    assert "spans" not in report.as_json()
    assert report.as_json()["steady_bubble_ratio"] == 0
