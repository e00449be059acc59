"""The first screen: faster than what, does it fit, what limits it; by hand for small schedules."""

from dataclasses import replace
from fractions import Fraction

import pytest

import chimera_ir
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.host_plan import launches
from chimera_ir.cost.report import Report, report, stages_held
from chimera_ir.cost.simulate import simulate
from chimera_ir.ir.levels import Schedule
from chimera_ir.predict.equation import equation
from chimera_ir.predict.memory_need import memory
from chimera_ir.predict.prediction import Prediction, TimePart, exposed, hiding_time, summary
from chimera_ir.predict.replay import Replay, replay
from chimera_ir.predict.screen import _compared, show
from chimera_ir.predict.setting import Measured, Setting
from chimera_ir.profile.cluster import FREE, Cluster, Link
from chimera_ir.profile.costs import StageCosts
from chimera_ir.source import Source
from tests.lowered import lowered
from tests.timings import stage_timing
from tests.unit.clocked import all_then_all, in_turns, one_direction, one_version_each, two_directions


def reported(schedule: Schedule, baseline: Schedule, costs: Costs | None = None) -> Report:
    costs = costs or Costs()
    launched = launches(lowered(schedule), simulate(schedule, costs))
    return report(schedule, costs, baseline, stages_held(schedule.header), launched)


def answers(schedule: Schedule, baseline: Schedule, width: int = 200) -> list[str]:
    made = reported(schedule, baseline)
    return [line.plain for line in show(made, summary(made, None, None), None, width, baseline.header.scheme)]


@pytest.mark.parametrize(
    ("schedule", "baseline", "speed"),
    [
        (two_directions(4), one_direction(4, 4), "1.31 times as fast as plain: 16 against 21"),
        (two_directions(6, 3), one_direction(6, 18), "slower than plain, 0.986 times as fast: 70 against 69"),
        (all_then_all(4, 8), one_direction(4, 8), "as fast as plain: 33 against 33"),
    ],
)
def test_the_speed_names_what_it_is_compared_with(schedule: Schedule, baseline: Schedule, speed: str) -> None:
    assert answers(schedule, baseline)[0] == f"speed:  {speed} (messages cost nothing)"


def test_the_baseline_is_compared_with_nothing() -> None:
    plain = one_direction(4, 4)
    speed, memory, *_ = answers(plain, plain)
    assert speed.startswith("speed:  21 an update (messages cost nothing); it is the baseline itself")
    assert "plain" not in memory


def test_memory_without_a_cluster_is_counted() -> None:
    assert answers(all_then_all(4, 8), one_direction(4, 8))[1] == (
        "memory: weights of 1 stage, activations of up to 8 forwards on a worker; plain: 1 and 4 "
        "(fits? --profile, --cluster)"
    )


@pytest.mark.parametrize(
    ("schedule", "memory"),
    [
        (two_directions(4), "weights of 2 stages, activations of up to 4 forwards on a worker; plain: 1 and 4 ("),
        (
            in_turns(4, 3, 2),
            "weights of 2 stages, activations of up to 6 forwards on a worker; plain: 2 and 4 of that size (",
        ),
    ],
)
def test_stages_of_a_worker_are_no_copies_of_one(schedule: Schedule, memory: str) -> None:
    like = one_direction(schedule.header.workers, schedule.header.per_update)
    assert answers(schedule, like)[1].startswith(f"memory: {memory}")


@pytest.mark.parametrize(
    ("schedule", "limit"),
    [
        (two_directions(4), "bubbles: every worker idles 25.0% of the time; critical path: 4 F + 6 B = 16"),
        (one_version_each(4), "the work itself: no worker waits; critical path: 1 F + 1 B = 3"),
    ],
)
def test_the_largest_part_of_the_lost_time_is_the_limit(schedule: Schedule, limit: str) -> None:
    assert answers(schedule, one_direction(4, schedule.header.per_update))[2] == f"limit:  {limit}"


def test_the_parts_of_an_update_are_all_of_it() -> None:
    """Three stages of 10 and 20 ms, the last of 30 and 60: it works 360 ms, the others 120, and waits 20 + 40."""
    schedule = one_direction(3, 4)
    stages = tuple(StageCosts(1, 1, 0, {1: stage_timing(f, 2 * f, 3 * f, 0, 0, 0, 0)}) for f in (0.01, 0.01, 0.03))
    setting = Setting(stages, Cluster("c", 9, 1, 1, 0, FREE, FREE, FREE), 1, 1)
    made = report(schedule, Measured.of(setting), schedule, (1,) * 3)
    limit = summary(made, None, None).limit
    assert (limit.worker, limit.largest) == (2, TimePart.UNEVEN)
    assert made.makespan == Fraction(420, 1000)
    parts = {part: made.makespan * share * 1000 for part, share in limit.shares.items()}
    assert parts == {TimePart.COMPUTE: 200, TimePart.UNEVEN: 160, TimePart.BUBBLES: 60}


def two_way(sums: Link) -> Replay:
    schedule = two_directions(4)
    stage = StageCosts(1, 1, 0, {1: stage_timing(1.0, 2.0, 3.0, 0, 0, 0, 0)})
    return replay(lowered(schedule), Setting((stage,) * 4, Cluster("c", 4, 1, 1, 0, FREE, FREE, sums), 1, 1))


def test_a_sum_is_hidden_if_it_ends_before_the_last_operation() -> None:
    """A sum of two workers takes twice the latency.

    Those of stages 1 and 2 begin at 14, one after the other, that of stage 3 at 9, that of stage 0 at 16, the end.
    """
    assert exposed(two_way(Link(0.5, 0.0))) == {(0,): 1.0, (1,): 0.0, (2,): 0.0, (3,): 0.0}
    assert exposed(two_way(Link(1.0, 0.0))) == {(0,): 2.0, (1,): 2.0, (2,): 0.0, (3,): 0.0}


def test_the_sums_are_one_line() -> None:
    assert hiding_time(reported(two_directions(4), one_direction(4, 4))) == {(0,): 0, (1,): 2, (2,): 2, (3,): 3}
    (line,) = [line for line in answers(two_directions(32), one_direction(32, 32)) if line.startswith("sums:")]
    assert line.startswith("sums:   32 gradient sums, 31 with idle time of ")
    assert line.endswith(" to hide in; exposed: stage 0")


def test_a_schedule_without_replicas_has_no_sums() -> None:
    assert not [line for line in answers(one_direction(4, 4), all_then_all(4, 4)) if line.startswith("sums:")]


def test_an_answer_is_continued_below_its_words() -> None:
    _, memory, *_ = answers(two_directions(4), one_direction(4, 4), 80)
    first, *further = memory.split("\n")
    assert further
    assert all(line.startswith(" " * 8) and len(line) <= 80 for line in further)
    assert first.startswith("memory: weights of")


@pytest.mark.parametrize(
    ("sums", "message", "largest", "parts"),
    [
        (FREE, FREE, TimePart.BUBBLES, {"bubbles": 3}),
        (Link(4.0, 0.0), FREE, TimePart.SUMS, {"bubbles": 3, "gradient_sums": 8}),
        (FREE, Link(0.0, 5.0), TimePart.MESSAGES, {"bubbles": 7, "messages": 9}),
    ],
)
def test_what_a_worker_waits_for_on_a_cluster_is_told_apart(
    sums: Link, message: Link, largest: TimePart, parts: dict[str, int]
) -> None:
    """Two stages, two micro-batches, 6 of work for each worker; two copies, of which a sum takes twice its latency.

    Where a message takes 5: P0 F0 0-1, F1 1-2, B0 14-16, B1 20-22; P1 F0 6-7, B0 7-9, F1 12-13, B1 13-15.
    """
    schedule = one_direction(2, 2)
    found = predicted(schedule, sums, message, copies=2)
    limit = summary(reported(schedule, all_then_all(2, 2)), found, None).limit
    assert (limit.worker, limit.largest) == (0, largest)
    assert found.replay.seconds == 6 + sum(parts.values())
    told = limit.as_json()["shares"]
    times = {name: share * found.replay.seconds for name, share in told.items() if share}
    assert times == pytest.approx({"computing": 6, **parts})


def predicted(schedule: Schedule, sums: Link, message: Link, copies: int = 1) -> Prediction:
    program, stages = lowered(schedule), schedule.header.stages
    stage = StageCosts(1, 1, 0, {1: stage_timing(1.0, 2.0, 3.0, 0, 0, 1, 1)})
    setting = Setting((stage,) * stages, Cluster("c", 8, 1, 100, 0, message, message, sums), copies, 1)
    return Prediction(
        setting, equation(program, setting), replay(program, setting), None, memory(program, setting), 4, ()
    )


def test_the_times_say_which_to_trust_and_why_they_differ() -> None:
    schedule = two_directions(4)
    made = reported(schedule, one_direction(4, 4))

    def told(message: Link, step: float = 0.0) -> str:
        found = predicted(schedule, FREE, message)
        slower = replace(found.replay, seconds=found.replay.seconds + step)
        found = replace(found, replay=slower)
        (line,) = [
            line.plain
            for line in show(made, summary(made, found, None), found, 200, "plain")
            if line.plain.startswith("times:")
        ]
        return line

    assert told(FREE) == "times:  replay and equation 1 agree on 16 s"
    assert "more: it hides no message" in told(Link(0.0, 0.5))
    assert told(FREE, 4.0).startswith("times:  trust the replay, 20 s; equation 1 says 16 s, 20.0% less: it leaves out")


def test_the_baseline_has_no_stage_for_a_worker_that_is_left_out() -> None:
    text = "scheme d(D = 4) workers D+1 except 1 pipe p { stages s in 0..D on if s < 1 then s else s + 1 "
    text += "micros m in 0..4 F(m, s) B(m, s) prefer m }"
    compilation = chimera_ir.compile(Source("d.chim", text))
    assert (compilation.schedule.header.workers, compilation.opponent.schedule.header.workers) == (5, 4)
    assert compilation.report.baseline.makespan == compilation.report.makespan == 21


def test_a_ratio_that_rounds_to_1_is_said_to_be_about_as_fast() -> None:
    words = _compared(Fraction(1001, 1000), "gpipe"), _compared(Fraction(9999, 10000), "gpipe")
    assert words == ("about as fast as gpipe", "about as fast as gpipe")
