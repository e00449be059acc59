"""The DAG: its nodes and edges on the smallest cases, its orders and cycles against plain definitions."""

import pytest
from hypothesis import given

from chimera_ir.flow.dag import Edge, build
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
    dag = build(order(one_direction(2, 1)))
    f0, b0, f1, b1, sum0, sum1, step0, step1 = range(len(dag))
    assert dag.predecessors(f0) == ()
    assert dag.predecessors(f1) == (f0,)
    assert dag.predecessors(b1) == (f1,)
    assert set(dag.predecessors(b0)) == {f0, b1}
    assert dag.successors(b1) == (b0, sum1)
    assert dag.successors(sum0) == (step0,)
    assert dag.successors(sum1) == (step1,)
    assert dag.topological == (f0, f1, b1, b0)
    assert dag.cycle() == ()
    assert [dag.worker_of(node) for node in (f0, b0, f1, b1)] == [0, 0, 1, 1]


def test_kinds_of_edges():
    dag = build(order(one_direction(1, 2)))
    f0, b0, f1, _b1, sum0 = range(5)
    assert dag.kind(f0, b0) is Edge.DATA
    assert dag.kind(b0, f1) is Edge.LANE
    assert dag.kind(3, sum0) is Edge.SYNC


def test_a_sum_waits_for_every_holder():
    dag = build(order(two_directions(2, 2)))
    stage0 = len(dag.operations)
    last = [node for node in range(stage0) if stage0 in dag.successors(node)]
    assert {dag.worker_of(node) for node in last} == {0, 1}
    assert all(dag.operations[node].kind is not FORWARD for node in last)
    assert len(dag.successors(stage0)) == 2


def test_updates_follow_one_another():
    """One stage, three updates of one micro-batch; the second reads no new weights, the third those of the second."""
    dag = build(
        read(
            "plan x\nworkers 1\nstages 1\nmicro_batches 3\nupdates 3 period 1\npipe p on 0 micros 0..3\n"
            "F m0 s0 v0 @ 0 on w0\nF m1 s0 v0 @ 1 on w0\nB m0 s0 v0 @ 2 on w0\nB m1 s0 v0 @ 3 on w0\n"
            "F m2 s0 v2 @ 4 on w0\nB m2 s0 v2 @ 5 on w0\n"
        )
    )
    _f0, _f1, b0, b1, f2, b2, sum1, sum2, sum3, step1, step2, step3 = range(len(dag))
    assert (dag.predecessors(sum1), dag.predecessors(sum2), dag.predecessors(sum3)) == ((b0,), (b1,), (b2,))
    assert set(dag.successors(step1)) == {b1, step2}, "the next gradients, where these were; and the next step"
    assert set(dag.successors(step2)) == {f2, b2, step3}
    assert dag.successors(step3) == ()
    assert dag.cycle() == ()
    assert dag.kind(b0, b1) is Edge.LANE
    assert dag.kind(b1, sum2) is dag.kind(step2, f2) is Edge.SYNC


def test_a_sum_of_every_update_waits_for_every_holder():
    dag = build(schedule(both_ways(2), 3))
    operations = len(dag.operations)
    assert len(dag) == operations + 2 * 3 + 2 * 3 * 2
    for number in range(operations, operations + 6):
        before = dag.predecessors(number)
        assert {dag.worker_of(node) for node in before} == {0, 1}
        assert {dag.operations[node].micros[0] // 2 for node in before} == {(number - operations) % 3}
        assert len(dag.successors(number)) == 2
    assert dag.cycle() == ()


@pytest.mark.parametrize("version", [0, 1])
def test_weights_cannot_come_from_gradients_that_need_them(version: int):
    dag = build(
        read(
            "plan x\nworkers 1\nstages 2\nmicro_batches 1\nupdates 1 period 1\npipe p on 0 0 micros 0..1\n"
            "F m0 s0 v0 @ 0 on w0\nF m0 s1 v0 @ 1 on w0\n"
            f"B m0 s1 v{version} @ 2 on w0\nB m0 s0 v0 @ 3 on w0\n"
        )
    )
    assert dag.cycle() == ((2,) if version else ())


def test_a_cycle_is_found_and_is_shortest():
    dag = build(
        read(
            "schedule x\nworkers 1\nstages 1\nmicro_batches 3\npipe p on 0 micros 0..3\n"
            "worker 0:\n F m0 s0\n B m1 s0\n B m2 s0\n F m1 s0\n F m2 s0\n B m0 s0\n"
        )
    )
    assert dag.cycle() in {(1, 2, 3), (2, 3, 1), (3, 1, 2)}
    with pytest.raises(ValueError, match="cycle"):
        _ = dag.topological


@examples(150)
@given(plans)
def test_an_order_or_a_cycle(plan):
    dag = build(order(plan))
    cycle = dag.cycle()
    if cycle:
        assert all(a in dag.predecessors(b) for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True))
        assert len(set(cycle)) == len(cycle)
        return
    place = {node: index for index, node in enumerate(dag.topological)}
    assert len(place) == len(dag.operations)
    assert all(place[before] < place[node] for node in place for before in dag.predecessors(node))
