"""The steady period of iterations that overlap: the time of each of many, where only its needs hold it back.

iteration k      worker 0:  F m0 s0 .. B m1 s0      worker 1:  F m0 s1 .. B m1 s1
iteration k+1               F m0 s0 ..                         F m0 s1 ..

The first operation of worker 0 in iteration k+1 waits for the last one of worker 0 in iteration k, B m1 s0, and for the
last ones that add to gradients of a weight that worker 0 holds, on every worker that holds it. It does not wait for
workers with which it shares no weight: there is no barrier.
"""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from chimera_ir.cost.critical import CriticalPath
from chimera_ir.flow.cycles import cycles_among
from chimera_ir.flow.net import Net
from chimera_ir.ir.ids import WeightGroup
from chimera_ir.ir.levels import Header


def steady_period(header: Header, net: Net, durations: Sequence[int], path: CriticalPath) -> Fraction:
    """The time of one of many iterations of a synchronous schedule that follow one another without a barrier, in ticks.

    Of k iterations in a row the makespan, divided by k, tends to it. It is the largest ratio of a cycle, as in
    `flow.cycles`. Between iterations only the first operations of lanes wait, so the nodes of the cycle are lanes: one
    run of an iteration says how long each lane must wait for all others, and no list of waits is made.

    No iteration takes longer than the makespan. Where the beginning of the critical ``path`` waits for its end, each
    takes as long.
    """
    awaited, operations = _awaited(header, net), net.operations
    for first, numbers in awaited.items():
        if operations[first] == path.operations[0] and path.operations[-1] in [operations[n] for n in numbers]:
            return path.length
    ratio = Fraction(0)
    while (larger := _larger_ratio(net, durations, awaited, ratio)) is not None:
        ratio = larger
    return ratio


def _awaited(header: Header, net: Net) -> Mapping[int, Iterable[int]]:
    """For the first operation of each lane, those of the iteration before that it waits for."""
    last = _last_additions(header, net)
    return {
        lane.start: {lane[-1], *(number for group in header.groups_of[worker] for number in last.get(group, ()))}
        for worker, lane in enumerate(net.lanes)
        if lane
    }


def _larger_ratio(
    net: Net, durations: Sequence[int], awaited: Mapping[int, Iterable[int]], ratio: Fraction
) -> Fraction | None:
    """The ratio of a cycle that is larger than ``ratio``; None if no cycle has one.

    Longest paths as in `flow.cycles`, of which each step is an iteration. An end is a time, and in its last digit, to
    the base of the number of lanes, the lane at whose beginning its longest path begins.
    """
    turn, unit, base = ratio.numerator, ratio.denominator, len(awaited)
    lengths = [duration * unit * base for duration in durations]
    begins = [0] * base
    steps: dict[int, tuple[int, int]] = {}
    weights: dict[int, int] = {}
    while True:
        ends = net.ends(lengths, {first: begins[lane] * base + lane for lane, first in enumerate(awaited)})
        later = list(begins)
        for lane, numbers in enumerate(awaited.values()):
            end, origin = divmod(max(ends[number] for number in numbers), base)
            if end - turn > begins[lane]:
                later[lane], steps[lane], weights[lane] = end - turn, (origin, 1), end - begins[origin]
        if later == begins:
            return None
        if ratios := [cycle.ratio / unit for cycle in cycles_among(steps, weights)]:
            return max(ratios)
        begins = later


def _last_additions(header: Header, net: Net) -> Mapping[WeightGroup, Iterable[int]]:
    """For each weight group the last operation of each worker that adds to its gradients."""
    last: dict[WeightGroup, dict[int, int]] = {}
    for worker, lane in enumerate(net.lanes):
        missing = {*header.groups_of[worker]}
        for number in reversed(lane):
            if not missing:
                break
            for part in net.operations[number].parts:
                if part.kind.sums:
                    for group in missing.intersection(header.groups_with[part.stage]):
                        last.setdefault(group, {})[worker] = number
                        missing.remove(group)
    return {group: by_worker.values() for group, by_worker in last.items()}
