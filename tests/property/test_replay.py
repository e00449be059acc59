"""The replay against a discrete-event simulator, on random programs, stages, clusters and layouts."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera_ir.cost.durations import Costs
from chimera_ir.cost.simulate import simulate
from chimera_ir.ir.kinds import BACKWARD, FORWARD
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.streams import longer, stream_of
from chimera_ir.lower.lower import lower
from chimera_ir.predict.events import Role
from chimera_ir.predict.replay import Cause, Event, Replay, free_replay, idle, pace, replay
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE, Cluster, HostLink, Link
from chimera_ir.profile.costs import StageCosts
from chimera_ir.verify.verify import schedule_of
from tests.instructions import what
from tests.literature.test_facts import schedule
from tests.lowered import lowered
from tests.property.programs import random_plan
from tests.property.streams import one_forward_one_backward, random_stream
from tests.property.test_random_schemes import compiled
from tests.repeatable import examples, tries
from tests.simulator import Simulator
from tests.sizes import on_workers
from tests.timings import stage_timing

_FEW = examples(150)
SHARING = [
    *(("chimera", {"D": D, "N": N}) for D, N in ((4, 4), (4, 12), (6, 6), (8, 8))),
    *((name, {"D": D, "N": 8}) for name in ("chimera_doubling", "chimera_halving") for D in (4, 8)),
    ("pipedream", {"D": 4}),
    ("pipedream_2bw", {"D": 4, "N": 4}),
    ("dapple", {"D": 8, "N": 16}),
]
"""Where a worker talks to two others at once, if links are slow."""

SEEDS = st.integers(0, 2**32)
STREAMS = {
    **{f"1f1b D={D} K={K}": one_forward_one_backward(D, K) for D in (1, 2, 4) for K in (1, 3)},
    **{f"random {seed}": random_stream(Random(seed)) for seed in range(tries(8))},
}


def random_program(seed: int) -> Program:
    """Half of all programs have micro-batches that cost unequally."""
    program = compiled(random_plan(seed, 0.0), ahead=seed % 3)
    return replace(program, header=weighed(program.header, seed)) if seed % 2 else program


def weighed(header: Header, seed: int) -> Header:
    return replace(header, weights=tuple(2 + (m + seed) % 3 for m in range(header.micro_batches)))


def random_link(random: Random) -> Link:
    return Link(*(float(random.choice(of)) for of in ([0, 0, 1, 2, 5], [0, 1, 1, 3], [0, 0, 1, 2])))


def random_setting(header: Header, random: Random) -> Setting:
    """Whole seconds, so that only the logarithm in the sums is ever rounded, on both sides alike."""
    stages = tuple(
        StageCosts(
            weights=1,
            gradients=random.choice([0, 4, 12]),
            optimizer=0,
            at={
                2: stage_timing(
                    *(float(random.randint(1, 6)) for _ in range(3)), 1, 1, *random.choices([0, 2, 4, 8], k=2)
                )
            },
            step=float(random.choice([0, 0, 1, 3, 20])),
        )
        for _ in range(header.stages)
    )
    links = [random_link(random) for _ in range(3)]
    cluster = Cluster("any", 4096, random.choice([1, 2, 3, 4]), 1, 0, *links)
    setting = Setting(stages, cluster, random.choice([1, 2, 4, 8]), 2, random.random() < 0.5)
    return replace(setting, cluster=replace(cluster, host=HostLink(random_link(random))))


def with_shared_links(setting: Setting, random: Random) -> Setting:
    """All over one kind of link, so slow that messages meet."""
    slow = replace(setting.cluster.between, beta=float(random.randint(1, 3)), shared=True)
    stages = tuple(
        replace(one, at={2: replace(one.at[2], output=random.choice([2, 4]), gradient=random.choice([2, 4]))})
        for one in setting.stages
    )
    return replace(setting, stages=stages, cluster=replace(setting.cluster, between=slow, within=slow))


def with_ports_of_their_own(setting: Setting) -> Setting:
    own = replace(setting.cluster.between, shared=False)
    return replace(setting, cluster=replace(setting.cluster, between=own, within=own))


def operations(found: Replay, role: Role = Role.COMPUTE) -> set[tuple[object, ...]]:
    return {
        (*each.workers, each.instruction, each.start, each.end)
        for lane in found.lanes
        for each in lane
        if each.role is role
    }


def agrees(program: Program, setting: Setting) -> Replay:
    """Every operation, step and sum and the end of every lane, to the last bit."""
    found, simulated = replay(program, setting), Simulator(program, setting)
    assert operations(found) == set(simulated.computes)
    assert operations(found, Role.STEP) == {each for each in simulated.steps if each[3] > each[2]}
    assert [lane[-1].end if lane else 0 for lane in found.lanes] == [*map(simulated.ended.get, range(len(found.lanes)))]
    sums = {(each.instruction.group, each.instruction.version, each.start, each.end) for each in found.sums}
    assert sums == set(simulated.sums)
    assert moves(found) == set(simulated.moves)
    return found


def moves(found: Replay) -> set[tuple[object, ...]]:
    return {(*each.workers, each.instruction, each.start, each.end) for each in found.moves}


def consistent(found: Replay) -> Replay:
    """Lanes and the critical path have no gaps, and each event of the path has a part of the time shown."""
    for lane in found.lanes:
        ends = [0.0, *(each.end for each in lane)]
        assert [each.start for each in lane] == ends[:-1]
    ends = [0.0, *(each.end for each in found.critical)]
    assert [each.start for each in found.critical] == ends[:-1]
    assert ends[-1] == found.span
    for each in found.critical:
        assert any(whole.start <= each.start and each.end <= whole.end for whole in shown(found, each))
    return found


def shown(found: Replay, each: Event) -> list[Event]:
    """The events of which one in the critical path may be a part; a notice is not shown."""
    everything = [*found.messages, *found.sums, *found.moves, *(other for lane in found.lanes for other in lane), each]
    return [
        other
        for other in everything
        if each.role in (Role.NOTICE, other.role) and each.instruction == other.instruction
    ]


@_FEW
@given(SEEDS)
def test_every_event_is_when_a_simulation_of_processes_and_queues_has_it(seed: int) -> None:
    program = random_program(seed)
    consistent(agrees(program, random_setting(program.header, Random(seed))))


@pytest.mark.parametrize(("name", "sizes"), SHARING)
def test_messages_that_share_ports_take_as_long_as_in_the_simulation(name: str, sizes: dict[str, int]) -> None:
    program = lowered(schedule(name, **sizes))
    longer = 0.0
    for random in map(Random, range(3)):
        setting = with_shared_links(random_setting(program.header, random), random)
        found, simulated = replay(program, setting), Simulator(program, setting)
        ends = {(worker, what): end for worker, what, _, end in simulated.computes}
        assert {(worker, what): end for worker, what, _, end in operations(found)} == pytest.approx(ends, rel=1e-9)
        assert [lane[-1].end if lane else 0 for lane in found.lanes] == pytest.approx(
            [*map(simulated.ended.get, range(len(found.lanes)))], rel=1e-9
        )
        longer += under_way(found) - under_way(replay(program, with_ports_of_their_own(setting)))
    assert longer > 0


def under_way(found: Replay) -> float:
    return sum(each.end - each.start for each in found.messages)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["dapple_offload", "interleaved_offload"])
def test_so_it_is_where_memory_moves(name: str, seed: int) -> None:
    program = lowered(schedule(name, **on_workers(name, 4, 8)))
    assert consistent(agrees(program, random_setting(program.header, Random(seed)))).moves


@pytest.mark.parametrize("name", STREAMS)
def test_so_it_is_without_a_flush(name: str) -> None:
    schedule = STREAMS[name].schedule(2 * STREAMS[name].turns + 3)
    consistent(agrees(lowered(schedule), random_setting(schedule.header, Random(name))))


@_FEW
@given(SEEDS)
def test_free_communication_and_equal_stages_give_the_makespan_exactly(seed: int) -> None:
    program = random_program(seed)
    found = replay(program, free(program.header))
    without_profile = free_replay(program, Costs())
    assert (without_profile.lanes, without_profile.critical) == (found.lanes, found.critical)
    timeline = simulate(schedule_of(program), Costs())
    assert found.seconds == timeline.makespan
    assert [operations(found)] == [
        {
            (worker, operation, start * timeline.tick, end * timeline.tick)
            for worker, lane in enumerate(timeline.lanes)
            for operation, start, end in lane
        }
    ]


def free(header: Header) -> Setting:
    """Communication costs nothing, F = 1, B = 2, recomputing 3."""
    stage = StageCosts(1, 1, 0, {1: stage_timing(1.0, 2.0, 3.0, 1, 1, 1, 1)})
    return Setting((stage,) * header.stages, Cluster("free", 1024, 1, 1, 0, FREE, FREE, FREE), 4, 1)


@pytest.mark.parametrize("name", STREAMS)
def test_the_steady_period_is_what_many_updates_take_on_average(name: str) -> None:
    """Also with links that cost something: of 240 updates the second half takes 120 periods, whatever the beginning."""
    stream = STREAMS[name]
    whole = lower(stream_of(stream.schedule(2 * stream.turns + 3)))
    few = whole.shown
    assert replay(few, free(few.header)).seconds == simulate(schedule_of(few), Costs()).makespan
    setting = replace(random_setting(few.header, Random(name)), copies=2)
    spans = [replay(whole.view(updates), setting).span for updates in (120, 240)]
    assert replay(few, setting).seconds == pytest.approx((spans[1] - spans[0]) / 120, rel=1e-12)


@examples(60)
@given(SEEDS)
def test_the_pace_is_what_updates_take_on_average_that_follow_one_another(seed: int) -> None:
    program = random_program(seed)
    setting = replace(random_setting(program.header, Random(seed)), copies=2)
    spans = [max(Simulator(longer(program, updates), setting).ended.values()) for updates in (24, 48)]
    found = pace(program, setting)
    assert found == pytest.approx((spans[1] - spans[0]) / 24, rel=1e-12)
    assert found <= replay(program, setting).seconds * (1 + 1e-12)


@_FEW
@given(SEEDS)
def test_what_costs_more_makes_nothing_earlier(seed: int) -> None:
    """No anomaly of contention: who is served next is decided by the program, not by who comes first."""
    random = Random(seed)
    program = random_program(seed)
    setting = random_setting(program.header, random)
    slower = costlier(setting, random)
    before, after = replay(program, setting), replay(program, slower)
    for one, two in zip(before.lanes, after.lanes, strict=True):
        assert all(a.end <= b.end for a, b in zip(one, two, strict=True))
    assert before.seconds <= after.seconds


def costlier(setting: Setting, random: Random) -> Setting:
    which = random.choice(["between", "within", "sums", "stage"])
    if which == "stage":
        number = random.randrange(len(setting.stages))
        stage = setting.stages[number]
        timing = stage.at[2]
        dearer = replace(timing, times={**timing.times, "F": timing.times["F"] + 1}, gradient=timing.gradient + 1)
        changed = replace(stage, at={2: dearer}, step=stage.step and stage.step + 1)
        return replace(setting, stages=(*setting.stages[:number], changed, *setting.stages[number + 1 :]))
    old: Link = getattr(setting.cluster, which)
    return replace(setting, cluster=replace(setting.cluster, **{which: slower(old, random)}))


def slower(old: Link, random: Random) -> Link:
    overhead = old.overhead and old.overhead + random.randint(0, 2)
    return replace(old, alpha=old.alpha + random.randint(0, 3), beta=old.beta + random.randint(0, 2), overhead=overhead)


@_FEW
@given(SEEDS)
def test_no_update_is_shorter_than_its_parts(seed: int) -> None:
    """Than the work of any worker, than free communication, than a micro-batch's way through all stages and back."""
    random = Random(seed)
    program = random_program(seed)
    setting = random_setting(program.header, random)
    found = replay(program, setting)
    nothing = replace(setting, copies=1, cluster=replace(setting.cluster, between=FREE, within=FREE, sums=FREE))
    assert found.seconds >= replay(program, nothing).seconds
    for lane in found.lanes:
        busy = (Role.COMPUTE, Role.STEP)
        assert found.seconds >= sum(each.end - each.start for each in lane if each.role in busy)
    parts = program.header.parts
    times = [setting.timing(stage) for stage in range(program.header.stages)]
    assert found.seconds >= sum(each.times["F"] + each.times["B"] for each in times) / parts
    kinds = {what(each.instruction) for lane in found.lanes for each in lane if each.role is Role.COMPUTE}
    assert {FORWARD, BACKWARD} <= {*program.header.kinds} >= kinds


@_FEW
@given(SEEDS)
def test_a_worker_computes_or_posts_or_is_idle_for_one_reason(seed: int) -> None:
    program = random_program(seed)
    setting = random_setting(program.header, Random(seed))
    found = replay(program, setting)
    for lane, stretches in zip(found.lanes, idle(found), strict=True):
        times = sorted((each.start, each.end) for each in (*(e for e in lane if e.role is not Role.WAIT), *stretches))
        assert [start for start, _ in times] == [0.0, *(end for _, end in times[:-1])]
        assert [end for _, end in times[-1:]] == [found.span]
    unpaid = replace(setting, copies=1, cluster=replace(setting.cluster, between=FREE, within=FREE, sums=FREE))
    causes = {each.cause for lane in idle(replay(program, unpaid)) for each in lane}
    queued = any(len(stages) > 1 for stages in program.header.stages_of)
    assert causes <= ({Cause.BUBBLE, Cause.SUM} if queued else {Cause.BUBBLE}), "a free sum waits for those before it"
