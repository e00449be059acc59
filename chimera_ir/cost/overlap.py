"""The steady period: the time of an iteration where many follow one another without a barrier.

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
    """Returns the steady period of a synchronous schedule in ticks: the makespan of many iterations by their number.

    It is never longer than the makespan, and equal to it if the first operation of the critical ``path`` waits for the
    last operation of the path in the iteration before.

    Otherwise it is the largest ratio of a cycle of waits, as in `flow.cycles`: time by iterations. Only the first
    operation of a lane waits for the iteration before. So lanes are the nodes of the cycles, and playing one iteration
    gives the longest paths from lane to lane.
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
    """Maps the first operation of each lane to the operations of the iteration before for which it waits.

    Operations are named by their numbers in the net.
    """
    last = _last_additions(header, net)
    return {
        lane.start: {lane[-1], *(number for group in header.groups_of[worker] for number in last.get(group, ()))}
        for worker, lane in enumerate(net.lanes)
        if lane
    }


def _larger_ratio(
    net: Net, durations: Sequence[int], awaited: Mapping[int, Iterable[int]], ratio: Fraction
) -> Fraction | None:
    """Finds a cycle of waits that takes more than ``ratio`` ticks per iteration.

    Returns how many ticks per iteration it takes; None if there is no such cycle. ``awaited`` is the result of
    `_awaited`.

    Longest paths are found as by Bellman and Ford; a step of a path is an iteration, from whose time ``ratio`` is
    subtracted. If paths grow for ever, their steps close a cycle. While an iteration is played, one number holds a time
    and, as its last digit, the lane where the longest path to this time begins; the base is the number of lanes.
    """
    turn, unit, base = ratio.numerator, ratio.denominator, len(awaited)
    lengths = [duration * unit * base for duration in durations]
    begins = [0] * base
    steps: dict[int, tuple[int, int]] = {}
    weights: dict[int, int] = {}
    while True:
        # One more iteration: the latest of the awaited operations decides when each lane may begin the next one.
        ends = net.ends(lengths, {first: begins[lane] * base + lane for lane, first in enumerate(awaited)})
        later = list(begins)
        for lane, numbers in enumerate(awaited.values()):
            end, origin = divmod(max(ends[number] for number in numbers), base)
            if end - turn > begins[lane]:
                later[lane], steps[lane], weights[lane] = end - turn, (origin, 1), end - begins[origin]
        # Paths that grow no longer are in no cycle of a larger ratio; a cycle among the steps has one.
        if later == begins:
            return None
        if ratios := [cycle.ratio / unit for cycle in cycles_among(steps, weights)]:
            return max(ratios)
        begins = later


def _last_additions(header: Header, net: Net) -> Mapping[WeightGroup, Iterable[int]]:
    """Maps each weight group to the last operation of each worker that adds to its gradients, by number in the net."""
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
