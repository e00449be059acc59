import io
import json
from dataclasses import replace
from fractions import Fraction

import pytest
from rich.console import Console, Group

from chimera_ir.cost.durations import Costs
from chimera_ir.cost.host_plan import launches
from chimera_ir.cost.report import Report, heading, per_worker, proof, report, show, stages_held
from chimera_ir.cost.simulate import simulate
from chimera_ir.ir.levels import Header, Pipe, Schedule, in_full
from chimera_ir.ir.ops import Stage
from tests.lowered import lowered
from tests.unit.clocked import (
    in_turns,
    one_direction,
    one_version_each,
    schedule,
    streamed,
    two_directions,
    two_versions,
)


def reported(schedule: Schedule, costs: Costs, baseline: Schedule, verified: tuple[str, ...] = ()) -> Report:
    return report(schedule, costs, baseline, stages_held(schedule.header), verified=verified)


def printed(shown: Report, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(Group(heading(shown), show(shown), proof(shown)))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_json_is_that_of_the_contract_in_its_order() -> None:
    """The example of CONTRACT.md; what comes on top of it stands at the end or in the baseline."""
    rules = ("complete", "placed", "conflict-free", "acyclic", "channels", "gradients", "versions", "memory")
    said = reported(two_directions(4), Costs(), one_direction(4, 4), verified=rules).as_json()
    expected = {
        "scheme": "both",
        "parameters": {"D": 4, "N": 4},
        "workers": 4,
        "stages": 4,
        "micro_batches": 4,
        "pipelines": 2,
        "critical_path": {"C_f": 4, "C_b": 6},
        "makespan": 16,
        "bubble_ratio": 0.25,
        "clock_span": 10,
        "weights": [2, 2, 2, 2],
        "activations": [3, 4, 4, 3],
        "stashed_inputs": [0, 0, 0, 0],
        "baseline": {
            "makespan": 21,
            "bubble_ratio": 0.42857142857142855,
            "scheme": "plain",
            "critical_path": {"C_f": 7, "C_b": 7},
            "weights": [1, 1, 1, 1],
            "activations": [4, 3, 2, 1],
            "stashed_inputs": [0, 0, 0, 0],
            "spans": [21, 18, 15, 12],
            "span_bubble_ratio": 1 - 48 / 66,
            "steady_period": 21,
            "steady_bubble_ratio": 0.42857142857142855,
        },
        "verified": dict.fromkeys(
            ["complete", "placed", "conflict_free", "acyclic", "channels", "gradients", "versions", "memory"], True
        ),
        "communicators": {},
        "synchronisation": [],
        "costs": {"F": 1, "B": 2, "I": 1, "W": 1},
        "cost_unit": None,
        "remarks": [],
        "spans": [16, 13, 13, 16],
        "span_bubble_ratio": 1 - 48 / 58,
        "steady_period": 16,
        "steady_bubble_ratio": 0.25,
        "asynchronous": False,
    }
    assert json.dumps(said) == json.dumps(expected)


def test_numbers_are_integers_where_they_are_integral() -> None:
    said = reported(one_direction(2, 2), Costs(F=Fraction(1, 2)), one_direction(2, 2)).as_json()
    assert said["makespan"] == 7.5
    assert said["costs"] == {"F": 0.5, "B": 2, "I": 1, "W": 1}


def test_the_rules_that_hold_are_those_that_were_told() -> None:
    said = reported(one_direction(2, 2), Costs(), one_direction(2, 2), verified=("acyclic", "conflict-free"))
    assert said.as_json()["verified"] == {"acyclic": True, "conflict_free": True}
    assert "verified: acyclic, conflict-free\n" in printed(said)
    assert reported(one_direction(2, 2), Costs(), one_direction(2, 2)).as_json()["verified"] == {}


def test_a_worker_without_work_is_remarked() -> None:
    plain = one_direction(2, 2)
    header = Header("x", (), 3, 2, 2, (Pipe("down", plain.header.pipes[0].workers, plain.header.pipes[0].micros),))
    said = reported(Schedule(header, (*plain.lanes, ())), Costs(), one_direction(3, 2))
    assert "nothing is scheduled on P2" in said.remarks


def test_the_baselines_stages_are_larger_where_it_has_fewer() -> None:
    """Four stages on two workers: the baseline has two, each twice as large in time, weights and activations."""
    said = reported(in_turns(4, 4, workers=2), Costs(), one_direction(2, 4))
    assert said.makespan == 27  # 2 stages on each of 2 workers, 4 x 3 each, and the ends: 24 + 1 + 2
    assert said.baseline.makespan == 2 * 3 * (4 + 2 - 1)
    assert said.baseline.weights == (2, 2)
    assert said.baseline.activations == (4, 2)


def recomputing(schedule: Schedule) -> Schedule:
    """A schedule of one pipe in which every stage recomputes."""
    (pipe,), stages = schedule.header.pipes, tuple(map(Stage, range(schedule.header.stages)))
    header = replace(schedule.header, pipes=(replace(pipe, recompute=stages),))
    return Schedule(header, in_full(header, schedule.lanes))


APART = schedule(
    "apart", {}, 2, 4, [("a", lambda s: s, [0]), ("b", lambda s: 2 + s, [1])], lambda _, s: s, lambda _, s: 4 - s
)
"""Two pipes of two stages, each on two workers of its own."""


@pytest.mark.parametrize(
    ("compared", "baseline", "said"),
    [
        (in_turns(4, 4, workers=2), one_direction(2, 4), "2 stages, each as large as 2 of these, F = 2, B = 4"),
        (in_turns(6, 4, workers=4), one_direction(4, 4), "4 stages, each as large as 1.5 of these, F = 1.5, B = 3"),
        (APART, one_direction(4, 2), "4 stages, each as large as 0.5 of these, F = 0.5, B = 1"),
        (recomputing(one_direction(4, 4)), one_direction(4, 4), "F = 1, B = 2"),
        (two_versions(4, 4), one_direction(4, 4), "with its flush"),
    ],
)
def test_the_table_says_how_the_baseline_differs(compared: Schedule, baseline: Schedule, said: str) -> None:
    """And the C_f and C_b beside it are those of the baseline's own operations."""
    shown = reported(compared, Costs(), baseline)
    assert printed(shown, 120).splitlines()[1].partition("the baseline: ")[2] == said
    base = shown.baseline
    assert base.makespan == base.costs["F"] * base.counts["F"] + base.costs["B"] * base.counts["B"]


def test_of_a_baseline_like_the_schedule_the_table_says_nothing_but_its_figures() -> None:
    assert printed(reported(two_directions(4), Costs(), one_direction(4, 4))).splitlines()[1].strip() == ""


def test_an_update_of_the_steady_state_is_told_as_such() -> None:
    """Four workers; a micro-batch with a flush takes 3 on each of them, one after the other."""
    said = report(one_version_each(4), Costs(), one_direction(4, 1), (4, 3, 2, 1))
    shown = said.as_json()
    assert shown["critical_path"] == {"C_f": 1, "C_b": 1}
    assert (shown["makespan"], shown["bubble_ratio"], shown["clock_span"], shown["micro_batches"]) == (3, 0, 2, 1)
    assert shown["weights"] == shown["activations"] == [4, 3, 2, 1]
    assert (shown["asynchronous"], shown["updates_shown"], shown["staleness"]) == (True, 12, [3, 2, 1, 0])
    assert shown["remarks"] == [
        "without a flush, gradients of all micro-batches come from old weights: 3 updates old on stage 0, 0 on stage 3"
    ]
    assert "one update in the steady state" in printed(said)


def test_weights_equally_old_on_all_stages_are_told_in_one_number() -> None:
    said = report(two_versions(4, 4), Costs(), one_direction(4, 4), (2,) * 4)
    assert said.remarks == ("without a flush, gradients of all micro-batches come from old weights: 1 update old",)


def test_the_newest_weights_need_no_remark() -> None:
    one = streamed(1, 4, lambda m, s: m)
    assert report(one, Costs(), one_direction(1, 1), (1,)).remarks == ()


def test_a_launch_in_the_steady_state_is_told_up_to_its_step() -> None:
    """Two micro-batches under way at a time, where the stages could have four: 6 for each, with 3 of work.

    The sum of stage 3 is ready 3 before the next forward comes.
    """
    own = streamed(4, 12, lambda m, s: max(0, m - 1), clock=lambda m, s: 4 * m + s)
    found = launches(lowered(own), simulate(own, Costs()))
    assert {(each.group[0], each.flush) for each in found} == {(s, 0) for s in range(4)}
    said = report(own, Costs(), one_direction(4, 1), (2,) * 4, found)
    assert "free between launch and step" in printed(said)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([2], "2"),
        ([2] * 64, "2 on each worker"),
        ([3, 4, 4, 3], "3 4 4 3"),
        ([*range(33, 65), *range(64, 32, -1)], "P0..P31: 33..64, P32..P63: 64..33"),
        ([1] * 16 + [2], "P0..P15: 1, P16: 2"),
        ([*([1] * 16), 5, 9], "P0..P15: 1, P16,P17: 5,9"),
    ],
)
def test_what_workers_hold_is_told_in_few_words(values: list[int], text: str) -> None:
    assert per_worker([Fraction(value) for value in values]) == text


@pytest.mark.full
@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_table_fits_the_terminal_even_for_64_workers(width: int) -> None:
    lines = printed(reported(two_directions(64, 2), Costs(), one_direction(64, 128)), width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 40


def test_the_table_says_what_the_json_says() -> None:
    text = printed(reported(two_directions(4), Costs(B=Fraction(5, 3)), one_direction(4, 4)))
    for words in ("both D=4 N=4: 4 workers, 4 stages, 4 micro-batches, 2 pipes; F = 1, B = 5/3", "3 4 4 3", "4 3 2 1"):
        assert words in text
