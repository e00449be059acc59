"""Durations of a profile: the timeline is the replay with free communication, whatever stages take; all is proven."""

from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera_ir.cost.simulate import Timeline, simulate, ticks
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.predict.replay import replay
from chimera_ir.predict.setting import Measured, Setting
from chimera_ir.profile.cluster import FREE
from chimera_ir.verify.verify import schedule_of, verify_program
from tests.lowered import level, lowered
from tests.property.streams import random_stream
from tests.property.test_replay import SEEDS, STREAMS, operations, random_program, random_setting


def free(header: Header, random: Random) -> Setting:
    """Stages of any times in whole seconds; nothing else takes any."""
    found = random_setting(header, random)
    cluster = replace(found.cluster, between=FREE, within=FREE, sums=FREE)
    return replace(found, stages=tuple(replace(stage, step=0.0) for stage in found.stages), cluster=cluster)


def assert_costs_add_up(timeline: Timeline) -> None:
    path = timeline.critical_path
    costs = dict(timeline.costs.report_costs(timeline.header, path.operations))
    assert timeline.makespan == sum(costs.get(kind, 0) * count for kind, count in path.counts.items())


@settings(max_examples=150, deadline=None)
@given(SEEDS)
def test_the_timeline_of_a_profile_is_its_replay_with_free_communication(seed: int) -> None:
    program = random_program(seed)
    setting = free(program.header, Random(seed))
    timeline = simulate(schedule_of(program), Measured.of(setting))
    assert operations(replay(program, setting)) == {
        (worker, operation, start * timeline.tick, end * timeline.tick)
        for worker, lane in enumerate(timeline.lanes)
        for operation, start, end in lane
    }
    assert_costs_add_up(timeline)


@pytest.mark.parametrize("name", STREAMS)
def test_so_it_is_without_a_flush(name: str) -> None:
    schedule = STREAMS[name].schedule(2 * STREAMS[name].turns + 3)
    setting = free(schedule.header, Random(name))
    timeline = simulate(schedule, Measured.of(setting))
    assert replay(lowered(schedule), setting).seconds == timeline.makespan
    assert_costs_add_up(timeline)


def proven(schedule: Schedule, setting: Setting) -> None:
    _, duration = ticks(schedule.header, Measured.of(setting))
    verify_program(level(schedule, duration=duration))


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_whatever_stages_take_the_launches_are_proven(seed: int) -> None:
    schedule = schedule_of(random_program(seed))
    proven(schedule, random_setting(schedule.header, Random(seed)))


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_so_they_are_without_a_flush(seed: int) -> None:
    stream = random_stream(Random(seed))
    schedule = stream.schedule(4 * stream.turns + 8)
    proven(schedule, random_setting(schedule.header, Random(seed)))


@given(st.integers(1, 12), st.integers(1, 12), SEEDS)
def test_a_model_that_is_cut_otherwise_takes_as_long_in_all(stages: int, into: int, seed: int) -> None:
    random = Random(seed)
    header = replace(random_program(0).header, stages=stages)
    measured = Measured.of(random_setting(header, random))
    again = measured.recut(stages, into)
    assert sum(share for parts in again.cut for _, share in parts) == stages
    assert {sum(share for _, share in parts) for parts in again.cut} == {Fraction(stages, into)}
    assert [stage for parts in again.cut for stage, _ in parts] == sorted(
        stage for parts in again.cut for stage, _ in parts
    )
