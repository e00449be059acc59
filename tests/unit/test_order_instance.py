"""`orders.instance` has the times, delays and amounts of memory that timelines, replays and rules have, too."""

from dataclasses import replace
from fractions import Fraction
from itertools import accumulate

import pytest

import chimera_ir
from chimera_ir.cost.durations import Costs
from chimera_ir.cost.simulate import simulate
from chimera_ir.flow import live
from chimera_ir.ir.levels import Bound, Quantity
from chimera_ir.orders.instance import OrderInstance, instance_of
from chimera_ir.predict.replay import replay
from chimera_ir.predict.setting import Measured, Setting
from chimera_ir.profile.cluster import FREE, Cluster, Link
from chimera_ir.profile.costs import StageCosts, Timing
from chimera_ir.verify.verify import verify_schedule
from chimera_runtime.program.kept_bytes import MicroBatchBytes

COSTS = Costs(F=Fraction(3, 2), B=Fraction(4), I=Fraction(2), W=Fraction(5, 3), recompute=Fraction(1, 2))
SCHEMES = {
    "zb_v": {"P": 4},
    "interleaved": {"P": 4},
    "chimera_doubling": {"D": 4},
    "dualpipe": {"D": 4},
    "seq1f1b": {"D": 3, "k": 2},
}


def scheme(name: str, recompute: bool = False) -> chimera_ir.Compilation:
    return chimera_ir.compile(name, options=chimera_ir.Options(recompute=recompute), **SCHEMES[name])


def lanes_of(instance: OrderInstance) -> list[list[int]]:
    starts = instance.starts(instance.lanes)
    return instance.by_start(starts)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_an_order_has_the_makespan_of_its_timeline(name: str, recompute: bool) -> None:
    compilation = scheme(name, recompute)
    schedule, plan = compilation.schedule, compilation.plan
    for level in (schedule, plan):
        instance = instance_of(level, COSTS)
        starts = instance.starts(instance.lanes)
        assert instance.makespan(starts) * instance.tick == simulate(schedule, COSTS).makespan
        assert instance.schedule(lanes_of(instance)) == schedule


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_changes_to_stores_add_up_to_what_each_worker_keeps(name: str, recompute: bool) -> None:
    schedule = scheme(name, recompute).schedule
    bound = Bound(Quantity.ACTIVATIONS, tuple(range(5, 5 + schedule.header.workers)))
    instance = instance_of(replace(schedule, header=replace(schedule.header, bounds=(bound,))), COSTS)
    assert [store.limit for store in instance.stores] == [limit * schedule.header.parts for limit in bound.limits]
    for worker, (lane, peak) in enumerate(zip(instance.lanes, live.activations(schedule), strict=True)):
        changes = [change for number in lane for change in instance.changes[number]]
        assert {change.store for change in changes} == {worker}
        both = (amount for change in changes for amount in (change.at_start, change.at_end))
        assert max(accumulate(both)) == peak.amount


def test_messages_delay_an_order_as_in_a_replay() -> None:
    """Without sums and steps, and with links that messages do not share."""
    compilation = scheme("interleaved")
    schedule = compilation.schedule
    timing = Timing({"F": 0.011, "B": 0.023, "recompute": 0.0}, MicroBatchBytes(0, 0), 3000, 7000)
    link = Link(alpha=0.001, beta=1e-6)
    cluster = Cluster("c", schedule.header.workers, 2, 0, 0, between=link, within=Link(0.002, 0.0), sums=FREE)
    setting = Setting((StageCosts(0, 0, 0, {1: timing}),) * schedule.header.stages, cluster, 1, 1)
    instance = instance_of(schedule, Measured.of(setting))
    starts = instance.starts(instance.lanes)
    seconds = float(instance.makespan(starts) * instance.tick)
    assert seconds == pytest.approx(replay(compilation.program, setting).seconds, rel=1e-6)
    unlinked = replace(setting, cluster=replace(cluster, between=FREE, within=FREE))
    free = instance_of(schedule, Measured.of(unlinked))
    free_starts = free.starts(free.lanes)
    assert free.makespan(free_starts) * free.tick < seconds


def test_an_order_from_start_times_verifies_and_one_that_closes_a_cycle_has_no_starts() -> None:
    schedule = scheme("zb_v").schedule
    instance = instance_of(schedule, COSTS)
    made = instance.schedule(lanes_of(instance))
    assert verify_schedule(made, None).findings.diagnostics == ()
    assert instance.starts([lane[::-1] for lane in instance.lanes]) is None
