"""What one update of an asynchronous schedule costs in the steady state, by hand, by a long run, and by all cycles."""

from fractions import Fraction
from random import Random

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera_ir.cost.durations import Costs
from chimera_ir.cost.simulate import TimedRun, Timeline, simulate, structure_of
from chimera_ir.flow.engine import Waits, critical
from chimera_ir.flow.net import net_of
from chimera_ir.ir.kinds import BACKWARD, FORWARD
from chimera_ir.ir.levels import Header, Pipe, Schedule
from chimera_ir.ir.ops import Compute, Micro, Stage, Version, Worker
from chimera_ir.verify.verify import verify_schedule
from tests.property.streams import random_stream
from tests.repeatable import examples
from tests.unit.clocked import one_version_each, streamed, two_versions

USUAL = Costs()


def per_update(schedule: Schedule, costs: Costs = USUAL) -> tuple[Fraction, Fraction, Fraction, Fraction]:
    """Makespan, C_f, C_b, bubble ratio."""
    timeline = simulate(schedule, costs)
    path = timeline.critical_path
    return timeline.makespan, path.counts["F"], path.counts["B"], timeline.bubble_ratio


def uneven(lag: int, updates: int = 10) -> Schedule:
    """One stage on two workers, of which one has two micro-batches of an update and the other one, in turns."""
    lanes: list[list[Compute]] = [[], []]
    for m in range(3 * updates):
        version = Version(max(0, m // 3 - lag))
        lanes[m % 2] += [Compute(kind, (Micro(m),), Stage(0), version=version) for kind in (FORWARD, BACKWARD)]
    pipes = tuple(Pipe(f"p{w}", (Worker(w),), tuple(map(Micro, range(w, 3 * updates, 2)))) for w in (0, 1))
    header = Header("uneven", (), 2, 1, 3 * updates, pipes, updates=updates, period=6)
    return Schedule(header, tuple(map(tuple, lanes)))


def unit_length(schedule: Schedule) -> Fraction:
    structure = structure_of(schedule)
    return TimedRun(schedule.header, structure, Fraction(1), [1] * len(structure.net.operations)).length


@pytest.mark.parametrize("D", [1, 2, 3, 4, 8, 16])
def test_an_update_per_micro_batch_has_no_bubble(D: int) -> None:
    assert per_update(one_version_each(D)) == (3, 1, 1, 0)
    assert unit_length(one_version_each(D)) == 2


@pytest.mark.parametrize(("D", "K"), [(1, 1), (2, 2), (4, 4), (4, 6), (8, 8), (5, 9)])
def test_two_versions_have_no_bubble(D: int, K: int) -> None:
    assert per_update(two_versions(D, K)) == (3 * K, K, K, 0)
    assert unit_length(two_versions(D, K)) == 2 * K


@pytest.mark.parametrize("D", [1, 2, 4, 7])
def test_reading_the_newest_weights_waits_for_every_backward(D: int) -> None:
    """The forward of m on stage 0 waits for the last backward of m-1: nothing overlaps."""
    schedule = streamed(D, 6, lambda m, s: m, clock=lambda m, s: 2 * D * m + s)
    assert per_update(schedule) == (3 * D, D, D, 1 - Fraction(1, D))


def test_reading_weights_one_update_old_overlaps_two_micro_batches() -> None:
    """Way down and up again 12, for two micro-batches: 6 for each; the workers have 3 of work."""
    schedule = streamed(4, 9, lambda m, s: max(0, m - 1), clock=lambda m, s: 4 * m + s)
    assert per_update(schedule) == (6, 2, 2, Fraction(1, 2))


def test_a_clock_with_gaps_is_only_an_order() -> None:
    slow = streamed(4, 12, lambda m, s: max(0, m - (3 - s)), clock=lambda m, s: 6 * m + 3 * s)
    assert slow.lanes == one_version_each(4, 12).lanes
    assert per_update(slow) == (3, 1, 1, 0)


def test_a_micro_batch_cut_into_periods_of_two_updates_costs_the_same() -> None:
    def reads(m: int, s: int) -> int:
        return max(0, m - (3 - s))

    assert per_update(streamed(4, 12, reads, period=2)) == (3, 1, 1, 0)


def every_wait(schedule: Schedule) -> Waits:
    """By node the waits that any turn shows."""
    net, period = net_of(schedule), schedule.header.period
    turns = [each.micros[0] // period for each in net.operations]
    within = [
        (each.kind is FORWARD, each.stage, tuple(m - turn * period for m in each.micros))
        for each, turn in zip(net.operations, turns, strict=True)
    ]
    nodes = {key: node for node, key in enumerate(dict.fromkeys(within))}
    found: list[set[tuple[int, int]]] = [set() for _ in nodes]
    for number, before in enumerate(net.predecessors):
        found[nodes[within[number]]] |= {(nodes[within[other]], turns[number] - turns[other]) for other in before}
    return [tuple(each) for each in found]


@pytest.mark.parametrize(
    "schedule",
    [
        *(one_version_each(D, updates) for D, updates in [(1, 3), (2, 6), (4, 12), (4, 20)]),
        *(two_versions(D, K, updates) for D, K, updates in [(4, 4, 4), (4, 6, 4), (4, 6, 9)]),
        streamed(4, 4, lambda m, s: max(0, m - 1), clock=lambda m, s: 4 * m + s),
        streamed(4, 12, lambda m, s: max(0, m - 5), clock=lambda m, s: 4 * m + s),
        uneven(1),
        uneven(2, 12),
    ],
)
def test_the_first_turn_and_the_last_show_what_all_of_them_do(schedule: Schedule) -> None:
    assert verify_schedule(schedule, None).findings.diagnostics == ()
    assert_all_waits_are_shown(schedule)


def test_waits_over_any_number_of_turns_are_shown() -> None:
    seen = 0
    for seed in range(60):
        stream = random_stream(Random(seed))
        schedule = stream.schedule(2 * stream.turns + 3)
        if not verify_schedule(schedule, None).findings.diagnostics:
            assert_all_waits_are_shown(schedule)
            seen += 1
    assert seen >= 30


def assert_all_waits_are_shown(schedule: Schedule) -> None:
    waits = every_wait(schedule)
    longest = critical(waits, [1] * len(waits)).cycle.ratio
    assert unit_length(schedule) == longest / schedule.header.per_turn


def test_a_schedule_too_short_to_repeat_has_no_steady_state() -> None:
    with pytest.raises(ValueError, match="shows no turn"):
        simulate(one_version_each(4, 1), Costs())


def test_workers_that_hold_a_stage_wait_for_the_one_with_more_to_do() -> None:
    """With the newest weights each update takes two micro-batches' time, though on average there are one and a half.

    With weights one update old the worker with less to do runs ahead by a forward; its backward waits for the step.
    """
    assert per_update(uneven(lag=0)) == (6, 2, 2, Fraction(1, 4))
    assert per_update(uneven(lag=1)) == (5, 1, 2, Fraction(1, 10))
    second = simulate(uneven(lag=1), Costs()).lanes[1][2:4]
    assert [(start, end) for _, start, end in second] == [(3, 4), (6, 8)]


# Independent oracles: a long run, and all cycles one by one.


@st.composite
def streams(draw: st.DrawFn) -> Schedule:
    """Any distance between micro-batches, any lag that the order allows."""
    D, K, pace = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 8))
    lags = [(2 * D - 1 - 2 * s) // pace + draw(st.integers(0, 2)) for s in range(D)]
    return streamed(D, LONG, lambda m, s: max(0, (m - lags[s]) // K), K=K, clock=lambda m, s: pace * m + s)


LONG, ROUND = 150, 60
"""How many updates a long run has, and a multiple of every number of turns after which it repeats."""

amounts = st.fractions(min_value=Fraction(1, 3), max_value=4, max_denominator=4)


def last_end(timeline: Timeline, update: int) -> Fraction:
    """When the last operation of an update ends."""
    mine = range(update * timeline.header.per_update, (update + 1) * timeline.header.per_update)
    ends = (each.end for lane in timeline.lanes for each in lane if each.operation.micros[0] in mine)
    return max(ends) * timeline.tick


@examples(60)
@given(streams(), st.builds(Costs, F=amounts, B=amounts))
def test_a_long_run_goes_as_fast_as_the_critical_cycle(schedule: Schedule, costs: Costs) -> None:
    timeline = simulate(schedule, costs)
    assert last_end(timeline, 80 + ROUND) - last_end(timeline, 80) == ROUND * timeline.makespan
    path = timeline.critical_path
    assert timeline.makespan == costs["F"] * path.counts["F"] + costs["B"] * path.counts["B"]


@st.composite
def systems(draw: st.DrawFn) -> tuple[Waits, list[int]]:
    """Up to six nodes that wait for any others, in the same turn only for those before them."""
    size = draw(st.integers(1, 6))
    waits = []
    for node in range(size):
        befores = draw(st.lists(st.integers(0, size - 1), max_size=4, unique=True))
        waits.append([(before, draw(st.integers(before >= node, 3))) for before in befores])
    return waits, draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))


@given(systems())
def test_the_critical_cycle_has_the_largest_ratio_of_all(system: tuple[Waits, list[int]]) -> None:
    waits, weights = system
    graph = networkx.DiGraph()
    graph.add_edges_from((before, node, {"ago": ago}) for node, each in enumerate(waits) for before, ago in each)
    ratios = [Fraction(0)]
    for nodes in networkx.simple_cycles(graph):
        turns = sum(graph.edges[nodes[at - 1], node]["ago"] for at, node in enumerate(nodes))
        ratios.append(Fraction(sum(weights[node] for node in nodes), turns))
    assert critical(waits, weights).cycle.ratio == max(ratios)
