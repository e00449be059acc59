"""Asynchronous schemes: what is elaborated of them is what the formulas say, and long enough to show a steady state."""

import math

import pytest

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.ir.kinds import BACKWARD, FORWARD
from chimera_ir.ir.levels import Plan, Strategy
from chimera_ir.ir.ops import Compute
from chimera_ir.lower.lower import order
from tests.unit.test_elaborate import codes, library_plan, plan_of

SIZES = range(1, 9)


def words(operation: Compute) -> tuple[str, int, int, int | None]:
    (micro,) = operation.micros
    return operation.kind.letter, micro, operation.stage, operation.version


def require_sound(plan: Plan) -> None:
    """Nothing twice at one time and place, everything once; numbers, in turns, that are those of whole updates."""
    header = plan.header
    places = {(each.worker, each.clock) for each in plan.operations}
    cells = {
        (each.operation.kind, micro, each.operation.stage)
        for each in plan.operations
        for micro in each.operation.micros
    }
    assert len(places) == len(plan.operations)
    assert len(cells) == 2 * header.stages * header.micro_batches
    assert sorted(micro for pipe in header.pipes for micro in pipe.micros) == list(range(header.micro_batches))
    assert header.micro_batches == header.updates * header.per_update
    assert header.micro_batches % header.period == header.period % header.per_update == 0


def require_steady(plan: Plan) -> None:
    """A turn of every lane is that of the turn before; the one in the middle has nothing of the warm-up or drain."""
    turn = plan.header.period
    clocks = {(o.operation.kind, o.operation.micros, o.operation.stage): o.clock for o in plan.operations}
    updates = turn // plan.header.per_update
    versions = {(o.operation.micros, o.operation.stage): o.operation.version for o in plan.operations}
    first = min(clock for (_, micros, _), clock in clocks.items() if micros[0] < turn)
    length = min(clock for (_, micros, _), clock in clocks.items() if turn <= micros[0] < 2 * turn) - first
    last_of_first = max(clock for (_, micros, _), clock in clocks.items() if micros[0] < turn)
    first_of_last = min(
        clock for (_, micros, _), clock in clocks.items() if micros[0] >= plan.header.micro_batches - turn
    )
    assert first_of_last - last_of_first >= 3 * length
    for (kind, micros, stage), clock in clocks.items():
        next_micros = tuple(micro + turn for micro in micros)
        if (kind, next_micros, stage) in clocks:
            assert clocks[kind, next_micros, stage] == clock + length
            before, after = versions[micros, stage], versions[next_micros, stage]
            assert after == (before + updates if before else after)


def one_forward_one_backward(stages: int, total: int, stage: int) -> list[tuple[str, int]]:
    """The lane of a stage in words: D - s forwards ahead, then a backward and a forward in turn."""
    ahead = min(stages - stage, total)
    lane = [("F", micro) for micro in range(ahead)]
    for micro in range(total):
        lane.append(("B", micro))
        lane += [("F", micro + ahead)] if micro + ahead < total else []
    return lane


@pytest.mark.parametrize("stages", SIZES)
def test_an_update_per_micro_batch_reads_the_newest_weights_that_there_are_on_entering(stages: int) -> None:
    """A micro-batch that enters stage s has D-1-s others before it there whose updates are not made."""
    plan = library_plan("pipedream", D=stages)
    header = plan.header
    require_sound(plan)
    require_steady(plan)
    assert (header.workers, header.per_update, header.period) == (stages, 1, 1)
    assert header.updates == 2 * (stages - 1 + max(3, stages - 1)) + 1
    for stage, lane in enumerate(order(plan).lanes):
        expected = one_forward_one_backward(stages, header.micro_batches, stage)
        late = stages - 1 - stage
        assert [words(each) for each in lane] == [(c, m, stage, max(0, m - late)) for c, m in expected]


@pytest.mark.parametrize("more", [0, 1, 5])
@pytest.mark.parametrize("stages", SIZES)
def test_an_update_per_n_micro_batches_reads_the_version_before_the_last(stages: int, more: int) -> None:
    per_update = stages + more
    plan = library_plan("pipedream_2bw", D=stages, N=per_update)
    header = plan.header
    require_sound(plan)
    require_steady(plan)
    assert (header.per_update, header.period) == (per_update, per_update)
    spread = (2 * per_update + 2 * stages - 3) // (2 * per_update)
    assert header.updates == 2 * (spread + 3) + 1
    for stage, lane in enumerate(order(plan).lanes):
        expected = one_forward_one_backward(stages, header.micro_batches, stage)
        assert [words(each) for each in lane] == [(c, m, stage, max(0, m // per_update - 1)) for c, m in expected]


def test_fewer_micro_batches_than_stages_are_too_few_for_two_versions() -> None:
    with pytest.raises(Rejected, match="CH233"):
        library_plan("pipedream_2bw", D=4, N=3)


BOTH = """scheme both(D = 4, K = 1)
require D % 2 == 0, "even"
update every K
pipe down {
  stages s in 0..D on s
  micros m in 0.. as 2*m
  reads version max(0, (2*m)/K - D)
  F(m, s) @ 4*m + s
  B(m, s) @ 4*m + 2*D-1 - s
}
pipe up {
  stages s in 0..D on D-1 - s
  micros m in 0.. as 2*m + 1
  reads version max(0, (2*m + 1)/K - D)
  F(m, s) @ 4*m + 2*((D/2 + 1) % 2) + s
  B(m, s) @ 4*m + 2*((D/2 + 1) % 2) + 2*D-1 - s
}
"""


@pytest.mark.parametrize("per_update", [1, 2, 3, 4])
@pytest.mark.parametrize("stages", [2, 4, 6, 8])
def test_two_directions_take_turns(stages: int, per_update: int) -> None:
    plan = plan_of(BOTH, D=stages, K=per_update)
    header = plan.header
    require_sound(plan)
    require_steady(plan)
    assert header.period == math.lcm(2, per_update)
    assert [pipe.micros[:3] for pipe in header.pipes] == [(0, 2, 4), (1, 3, 5)]
    for each in plan.operations:
        assert each.operation.version == max(0, each.operation.micros[0] // per_update - stages)


def test_pipes_of_different_pace_share_the_numbers_accordingly() -> None:
    """While `slow` runs one micro-batch, `fast` runs two."""
    text = """scheme a
    update every 3
    pipe fast {
      stages s in 0..2 on s
      micros m in 0.. as 3*(m/2) + m % 2
      reads version max(0, m/2 - 4)
      F(m, s) @ 6*(m/2) + 2*(m % 2) + s
      B(m, s) @ 6*(m/2) + 2*(m % 2) + 9 - s
    }
    pipe slow {
      stages s in 0..2 on 1 - s
      micros m in 5.. as 3*(m - 5) + 2
      reads version max(0, m - 9)
      F(m, s) @ 6*m + 4 + s
      B(m, s) @ 6*m + 13 - s
    }"""
    plan = plan_of(text)
    assert (plan.header.period, plan.header.per_update) == (3, 3)
    assert [pipe.micros[:4] for pipe in plan.header.pipes] == [(0, 1, 3, 4), (2, 5, 8, 11)]
    numbers = sorted(micro for pipe in plan.header.pipes for micro in pipe.micros)
    assert numbers == list(range(plan.header.micro_batches))


def test_an_operation_may_take_several_micro_batches_of_an_update() -> None:
    text = """scheme a(D = 3)
    update every 4
    pipe p {
      stages s in 0..D on s
      micros m in 0.. by 2
      reads version max(0, m/4 - 2)
      F(m..m+2, s) @ 2*m + 4*s
      B(m, s) @ 2*m + 4*D-2 + 4*(D-1 - s) + 1
      B(m+1, s) @ 2*m + 4*D-2 + 4*(D-1 - s) + 3
    }"""
    plan = plan_of(text)
    require_sound(plan)
    forwards = [o.operation for o in plan.operations if o.operation.kind is FORWARD]
    backwards = [o.operation for o in plan.operations if o.operation.kind is BACKWARD]
    assert {len(each.micros) for each in forwards} == {2}
    assert {len(each.micros) for each in backwards} == {1}
    assert (plan.header.period, plan.header.per_update) == (4, 4)


def test_a_line_may_be_for_some_of_the_micro_batches() -> None:
    text = """scheme a
    update every 1
    pipe p {
      stages s in 0..1 on s
      micros m in 0..
      reads version m
      F(m, s) @ 2*m when m % 2 == 0
      F(m, s) @ 2*m when m % 2 == 1
      B(m, s) @ 2*m + 1
    }"""
    plan = plan_of(text)
    require_sound(plan)
    assert plan.header.period == 2


def test_what_an_operation_is_about_may_alternate() -> None:
    """Which of the two stages a clock is for, and which of two micro-batches."""
    text = """scheme a
    workers 1
    update every 1
    pipe p {
      stages s in 0..2 on 0
      micros m in 0.. by 2
      reads version max(0, m - 2)
      F(m + m/2 % 2, (s + m/2) % 2) @ 4*m + s
      F(m + 1 - m/2 % 2, s) @ 4*m + 2 + s
      B(m, s) @ 4*m + 4 + s
      B(m + 1, s) @ 4*m + 6 + s
    }"""
    plan = plan_of(text)
    clocks = {(o.operation.kind, o.operation.micros, o.operation.stage): o.clock for o in plan.operations}
    assert plan.header.period == 4
    assert [clocks[FORWARD, (micro,), 0] for micro in range(8)] == [0, 2, 10, 9, 16, 18, 26, 25]


def test_a_warm_up_that_is_longer_for_the_versions_is_elaborated_to_its_end() -> None:
    """Twenty micro-batches on the first weights before the first update is read."""
    text = """scheme a
    update every 1
    pipe p {
      stages s in 0..1 on s
      micros m in 0..
      reads version max(0, m - 20)
      F(m, s) @ 2*m
      B(m, s) @ 2*m + 1
    }"""
    assert plan_of(text).header.updates == 2 * 20 + 1


def test_sums_may_be_asked_for_eagerly() -> None:
    text = """scheme a
    update every 1
    pipe p {
      stages s in 0..2 on s
      micros m in 0..
      reads version max(0, m - (1 - s))
      F(m, s) @ 2*m + s
      B(m, s) @ 2*m + 3 - s
      sync eager when s == 1
    }"""
    assert plan_of(text).header.strategies == ((1, Strategy.EAGER),)


ONE = """scheme a(K = 1, c = 2) update every K pipe p {{
  stages s in 0..2 on s
  micros m in 0..
  reads version max(0, m/K - 1)
  F(m, s) @ {} + s
  B(m, s) @ {} + 3 - s
}}"""


@pytest.mark.parametrize(("clock", "K"), [("c*m", 10**15), ("m % c + 2*m", 1), ("(m/c)*c", 1), ("2*m", 10**18)])
def test_what_repeats_too_late_is_rejected_in_no_time(clock: str, K: int) -> None:
    found = codes(ONE.format(clock, clock), K=K, c=10**12 + 1)
    assert found in (["TooManyInTurns"], ["RepeatsTooLate"], ["RepeatsTooLate"] * 2, ["RepeatsTooLate"] * 3)


def test_a_pipe_without_operations_is_left_to_be_found_incomplete() -> None:
    plan = plan_of(ONE.format("2*m", "2*m").replace("+ s", "+ s when m % 2 == 2").replace("- s\n", "- s when s > 5\n"))
    assert plan.operations == ()
    assert plan.header.updates > 0


def test_numbers_of_any_size_end_in_a_diagnostic() -> None:
    """Periods of many pipes that have no common divisor; products of constants beyond 64 bits."""
    pipes = """scheme a update every 1 pipe p[i in 1..400] {
      stages s in 0..1 on s
      micros m in 0.. as 400*m + i - 1
      reads version max(0, 400*m - 400)
      F(m, s) @ (2*i*m + 1)*400 + i
      B(m, s) @ (2*i*m + 2)*400 + i
    }"""
    assert codes(pipes) == ["TooManyInTurns"]
    huge = "*".join(["9223372036854775807"] * 60)
    assert codes(ONE.format(f"{huge}*m", "2*m")) == ["Overflow"]
