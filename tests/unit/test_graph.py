"""The DAG: its nodes and edges on the smallest cases, its orders and cycles against plain definitions."""

import networkx as nx
import pytest
from hypothesis import given

from chimera_ir.flow.dag import Dag, Edge
from chimera_ir.flow.net import net_of
from chimera_ir.ir.kinds import FORWARD
from chimera_ir.ir.levels import Plan, Schedule
from chimera_ir.ir.text.reader import parse
from chimera_ir.lower.order import order
from chimera_ir.source import Source
from tests.property.programs import one_direction, plans, two_directions
from tests.property.updates import both_ways, schedule
from tests.repeatable import examples


def read(text: str) -> Schedule:
    level = parse(Source("test.sir", text))
    assert isinstance(level, Schedule | Plan)
    return order(level) if isinstance(level, Plan) else level


def test_two_stages_one_micro_batch():
    dag = Dag(order(one_direction(2, 1)))
    f0, b0, f1, b1, sum0, sum1, step0, step1 = range(len(dag.graph))
    assert not dag.graph.pred[f0]
    assert tuple(dag.graph.pred[f1]) == (f0,)
    assert tuple(dag.graph.pred[b1]) == (f1,)
    assert set(dag.graph.pred[b0]) == {f0, b1}
    assert tuple(dag.graph.succ[b1]) == (b0, sum1)
    assert tuple(dag.graph.succ[sum0]) == (step0,)
    assert tuple(dag.graph.succ[sum1]) == (step1,)
    assert tuple(nx.topological_sort(dag.graph))[:4] == (f0, f1, b1, b0)
    assert dag.cycle() == ()
    assert [dag.worker_of(node) for node in (f0, b0, f1, b1)] == [0, 0, 1, 1]


def test_kinds_of_edges():
    dag = Dag(order(one_direction(1, 2)))
    f0, b0, f1, _b1, sum0 = range(5)
    assert dag.kind(f0, b0) is Edge.DATA
    assert dag.kind(b0, f1) is Edge.LANE
    assert dag.kind(3, sum0) is Edge.SYNC


def test_a_sum_waits_for_every_holder():
    dag = Dag(order(two_directions(2, 2)))
    stage0 = len(dag.operations)
    last = [node for node in range(stage0) if stage0 in dag.graph.succ[node]]
    assert {dag.worker_of(node) for node in last} == {0, 1}
    assert all(dag.operations[node].kind is not FORWARD for node in last)
    assert len(dag.graph.succ[stage0]) == 2


def test_updates_follow_one_another():
    """One stage, three updates of one micro-batch; the second reads no new weights, the third those of the second."""
    dag = Dag(
        read(
            "plan x\nworkers 1\nstages 1\nmicro_batches 3\nupdates 3 period 1\npipe p on 0 micros 0..3\n"
            "F m0 s0 v0 @ 0 on w0\nF m1 s0 v0 @ 1 on w0\nB m0 s0 v0 @ 2 on w0\nB m1 s0 v0 @ 3 on w0\n"
            "F m2 s0 v2 @ 4 on w0\nB m2 s0 v2 @ 5 on w0\n"
        )
    )
    _f0, _f1, b0, b1, f2, b2, sum1, sum2, sum3, step1, step2, step3 = range(len(dag.graph))
    assert [[*dag.graph.pred[node]] for node in (sum1, sum2, sum3)] == [[b0], [b1], [b2]]
    assert set(dag.graph.succ[step1]) == {b1, step2}, "the next gradients, where these were; and the next step"
    assert set(dag.graph.succ[step2]) == {f2, b2, step3}
    assert not dag.graph.succ[step3]
    assert dag.cycle() == ()
    assert dag.kind(b0, b1) is Edge.LANE
    assert dag.kind(b1, sum2) is dag.kind(step2, f2) is Edge.SYNC


def test_a_sum_of_every_update_waits_for_every_holder():
    dag = Dag(schedule(both_ways(2), 3))
    operations = len(dag.operations)
    assert len(dag.graph) == operations + 2 * 3 + 2 * 3 * 2
    for number in range(operations, operations + 6):
        before = dag.graph.pred[number]
        assert {dag.worker_of(node) for node in before} == {0, 1}
        assert {dag.operations[node].micros[0] // 2 for node in before} == {(number - operations) % 3}
        assert len(dag.graph.succ[number]) == 2
    assert dag.cycle() == ()


@pytest.mark.parametrize("version", [0, 1])
def test_weights_cannot_come_from_gradients_that_need_them(version: int):
    level = read(
        "plan x\nworkers 1\nstages 2\nmicro_batches 1\nupdates 1 period 1\npipe p on 0 0 micros 0..1\n"
        "F m0 s0 v0 @ 0 on w0\nF m0 s1 v0 @ 1 on w0\n"
        f"B m0 s1 v{version} @ 2 on w0\nB m0 s0 v0 @ 3 on w0\n"
    )
    assert Dag(level).cycle() == ((2,) if version else ())
    assert [*net_of(level).order] == ([0, 1] if version else [0, 1, 2, 3])


def test_a_cycle_is_found_and_is_shortest():
    dag = Dag(
        read(
            "schedule x\nworkers 1\nstages 1\nmicro_batches 3\npipe p on 0 micros 0..3\n"
            "worker 0:\n F m0 s0\n B m1 s0\n B m2 s0\n F m1 s0\n F m2 s0\n B m0 s0\n"
        )
    )
    assert dag.cycle() in {(1, 2, 3), (2, 3, 1), (3, 1, 2)}


@examples(150)
@given(plans)
def test_an_order_or_a_cycle(plan):
    net, dag = net_of(order(plan)), Dag(order(plan))
    cycle = dag.cycle()
    assert (len(net.order) < len(net.operations)) == bool(cycle)
    if cycle:
        assert all(a in dag.graph.pred[b] for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True))
        assert len(set(cycle)) == len(cycle)
        return
    place = {node: index for index, node in enumerate(nx.topological_sort(dag.graph))}
    assert len(place) == len(dag.graph)
    assert all(place[before] < place[node] for node in place for before in dag.graph.pred[node])
