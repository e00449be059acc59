"""The net: its waits on the smallest cases, its orders and cycles against plain definitions."""

import networkx as nx
import pytest
from hypothesis import given

from chimera_ir.flow.net import Net, net_of
from chimera_ir.ir.levels import Plan, Schedule
from chimera_ir.ir.text.reader import parse
from chimera_ir.lower.lower import order
from chimera_ir.source import Source
from chimera_ir.verify.cycle import cycle_in
from tests.property.programs import one_direction, plans
from tests.property.updates import both_ways, schedule
from tests.repeatable import examples


def read(text: str) -> Schedule:
    level = parse(Source("test.sir", text))
    assert isinstance(level, Schedule | Plan)
    return order(level) if isinstance(level, Plan) else level


def graph_of(net: Net) -> "nx.DiGraph[int]":
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(net.operations)))
    graph.add_edges_from((before, after) for after, several in enumerate(net.predecessors) for before in several)
    return graph


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
        added = [other for other in nx.ancestors(graph_of(net), first) if net.operations[other].kind.sums]
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
    graph, cycle = graph_of(net), cycle_in(net)
    assert nx.is_directed_acyclic_graph(graph) == (len(net.order) == len(net.operations)) == (not cycle)
    if cycle:
        assert all(graph.has_edge(a, b) for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True))
        assert len(set(cycle)) == len(cycle) == min(map(len, nx.simple_cycles(graph, length_bound=len(cycle))))
        return
    place = {node: index for index, node in enumerate(net.order)}
    assert all(place[before] < place[node] for before, node in graph.edges)
