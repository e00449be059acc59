"""The steady period of iterations that overlap: the time of each of many, where only its needs hold it back.

iteration k      worker 0:  F m0 s0 .. B m1 s0      worker 1:  F m0 s1 .. B m1 s1
iteration k+1               F m0 s0 ..                         F m0 s1 ..

The first operation of worker 0 in iteration k+1 waits for the last one of worker 0 in iteration k, B m1 s0, and for the
last ones that add to gradients of a weight that worker 0 holds, on every worker that holds it. It does not wait for
workers with which it shares no weight: there is no barrier.
"""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from chimera_ir.flow.cycles import critical
from chimera_ir.flow.net import Net
from chimera_ir.ir.ids import WeightGroup
from chimera_ir.ir.levels import Header


def steady_period(header: Header, net: Net, durations: Sequence[int]) -> Fraction:
    """The time of one of many iterations of a synchronous schedule that follow one another without a barrier, in ticks.

    Of k iterations in a row the makespan, divided by k, tends to it.
    """
    place = {number: place for place, number in enumerate(net.order)}
    waits = [[(place[before], 0) for before in net.predecessors[number]] for number in net.order]
    last = _last_additions(header, net)
    for worker, lane in enumerate(net.lanes):
        if lane:
            added = (number for group in header.groups_of[worker] for number in last.get(group, ()))
            waits[place[lane.start]] += [(place[number], 1) for number in sorted({lane[-1], *added})]
    return critical(waits, [durations[number] for number in net.order]).cycle.ratio


def _last_additions(header: Header, net: Net) -> Mapping[WeightGroup, Iterable[int]]:
    """For each weight group the last operation of each worker that adds to its gradients."""
    last: dict[WeightGroup, dict[int, int]] = {}
    for worker, lane in enumerate(net.lanes):
        for number in lane:
            for operation in net.operations[number].parts:
                if operation.kind.sums:
                    for group in header.groups_with[operation.stage]:
                        last.setdefault(group, {})[worker] = number
    return {group: by_worker.values() for group, by_worker in last.items()}
