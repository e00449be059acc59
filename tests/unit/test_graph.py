"""The net: its waits on the smallest cases; its orders, cycles and longest paths against networkx."""

from collections.abc import Sequence

import networkx as nx
import pytest
from hypothesis import given

import chimera_ir
from chimera_ir import library
from chimera_ir.flow.engine import shortest_cycle
from chimera_ir.flow.net import Net, net_of, turn_net
from chimera_ir.ir.kinds import BACKWARD
from chimera_ir.ir.levels import Plan, Schedule
from chimera_ir.ir.streams import ScheduleStream
from chimera_ir.ir.text.reader import parse
from chimera_ir.ir.turns import in_turn
from chimera_ir.lower.lower import order
from chimera_ir.source import Source
from tests.property.programs import one_direction, plans
from tests.property.updates import both_ways, schedule
from tests.repeatable import examples


def read(text: str) -> Schedule:
    level = parse(Source("test.sir", text))
    return order(level) if isinstance(level, Plan) else level


def cycle_in(net: Net) -> tuple[int, ...]:
    return shortest_cycle(net.graph())


def test_two_stages_one_micro_batch():
    net = net_of(order(one_direction(2, 1)))
    f0, b0, f1, b1 = range(len(net.operations))
    assert [{*net.predecessors[number]} for number in (f0, b0, f1, b1)] == [set(), {f0, b1}, {f0}, {f1}]
    assert [*net.order] == [f0, f1, b1, b0]
    assert cycle_in(net) == ()


def test_updates_follow_one_another():
    """One stage, three updates of one micro-batch; the second reads no new weights, the third those of the second."""
    net = net_of(
        read(
            "plan x\nworkers 2\nstages 1\nmicro_batches 3\nupdates 3 period 1\n"
            "pipe p on 0 micros 0..1 2..3\npipe q on 1 micros 1..2\n"
            "F m0 s0 v0 @ 0 on w0\nF m1 s0 v0 @ 1 on w1\nB m0 s0 v0 @ 2 on w0\nB m1 s0 v0 @ 3 on w1\n"
            "F m2 s0 v2 @ 4 on w0\nB m2 s0 v2 @ 5 on w0\n"
        )
    )
    _f0, b0, f2, b2, f1, b1 = range(len(net.operations))
    assert {*net.predecessors[b1]} == {f1, b0}, "the next gradients, where these were"
    assert {*net.predecessors[f2]} == {b0, b1}, "the weights of the second update, and the lane"
    assert {*net.predecessors[b2]} == {f2}
    assert cycle_in(net) == ()


def test_a_step_waits_for_every_holder():
    """Two pipes in both directions, updates of two micro-batches: what reads version 1 waits on both workers."""
    net = net_of(schedule(both_ways(2), 3))
    owner = [worker for worker, lane in enumerate(net.lanes) for _ in lane]
    for lane in net.lanes:
        first = next(number for number in lane if net.operations[number].parts[0].version == 1)
        added = [other for other in nx.ancestors(net.graph(), first) if net.operations[other].kind.sums]
        stage = net.operations[first].parts[0].stage
        of_update = [other for other in added if net.operations[other].parts[0].stage == stage]
        assert {owner[other] for other in of_update if net.operations[other].parts[0].micros[0] < 2} == {0, 1}


@pytest.mark.parametrize("version", [0, 1])
def test_weights_cannot_come_from_gradients_that_need_them(version: int):
    level = read(
        "plan x\nworkers 1\nstages 2\nmicro_batches 1\nupdates 1 period 1\npipe p on 0 0 micros 0..1\n"
        "F m0 s0 v0 @ 0 on w0\nF m0 s1 v0 @ 1 on w0\n"
        f"B m0 s1 v{version} @ 2 on w0\nB m0 s0 v0 @ 3 on w0\n"
    )
    net = net_of(level)
    assert cycle_in(net) == ((2,) if version else ())
    assert [*net.order] == ([0, 1] if version else [0, 1, 2, 3])


def test_a_cycle_is_found_and_is_shortest():
    net = net_of(
        read(
            "schedule x\nworkers 1\nstages 1\nmicro_batches 3\npipe p on 0 micros 0..3\n"
            "worker 0:\n F m0 s0\n B m1 s0\n B m2 s0\n F m1 s0\n F m2 s0\n B m0 s0\n"
        )
    )
    assert cycle_in(net) in {(1, 2, 3), (2, 3, 1), (3, 1, 2)}


@examples(150)
@given(plans)
def test_an_order_or_a_cycle(plan):
    net = net_of(order(plan))
    graph, cycle = net.graph(), cycle_in(net)
    assert nx.is_directed_acyclic_graph(graph) == (len(net.order) == len(net.operations)) == (not cycle)
    if cycle:
        assert all(graph.has_edge(a, b) for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True))
        assert len(set(cycle)) == len(cycle) == min(map(len, nx.simple_cycles(graph, length_bound=len(cycle))))
        return
    place = {node: index for index, node in enumerate(net.order)}
    assert all(place[before] < place[node] for before, node in graph.edges)


@pytest.mark.parametrize("name", library.names())
def test_the_critical_path_is_the_longest_path_and_has_the_most_backwards(name: str):
    """Of every scheme; of a stream, whose critical operations are a cycle, the time that is shown."""
    compilation = chimera_ir.compile(name)
    timeline = compilation.timeline
    header = timeline.header
    timed = [timed for lane in timeline.lanes for timed in lane]
    backwards = [int(header.weight(t.operation) * header.weight_unit) * (t.operation.kind is BACKWARD) for t in timed]
    unit = 1 + sum(backwards)
    lengths = [(t.end - t.start) * unit + more for t, more in zip(timed, backwards, strict=True)]
    length, most = divmod(longest_path(compilation.dag, lengths), unit)
    assert length == timeline.span
    if not header.asynchronous:
        on_path = timeline.critical_path.counts.get("B", 0) * header.parts * header.weight_unit
        assert (length, most) == (timeline.critical_path.length, on_path)


@examples(100)
@given(plans)
def test_lanes_as_they_are_played_take_as_long_as_the_longest_path(plan: Plan):
    net = net_of(order(plan))
    if nx.is_directed_acyclic_graph(net.graph()):
        durations = [3 * len(operation.micros) + operation.stage for operation in net.operations]
        assert longest_path(net.graph(), durations) == max(net.ends(durations))


def longest_path(dag: "nx.DiGraph[int]", lengths: Sequence[int]) -> int:
    """The length of the longest path, that of a node at its end included."""
    weighed = nx.DiGraph([(a, b, {"weight": lengths[a]}) for a, b in dag.edges])
    weighed.add_weighted_edges_from((node, "end", lengths[node]) for node in dag)
    return nx.dag_longest_path_length(weighed)


# The net of a turn: its waits on small streams, and against the waits between the operations of many turns.


HEADER = "schedule x\nworkers 2\nstages 2\nmicro_batches 1\nupdates 1 per turn\npipe p on 0 1 micros 0..1\n"


def turn_of(lanes: str) -> ScheduleStream:
    return parse(Source("test.sir", HEADER + lanes))


def test_the_waits_of_two_stages() -> None:
    net = turn_net(turn_of("worker 0:\n F m s0 v-1\n B m-1 s0 v-2\nworker 1:\n F m s1 v\n B m s1 v\n"))
    assert [{*waits} for waits in net.waits] == [{(1, 1)}, {(0, 0), (3, 1)}, {(0, 0), (3, 1)}, {(2, 0)}]


def test_the_lane_waits_for_a_move_where_the_program_does() -> None:
    """The reload takes the link after the offload; the backward waits for it, and for the offload one turn before."""
    net = turn_net(
        turn_of(
            "worker 0:\n F m s0 v-1\n offload m s0\n reload m-1 s0\n B m-1 s0 v-2\nworker 1:\n F m s1 v\n B m s1 v\n"
        )
    )
    forward, offload, reload, backward = range(4)
    assert (forward, 0) in net.waits[offload]
    assert (offload, 0) in net.waits[reload]
    assert (reload, 0) in net.waits[backward]
    assert (offload, 1) in net.waits[backward]


@pytest.mark.parametrize(
    ("scheme", "sizes"), [("pipedream", {"D": 4}), ("pipedream_2bw", {"D": 3, "N": 5}), ("amdp", {"D": 4})]
)
def test_operations_wait_as_those_of_many_turns_do(scheme: str, sizes: dict[str, int]) -> None:
    """In the middle of many turns an operation waits directly for what the turn says, or for operations that do."""
    stream = chimera_ir.compile(scheme, **sizes).schedule
    net, shown = turn_net(stream), net_of(stream.view(stream.updates_shown))
    header, middle = stream.header, stream.updates_shown // stream.header.per_turn // 2
    node_of = {
        in_turn(header, operation)[0]: (node, in_turn(header, operation)[1])
        for node, operation in enumerate(net.operations)
    }

    def place(number: int) -> tuple[int, int]:
        """The node of an operation that is shown, and the turn of its lane."""
        name, turn = in_turn(header, shown.operations[number])
        node, offset = node_of[name]
        return node, turn - offset

    of_middle = [
        number for number in range(len(shown.operations)) if in_turn(header, shown.operations[number])[1] == middle
    ]
    assert len(of_middle) == len(net.operations)
    for number in of_middle:
        node, turn = place(number)
        nearest: dict[int, int] = {}
        for other, before in map(place, shown.predecessors[number]):
            nearest[other] = min(turn - before, nearest.get(other, turn - before))
        assert dict(net.waits[node]) == nearest
