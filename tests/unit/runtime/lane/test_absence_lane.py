"""The lane of micro-batches that lack stages: calls about these stages do nothing, all others are made."""

from typing import Any

from chimera_runtime.lane.absence_lane import AbsenceLane, at_times
from chimera_runtime.lane.lane import LaneComponents
from chimera_runtime.program.absence import Absence
from chimera_runtime.program.job import Feed
from chimera_runtime.program.rank_facts import Route
from tests.unit.runtime.thread_ranks import job

GRAPH = job(
    stages=3,
    placement=((0, 0, 0),),
    feeds=(Feed(0, 2), Feed(1, 2)),
    named=(("image", 0, 1), ("sound", 1, 2), ("text", 2, 3)),
)


class Noting:
    """Notes the calls of methods, by its own name; a call returns the arguments."""

    def __init__(self, name: str, calls: list[Any], methods: str) -> None:
        def noted(method: str) -> Any:
            return lambda *arguments: [calls.append((name, method, *map(str, arguments))), arguments][1]

        vars(self).update({method: noted(method) for method in methods.split()})


STAGE = "begin forward backward pair input_gradients all_reduce wait_all_reduce step"


def lane_of(absence: Absence, calls: list[Any], total: Any = None) -> AbsenceLane:
    stages = {number: Noting(f"s{number}", calls, STAGE) for number in range(3)}
    out, back = Route(0, 2, 1), Route(2, 1, 1)
    links = {out: Noting("s0->s2", calls, "wait")}, {back: Noting("s2->s1", calls, "isend")}
    components = LaneComponents(stages, *links, lambda *_: None, lambda *_: None)
    return AbsenceLane(at_times(components, absence, counted=total is not None), absence, total)


def test_calls_about_a_stage_that_a_micro_batch_lacks_do_nothing() -> None:
    calls: list[Any] = []
    absence = Absence(GRAPH)
    lane = lane_of(absence, calls)
    absence.by_data, absence.is_felt = [frozenset({0}), frozenset({1})], True
    lane.begin(0)
    calls.clear()
    for micro in range(2):
        for stage in range(3):
            assert lane.stage(stage).forward(micro, None) == ((micro, None) if micro != stage else ())
        lane.incoming(0, 2, 1).wait(micro)
        lane.outgoing(2, 1, 1).isend(micro, lane.stage(2).input_gradients(micro, 1))
    lane.stage(0).all_reduce()
    lane.end()
    assert [call[:3] for call in calls] == [
        ("s1", "forward", "0"),
        ("s2", "forward", "0"),
        ("s2", "input_gradients", "0"),
        ("s2->s1", "isend", "0"),
        ("s0", "forward", "1"),
        ("s2", "forward", "1"),
        ("s0->s2", "wait", "1"),
        ("s2", "input_gradients", "1"),
        ("s0", "all_reduce"),
    ]


def test_of_a_pair_the_operation_runs_that_its_micro_batch_has() -> None:
    calls: list[Any] = []
    absence = Absence(GRAPH)
    lane = lane_of(absence, calls)
    absence.by_data, absence.is_felt = [frozenset({0}), frozenset()], True
    lane.begin(0)
    calls.clear()
    lane.stage(0).pair((0, None), lane.stage(2), (1, ()))
    lane.stage(2).pair((1, ()), lane.stage(0), (0, ()))
    lane.stage(0).pair((1, None), lane.stage(2), (0, ()))
    assert [call[:2] for call in calls] == [("s2", "backward"), ("s2", "forward"), ("s0", "pair")]


def test_where_nothing_lacks_the_script_calls_the_methods_themselves() -> None:
    absence = Absence(GRAPH)
    lane = lane_of(absence, [], total=lambda count: count)
    lane.begin(0)
    for part, method in ((lane.stage(0), "forward"), (lane.stage(1), "step"), (lane.incoming(0, 2, 1), "wait")):
        assert vars(part)[method] is vars(part.part)[method]
    absence.by_data, absence.is_felt = [frozenset({0}), frozenset()], True
    lane.begin(1)
    assert vars(lane.stage(0))["forward"] is not vars(lane.stage(0).part)["forward"]


def test_with_counts_sums_are_waited_for_when_all_losses_are_counted() -> None:
    calls: list[Any] = []
    absence = Absence(GRAPH)
    lane = lane_of(absence, calls, total=lambda count: count + 5)
    absence.is_felt = True  # on another copy
    lane.begin(0)
    calls.clear()
    lane.stage(0).wait_all_reduce()
    lane.stage(0).step()
    absence.counts += [3.0, 4.0]  # type: ignore[list-item]
    lane.stage(1).backward(0, ())
    assert [call[:2] for call in calls] == [("s1", "backward")]
    lane.end()
    assert [call[:2] for call in calls] == [("s1", "backward"), ("s0", "wait_all_reduce"), ("s0", "step")]
    assert absence.count == 12
    assert absence.counts == []
