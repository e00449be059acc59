"""Streams with several pipes, of which a worker may have no micro-batch in some updates."""

from math import lcm
from random import Random

import pytest

from chimera_ir.ir.kinds import BACKWARD, FORWARD
from chimera_ir.ir.levels import Header, Pipe, Schedule
from chimera_ir.ir.ops import Compute, Micro, Stage, Version, Worker
from chimera_ir.ir.streams import stream_of
from chimera_ir.ir.text.printer import line, show
from chimera_ir.ir.text.reader import parse
from chimera_ir.ir.turns import initial
from chimera_ir.lower.lower import lower
from chimera_ir.source import Source
from chimera_ir.verify.verify import verify_program, verify_schedule
from tests.executor import verdicts
from tests.lowered import scripts_of
from tests.property.test_streams import slow
from tests.repeatable import also
from tests.unit.journal import journals, loaded
from tests.unroller import lowered


def random_stream(random: Random) -> Schedule:
    """A schedule whose pipes take turns; every micro-batch reads weights that are up to two updates late.

    A pipe's operations repeat every ``rate`` clocks, on places and clocks that are drawn so that none is taken twice.
    """
    stages, pipes, per_update = random.randint(1, 3), random.randint(1, 4), random.choice([1, 1, 1, 2, 3])
    drawn = [[random.randrange(4) for _ in range(stages)] for _ in range(pipes)]
    used = sorted({worker for places in drawn for worker in places})
    places = [[used.index(worker) for worker in pipe] for pipe in drawn]
    rate = 2 * max(sum(pipe.count(worker) for pipe in places) for worker in range(len(used))) + random.randint(0, 2)
    busy: list[set[int]] = [set() for _ in used]
    clocks = [_clocks(random, pipe, rate, busy) for pipe in places]
    late, updates = random.randint(0, 2), 8 * lcm(per_update, pipes) // per_update
    total = updates * per_update
    numbers = [tuple(map(Micro, range(pipe, total, pipes))) for pipe in range(pipes)]
    header = Header(
        scheme="stream",
        parameters=(),
        workers=len(used),
        stages=stages,
        micro_batches=total,
        pipes=tuple(Pipe(f"p{p}", tuple(map(Worker, places[p])), numbers[p]) for p in range(pipes)),
        updates=updates,
        period=lcm(per_update, pipes),
    )
    lanes: list[list[tuple[int, Compute]]] = [[] for _ in used]
    for m in range(total):
        pipe, version = m % pipes, Version(max(0, m // per_update - late))
        for place, clock in enumerate(clocks[pipe]):
            kind, s = (FORWARD, place) if place < stages else (BACKWARD, 2 * stages - 1 - place)
            operation = Compute(kind, (Micro(m),), Stage(s), version=version)
            lanes[places[pipe][s]].append((rate * (m // pipes) + clock, operation))
    return Schedule(header, tuple(tuple(each for _, each in sorted(lane, key=lambda one: one[0])) for lane in lanes))


def _clocks(random: Random, places: list[int], rate: int, busy: list[set[int]]) -> list[int]:
    """Of the forwards down the stages, then of the backwards up."""
    clocks, clock = [], random.randint(0, 6)
    for worker in [*places, *reversed(places)]:
        clock += random.randint(0, 2)
        while clock % rate in busy[worker]:
            clock += 1
        busy[worker].add(clock % rate)
        clocks.append(clock)
        clock += 1
    return clocks


def uneven(schedule: Schedule) -> bool:
    """Whether some worker adds nothing to some update of a stage that it holds."""
    header = schedule.header
    added = {
        (worker, each.stage, each.micros[0] // header.per_update)
        for worker, lane in enumerate(schedule.lanes)
        for each in lane
        if each.kind is BACKWARD
    }
    return len(added) < header.updates * sum(map(len, header.holders))


@pytest.mark.parametrize("some", also((0, 1), (2, 3)))
def test_a_legal_stream_has_a_program_that_runs(some: int) -> None:
    seen = []
    for seed in range(150 * some, 150 * some + 150):
        schedule = random_stream(Random(seed))
        checked = verify_schedule(schedule, None)
        if not checked.findings.diagnostics:
            level = lower(stream_of(schedule))
            verify_program(level, checked)
            program = level.view(schedule.header.updates)
            assert program == lowered(schedule), seed
            assert lower(stream_of(schedule), 2, slow).view(schedule.header.updates) == lowered(schedule, 2, slow), seed
            assert verdicts(program, seeds=1) == {"finished"}, seed
            assert parse(Source("stream.sir", show(level))) == level, seed
            seen.append(uneven(schedule))
    assert seen.count(True) >= 5
    assert seen.count(False) >= 20


def test_sums_are_launched_in_an_order_that_repeats_even_if_the_earliest_run_does_not_repeat_yet() -> None:
    """In the middle of the view of these four pipes, the order of the sums is still another one in each turn."""
    schedule = random_stream(Random(2356))
    checked = verify_schedule(schedule, None)
    for duration in (lambda _: 1, slow):
        level = lower(stream_of(schedule), duration=duration)
        verify_program(level, checked)
        assert verdicts(level.view(schedule.header.updates), seeds=1) == {"finished"}


def test_the_script_does_its_lane_for_any_number_of_updates() -> None:
    """What is kept in place of versions below 0 included, however few updates there are."""
    kept = 0
    for seed in range(60):
        schedule = random_stream(Random(seed))
        checked = verify_schedule(schedule, None)
        if checked.findings.diagnostics or not uneven(schedule):
            continue
        level = lower(stream_of(schedule))
        verified = verify_program(level, checked)
        written, header = scripts_of(verified), schedule.header
        for updates in (1, 2, 3, 5, header.updates + 4):
            program = level.view(updates)
            assert verdicts(program, seeds=1) == {"finished"}, (seed, updates)
            for worker, lane in enumerate(program.lanes):
                journal = journals(written)[worker]
                journal.run(loaded(written[f"rank_{worker}.py"]), updates)
                assert journal.lines == [line(each, header) for each in lane], (seed, updates)
        kept += sum(bool(initial(level.header, turn)) for turn in level.turns)
    assert kept >= 3
