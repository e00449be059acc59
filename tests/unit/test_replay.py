"""The replay on cases that can be worked out by hand, and on the library."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import log2

import pytest

from chimera_ir.compilation import Compilation
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.simulate import simulate, ticks
from chimera_ir.ir.kinds import ACTIVATIONS, BACKWARD, FORWARD
from chimera_ir.ir.levels import Program, Schedule
from chimera_ir.ir.ops import AllReduce, Message, Micro, Recv, Send, Stage, Step, WaitRecv, Worker
from chimera_ir.predict.equation import equation
from chimera_ir.predict.events import Events, Node, Port, Role, with_shared_ports
from chimera_ir.predict.replay import Replay, pace, replay
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.cluster import FREE, Cluster, Link
from chimera_ir.profile.costs import StageCosts, Timing
from chimera_ir.request import Request
from chimera_ir.source import Source
from tests.instructions import what
from tests.literature.test_facts import schedule
from tests.lowered import lowered
from tests.repeatable import part
from tests.simulator import Simulator
from tests.timings import stage_timing
from tests.unit.clocked import all_then_all, one_direction, one_version_each, two_directions, two_versions
from tests.unit.test_steady import uneven

F, B = 3.0, 5.0


def setting(
    stages: int,
    *,
    link: Link = FREE,
    sums: Link = FREE,
    copies: int = 1,
    costs: tuple[float, float, float] = (F, B, F + B),
    message: int = 1,
    gradients: int = 1,
    steps: Sequence[float] = (),
) -> Setting:
    """Stages that are equal but for their steps; every worker on a node of its own."""
    stage = StageCosts(1, gradients, 0, {1: stage_timing(*costs, 1, 1, message, message)})
    each = tuple(replace(stage, step=step) for step in steps or [0.0] * stages)
    return Setting(each, Cluster("any", 4096, 1, 1, 0, link, link, sums), copies, 1)


def replayed(plan: Schedule, **how: object) -> Replay:
    return replay(lowered(plan), setting(plan.header.stages, **how))  # type: ignore[arg-type]


LIBRARY = [
    *((name, {"D": D, "N": N}) for name in ("gpipe", "dapple") for D in (1, 2, 3, 4, 8) for N in (1, 2, D, 2 * D + 1)),
    *(("gems", {"D": D, "N": N}) for D in (2, 4, 6) for N in (2, 4, 8)),
    *(("chimera", {"D": D, "N": N}) for D in (2, 4, 6, 8) for N in (2, D - 2, D, 2 * D, 3 * D) if N > 0),
    *(("chimera", {"D": 8, "N": N, "f": f}) for N in (8, 16) for f in (2, 4)),
    *((f"chimera_{kind}", {"D": D, "N": N * D}) for kind in ("doubling", "halving") for D in (2, 4, 8) for N in (2, 4)),
    *(
        ("interleaved", {"P": P, "v": 2, "N": N, "hop": hop})
        for P in (2, 3, 4)
        for N in (1, P, P + 1)
        for hop in (1, 2)
    ),
    *(("breadth_first", {"P": P, "v": 3, "N": N}) for P in (2, 4) for N in (1, 2 * P)),
    *(("waves", {"P": P, "w": w, "N": N}) for P in (2, 3, 4) for w in (1, 2) for N in (P, 2 * P + 1)),
    *(("bitpipe", {"P": P, "N": N}) for P in (2, 4) for N in (P, 2 * P + 1)),
    *(("pipedream", {"D": D}) for D in (1, 2, 3, 4, 8)),
    *(("pipedream_2bw", {"D": D, "N": N}) for D in (1, 2, 3, 4, 8) for N in (D, D + 1, 2 * D)),
    *(("amdp", {"D": D, "N": N}) for D in (2, 4, 8) for N in (D, 3 * D)),
]


@pytest.mark.parametrize("costs", [Costs(), Costs(F=Fraction(2, 3), B=Fraction(7, 5), recompute=Fraction(17, 20))])
@pytest.mark.parametrize(("name", "sizes"), part(LIBRARY, 2))
def test_with_free_communication_every_scheme_of_the_library_takes_its_makespan(
    name: str, sizes: dict[str, int], costs: Costs
) -> None:
    """Counted in ticks, which are whole numbers, so that no float is rounded."""
    plan = schedule(name, **sizes)
    timeline = simulate(plan, costs)
    tick, duration = ticks(plan.header, costs)
    whole = [float(cost / tick) for cost in (costs["F"], costs["B"], costs["B"] + costs["recompute"])]
    program = lowered(plan, duration=duration)
    found = replay(program, setting(plan.header.stages, costs=(whole[0], whole[1], whole[2]), copies=2))
    assert Fraction(found.seconds) * tick == timeline.makespan
    assert found.span == timeline.span
    assert [[(e.instruction, e.start, e.end) for e in lane if e.role is Role.COMPUTE] for lane in found.lanes] == [
        [tuple(timed) for timed in lane] for lane in timeline.lanes
    ]


@pytest.mark.parametrize("D", [2, 3, 4, 8])
@pytest.mark.parametrize("N", [1, 2, 4, 16])
def test_quick_messages_delay_only_the_way_down_and_the_way_back(D: int, N: int) -> None:
    """All forwards, then all backwards: (N + D - 1)(F + B) + 2 (D - 1)(alpha + beta L): receives are posted ahead."""
    found = replayed(all_then_all(D, N), link=Link(0.5, 0.25), message=4)
    assert found.seconds == (N + D - 1) * (F + B) + 2 * (D - 1) * (0.5 + 0.25 * 4)


@pytest.mark.parametrize("D", [2, 3, 4, 8])
@pytest.mark.parametrize("N", [1, 2, 4, 16])
def test_slow_links_take_the_place_of_the_stages(D: int, N: int) -> None:
    """A link that needs b > B for a message sets the pace of both phases: D (F + B) + 2 (N + D - 2) b."""
    b = 7.0
    found = replayed(all_then_all(D, N), link=Link(0.0, b))
    assert found.seconds == D * (F + B) + 2 * (N + D - 2) * b


@pytest.mark.parametrize("D", [1, 2, 4])
@pytest.mark.parametrize("copies", [1, 2, 8, 64])
def test_the_sum_of_a_stage_that_nothing_follows_is_waited_for_in_full(D: int, copies: int) -> None:
    """1F1B with a flush: the first stage ends last. Alone it has no sum; copies make it larger, not more."""
    found = replayed(one_direction(D, 4), sums=Link(1.0, 0.5), copies=copies, gradients=16)
    cost = 2 * log2(copies) * 1.0 + 2 * (copies - 1) / copies * 0.5 * 16
    assert found.seconds == (4 + D - 1) * (F + B) + cost
    assert [each.end - each.start for each in found.sums] == [pytest.approx(cost)] * (D if copies > 1 else 0)


def test_two_directions_hide_the_sums_that_were_launched_in_time() -> None:
    """D = N = 4, Figure 2: a sum of 2 workers ends before the flush does, one that is launched last does not."""
    none = replayed(two_directions(4)).seconds
    found = replayed(two_directions(4), sums=Link(0.0, 1.0))
    assert found.seconds == none + 1.0
    early = [each for each in found.sums if each.end < found.seconds - 1.0]
    assert {each.instruction.group for each in early if isinstance(each.instruction, AllReduce)} >= {(Stage(3),)}


def test_sums_of_one_worker_follow_one_another() -> None:
    """D = N = 2 in both directions: both stages on both workers, so both sums have the same members."""
    found = replayed(two_directions(2), sums=Link(0.0, 4.0))
    one, two = sorted(found.sums, key=lambda each: each.start)
    assert two.start == max(one.end, two.posted)
    assert one.end - one.start == 4.0
    assert found.critical[-1].role is Role.SUM


def test_stages_differ_and_weights_too() -> None:
    """One micro-batch goes down and back: F1 + c + F2 + B2 + c' + B1, then the sum of the first stage's weights."""
    stages = (
        StageCosts(1, 100, 0, {1: stage_timing(2.0, 3.0, 5.0, 1, 1, 10, 20)}),
        StageCosts(1, 900, 0, {1: stage_timing(7.0, 11.0, 18.0, 1, 1, 0, 0)}),
    )
    link, sums = Link(2.0, 0.5), Link(0.0, 1.0)
    how = Setting(stages, Cluster("any", 4, 1, 1, 0, link, link, sums), 2, 1)
    found = replay(lowered(one_direction(2, 1)), how)
    first_ends = 2 + (2 + 5) + 7 + 11 + (2 + 10) + 3
    second_sums = 2 + (2 + 5) + 7 + 11 + 900
    assert found.seconds == max(first_ends + 100, second_sums) == second_sums
    assert [what(each.instruction) for each in found.critical] == [FORWARD, Send, FORWARD, BACKWARD, AllReduce]


def test_messages_within_a_node_take_the_other_link() -> None:
    slow, quick = Link(0.0, 9.0), Link(0.0, 1.0)
    how = setting(4)
    how = replace(how, cluster=replace(how.cluster, per_node=2, between=slow, within=quick))
    found = replay(lowered(one_direction(4, 1)), how)
    assert found.seconds == 4 * (F + B) + 2 * (1 + 9 + 1)
    copies = replace(how, copies=2, replica_layout=True)
    assert replay(lowered(one_direction(4, 1)), copies).seconds == 4 * (F + B) + 2 * (9 + 9 + 9)


LATE = """program late
parameters D=2
workers 2
stages 2
micro_batches 1
pipe down on 0 1 micros 0..1

worker 0:
  F m0 s0
  send m0 s0->s1 to w1
  recv m0 s1->s0 from w1 into 0
  wait recv m0 s1->s0
  wait send m0 s0->s1
  B m0 s0
  all_reduce s0
  wait all_reduce s0
  step s0

worker 1:
  recv m0 s0->s1 from w0 into 0
  wait recv m0 s0->s1
  F m0 s1
  B m0 s1
  send m0 s1->s0 to w0
  all_reduce s1
  wait all_reduce s1
  step s1
  wait send m0 s1->s0
"""


def by_hand(text: str) -> Program:
    return Compilation(Request(Source("late.sir", text))).program


def test_a_receive_that_is_posted_late_is_announced_before_anything_is_sent() -> None:
    """Gloo's rendezvous: the sender hears of the receive one latency after it was posted."""
    early = by_hand(LATE)
    lane = early.lanes[0]
    sent = lane.index(next(each for each in lane if isinstance(each, Send)))
    assert isinstance(lane[sent + 1], Recv)
    how = setting(2, link=Link(10.0, 1.0))
    assert replay(early, how).seconds == 2 * (F + B) + 2 * 11 + (10 - F)
    slow = replay(early, how).critical
    assert [each.role for each in slow] == [
        *(Role.NOTICE, Role.WIRE, Role.COMPUTE, Role.COMPUTE, Role.WIRE, Role.COMPUTE)
    ]
    assert (slow[0].workers, slow[0].start, slow[0].end) == ((1, 0), 0.0, 10.0)


def test_a_wait_tells_since_when() -> None:
    found = replayed(one_direction(2, 1), link=Link(0.0, 2.0), copies=2, sums=Link(0.0, 4.0))
    assert [(each.role, each.start, each.end) for each in found.lanes[1]] == [
        (Role.WAIT, 0.0, F + 2),
        (Role.COMPUTE, F + 2, 2 * F + 2),
        (Role.COMPUTE, 2 * F + 2, 2 * F + B + 2),
        (Role.WAIT, 2 * F + B + 2, 2 * F + B + 4),
        (Role.WAIT, 2 * F + B + 4, 2 * F + B + 6),
    ]
    down, up = found.messages
    assert (down.workers, down.posted, down.start, down.end) == ((0, 1), F, F, F + 2)
    assert up.workers == (1, 0)


@pytest.mark.parametrize("D", [2, 3, 4, 8])
@pytest.mark.parametrize("c", [0.0, 0.25, 1.0])
def test_without_a_flush_a_micro_batchs_way_is_shared_by_as_many_as_are_on_it(D: int, c: float) -> None:
    """The first worker has D micro-batches on their way: each takes D (F + B) + 2 (D - 1) c there and back."""
    found = replayed(one_version_each(D), link=Link(0.0, c))
    assert found.seconds == pytest.approx(F + B + 2 * (D - 1) * c / D, rel=1e-15)


def test_without_a_flush_sums_are_hidden_while_older_weights_are_read() -> None:
    """Two versions: the sum of an update may take all of the next one, and then sets the pace itself."""
    K, D = 4, 2
    hidden = replayed(two_versions(D, K), sums=Link(0.0, 1.0), copies=2, gradients=1)
    assert hidden.seconds == K * (F + B)
    paced = replayed(two_versions(D, K), sums=Link(0.0, 1.0), copies=2, gradients=1000)
    assert paced.seconds >= 1000


@pytest.mark.parametrize("D", [2, 4, 8])
def test_updates_in_a_row_hide_sums_where_a_lane_begins_late(D: int) -> None:
    """1F1B: the last stage begins D - 1 forwards late and ends D - 1 backwards early; a sum of that length is free."""
    program = lowered(one_direction(D, D))
    free = (2 * D - 1) * (F + B)
    assert pace(program, setting(D)) == replay(program, setting(D)).seconds == free
    stages = setting(D).stages
    heavy = (*stages[:-1], replace(stages[-1], gradients=int((D - 1) * (F + B))))
    how = replace(setting(D, sums=Link(0.0, 1.0), copies=2), stages=heavy)
    light = tuple(replace(each, gradients=0) for each in heavy[:-1])
    how = replace(how, stages=(*light, heavy[-1]))
    assert replay(program, how).seconds == free + (D - 1) * F
    assert pace(program, how) == free


@pytest.mark.parametrize("N", [1, 2, 5])
@pytest.mark.parametrize(("first", "last"), [(2.0, 0.0), (2.0, 7.0), (0.0, 4.0), (1.0, 12.0)])
def test_with_a_flush_a_step_counts_where_its_lane_ends_last(N: int, first: float, last: float) -> None:
    """1F1B on two: the last stage ends a backward before the first, which hides as much of its step."""
    program, how = lowered(one_direction(2, N)), setting(2, steps=(first, last))
    makespan = (N + 1) * (F + B)
    found = replay(program, how)
    assert found.seconds == max(makespan + first, makespan - B + last)
    ends = [(makespan, first), (makespan - B, last)]
    assert [
        [(each.instruction, each.start, each.end) for each in lane if each.role is Role.STEP] for lane in found.lanes
    ] == [[(Step((Stage(stage),)), end, end + step)] if step else [] for stage, (end, step) in enumerate(ends)]
    assert pace(program, how) == max(makespan + first, N * (F + B) + last)


def test_a_step_waits_for_the_sum_of_its_stage() -> None:
    """Two copies: the first stage's sum of 4 begins with its last backward, the other's while that runs."""
    found = replayed(one_direction(2, 4), sums=Link(0.0, 4.0), copies=2, steps=(3.0, 6.0))
    makespan = 5 * (F + B)
    assert found.seconds == makespan + 4 + 3 == max(makespan + 4 + 3, makespan - B + 4 + 6)
    assert [type(each.instruction) for each in found.critical[-2:]] == [AllReduce, Step]


@pytest.mark.parametrize("D", [1, 2, 4])
@pytest.mark.parametrize("slow", [0, -1])
def test_without_a_flush_the_longest_step_sets_the_pace(D: int, slow: int) -> None:
    """All workers compute without a pause; an update of one version each has one micro-batch, of two versions K."""
    steps = [1.0] * D
    steps[slow] = 2.5
    K = 3
    assert replayed(one_version_each(D), steps=steps).seconds == F + B + 2.5
    assert replayed(two_versions(D, K), steps=steps).seconds == K * (F + B) + 2.5


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("step", [0.0, 2.0])
@pytest.mark.parametrize("sums", [FREE, Link(0.0, 3.0)])
def test_workers_of_one_stage_wait_and_step_each_for_itself(lag: int, step: float, sums: Link) -> None:
    """In turns one has two micro-batches of an update and the other one: a simulation of many updates has the same."""
    how = setting(1, sums=sums, copies=2, gradients=2, steps=[step])
    spans = [max(Simulator(lowered(uneven(lag, updates)), how).ended.values()) for updates in (20, 40)]
    assert replay(lowered(uneven(lag)), how).seconds == (spans[1] - spans[0]) / 20


def test_no_lane_no_time() -> None:
    plan = one_direction(1, 1)
    idle = Schedule(replace(plan.header, workers=2), (*plan.lanes, ()))
    found = replayed(idle)
    assert (found.seconds, found.lanes[1], len(found.critical)) == (F + B, (), 2)


def test_other_stages_than_the_programs_are_refused() -> None:
    with pytest.raises(ValueError, match="costs are given of 3 stages, and the program has 2"):
        replay(lowered(one_direction(2, 1)), setting(3))


def test_a_program_that_waits_in_a_circle_is_refused() -> None:
    """Worker 0 waits for the gradient before the forward that leads to it."""
    program = lowered(one_direction(2, 1))
    lane = program.lanes[0]
    first = [each for each in lane if isinstance(each, Recv | WaitRecv)]
    stuck = Program(program.header, ((*first, *(each for each in lane if each not in first)), program.lanes[1]))
    with pytest.raises(ValueError, match="the program does not finish"):
        replay(stuck, setting(2))


def test_a_program_that_shows_no_turn_of_its_steady_state_is_refused() -> None:
    plan = two_versions(2, 2, updates=1)
    alone = Program(plan.header, (plan.lanes[0][:1], ()))
    with pytest.raises(ValueError, match="too short to show a steady state"):
        replay(alone, setting(2))


def sized(stages: int, size: int, timings: dict[int, Timing]) -> Setting:
    """Equal stages whose profile has several micro-batch sizes; micro-batches of ``size`` items."""
    cluster = Cluster("any", 4096, 1, 1, 0, FREE, FREE, FREE)
    return Setting((StageCosts(1, 1, 0, timings),) * stages, cluster, 1, size)


def test_forwards_over_two_micro_batches_cost_what_the_profile_says_for_as_many_items() -> None:
    """Section 3.5, D = 4, N = 8: 2 (3 D J + D - 2) with a forward over two of 2 and a backward over one of 2 (J = 1).

    A profile in which two items take 2 together, though one alone takes 1.5, gives just that; a profile that does not
    know two items counts twice 1.5.
    """
    one, two = (stage_timing(time, 2.0, 2.0, 1, 1, 0, 0) for time in (1.5, 2.0))
    program = lowered(schedule("chimera_doubling", D=4, N=8))
    assert replay(program, sized(4, 1, {1: one, 2: two})).seconds == 2 * (3 * 4 + 2)
    equal = stage_timing(1.0, 2.0, 2.0, 1, 1, 0, 0)
    assert replay(program, sized(4, 1, {1: equal})).seconds == 2 * (3 * 4 + 2)
    assert replay(program, sized(4, 1, {1: one})).seconds > 2 * (3 * 4 + 2)
    assert equation(program, sized(4, 1, {1: one, 2: two})).seconds == 2 * (3 * 4 + 2)


def test_backwards_over_half_a_micro_batch_cost_what_the_profile_says_for_half_the_items() -> None:
    """Half of a micro-batch of two items takes 1 of its 2; so does one item, if the profile says so, or 1.2."""
    program = lowered(schedule("chimera_halving", D=4, N=8))
    two, one, slow = (
        stage_timing(1.0, 2.0, 2.0, 1, 1, 0, 0),
        stage_timing(0.5, 1.0, 1.0, 1, 1, 0, 0),
        stage_timing(9, 1.2, 1.2, 1, 1, 0, 0),
    )
    free = replay(program, sized(4, 2, {2: two})).seconds
    assert replay(program, sized(4, 2, {2: two, 1: one})).seconds == free
    busy = max(sum(1.0 if each.kind is FORWARD else 1.2 for _, each in parts.computes) for parts in program.parts)
    assert free < busy <= replay(program, sized(4, 2, {2: two, 1: slow})).seconds < 1.2 * free


# Messages that share ports: b seconds each if it were alone.


LINK = Link(0.0, 1.0, shared=True)


def wires(*several: tuple[int, int, float, float], own: bool = False) -> list[float]:
    """How long messages take, of each the sender, the receiver, when it is sent, and its b."""
    nodes: list[Node] = []
    before: list[list[int]] = []
    ports: dict[int, tuple[Port, Port]] = {}
    for number, (source, target, posted, alone) in enumerate(several):
        send = Send(Message((Micro(number),), Stage(0), Stage(1), ACTIVATIONS), Worker(target))
        ends = Worker(source), Worker(target)
        nodes += [Node(Role.POST, send, ends[:1], posted), Node(Role.WIRE, send, ends, alone)]
        before += [[], [2 * number]]
        if not own:
            ports[2 * number + 1] = Port(ends[0], True, LINK), Port(ends[1], False, LINK)
    found = with_shared_ports(Events(nodes, before, {}, [], ports))
    return [node.seconds for node in found.nodes if node.role is Role.WIRE]


@pytest.mark.parametrize(
    ("several", "taken"),
    [
        pytest.param([(0, 1, 3.0, 4.0)], [4], id="alone"),
        pytest.param([(0, 1, 0.0, 4.0), (0, 2, 0.0, 4.0)], [8, 8], id="two that leave at once get half each"),
        pytest.param([(0, 2, 0.0, 4.0), (1, 2, 0.0, 4.0)], [8, 8], id="two that arrive at once get half each"),
        pytest.param([(0, 1, 0.0, 4.0), (1, 0, 0.0, 4.0), (1, 2, 9.0, 4.0)], [4, 4, 4], id="opposite directions"),
        # The first sends 1 of 4 alone, then 3 in 6; the second then has 1 left.
        pytest.param([(0, 1, 0.0, 4.0), (0, 2, 1.0, 4.0)], [7, 7], id="a later one takes a share of what is left"),
        # Three thirds until 3, two halves until 7, then all.
        pytest.param([(0, 1, 0.0, 1.0), (0, 2, 0.0, 3.0), (0, 3, 0.0, 5.0)], [3, 7, 9], id="a short one leaves"),
        # Three arrive at 9 with a third each; one of their senders has two thirds for another message.
        pytest.param(
            [(0, 9, 0.0, 4.0), (1, 9, 0.0, 4.0), (2, 9, 0.0, 4.0), (2, 3, 0.0, 4.0)], [12, 12, 12, 6], id="held up"
        ),
    ],
)
def test_messages_share_the_ports_that_they_use(several: list[tuple[int, int, float, float]], taken: list[int]) -> None:
    assert wires(*several) == pytest.approx(taken)


def test_ports_of_their_own_change_nothing() -> None:
    assert wires((0, 1, 0.0, 4.0), (0, 2, 0.0, 4.0), own=True) == [4.0, 4.0]
