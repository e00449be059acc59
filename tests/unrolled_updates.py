"""Sums, steps and weight versions of some updates of a stream, by a walk along their lanes: a part of the oracle.

The compiler (`lower.updates`) computes those of one turn, without a walk along the lanes of many.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from chimera_ir.flow.engine import play, steady_run
from chimera_ir.flow.net import Net, net_of, newest, places_after
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import (
    AllReduce,
    Drop,
    Instruction,
    Operation,
    Stash,
    Step,
    Version,
    WaitAllReduce,
    WeightGroup,
    singles,
)
from chimera_ir.ir.turns import in_turn
from chimera_ir.lower.updates import Duration, Insertions


class _Gap(NamedTuple):
    """A point of a lane right before the operation at ``place``; with ``behind_steps``, after the steps made there."""

    place: int
    behind_steps: bool


class _GroupUpdate(NamedTuple):
    """An update of a group on one worker, by places in its lane.

    ``launch`` is the gap right after the worker's last backward of the update or, without one, after the step before.
    The step must be made before the operation at ``step``; ``last`` is the place of the last operation that reads the
    version that the step supersedes.
    """

    group: WeightGroup
    version: Version
    launch: _Gap
    step: int
    last: int


def update(net: Net, duration: Duration) -> Iterator[Insertions]:
    """The sums, steps, stashes and drops of every lane, by the policy above; ``duration`` is in any unit.

    ``net`` is that of some updates of a stream. Its operations read the versions of the steady state, except in the
    first turns: there version 0 may stand for versions below 0.
    """
    updates_by_lane = _all_updates(net.schedule, net)
    agreed = _agreed(net, duration, updates_by_lane)
    for lane, updates in zip(net.schedule.lanes, updates_by_lane, strict=True):
        yield _insertions(
            lane, sorted(updates, key=lambda group_update: agreed[group_update.version, group_update.group])
        )


def _insertions(lane: tuple[Operation, ...], updates: list[_GroupUpdate]) -> Insertions:
    before: dict[int, list[Instruction]] = defaultdict(list)
    after: dict[int, list[Instruction]] = defaultdict(list)
    # Updates come in the agreed order of their launches. A launch is delayed to the one before it in this order.
    gap = _Gap(0, behind_steps=False)
    for group, version, launch, step, last in updates:
        gap = max(gap, launch)
        origin = lane[min(launch.place - (not launch.behind_steps), len(lane) - 1)].origin
        launches = before[gap.place] if gap.behind_steps else after[gap.place - 1]
        launches.append(AllReduce(group, origin, version))
        before[step].append(WaitAllReduce(group, origin, version))
        if last >= step:
            before[step].append(Stash(group, Version(version - 1), origin))
            after[last].append(Drop(group, Version(version - 1), lane[last].origin))
        before[step].append(Step(group, origin, version))
    return Insertions(before, after)


def _all_updates(schedule: Schedule, net: Net | None = None) -> list[list[_GroupUpdate]]:
    """The updates of every lane; ``net`` is the schedule's net if the caller has it."""
    header = schedule.header
    uneven = {group for number, lane in enumerate(schedule.lanes) for group in _uneven(header, number, lane)}
    summed = {group: _summed(net or net_of(schedule), group) for group in uneven}
    ends = accumulate(map(len, schedule.lanes))
    return [
        list(_updates(header, lane, {group: counts[end - len(lane) : end] for group, counts in summed.items()}))
        for lane, end in zip(schedule.lanes, ends, strict=True)
    ]


def _summed(net: Net, group: WeightGroup) -> Sequence[int]:
    """The number of updates of a group that are surely summed when an operation runs, by the operation's number."""
    header, counts = net.schedule.header, [0] * len(net.operations)
    for number in net.order:
        needs = [newest(header, part) for part in net.operations[number].parts if part.stage in group]
        counts[number] = max([*needs, *map(counts.__getitem__, net.predecessors[number])], default=0)
    return counts


def _uneven(header: Header, worker: int, lane: Sequence[Operation]) -> Iterator[WeightGroup]:
    """The groups of a worker to whose gradients the worker adds nothing in some update."""
    added = {
        (group, header.update_of(operation.micros))
        for operation in singles(lane)
        if operation.kind.sums
        for group in header.groups_with[operation.stage]
    }
    updates = Counter(group for group, _ in added)
    return (group for group in header.groups_of[worker] if updates[group] < header.updates)


def _updates(
    header: Header, lane: Sequence[Operation], summed: Mapping[WeightGroup, Sequence[int]]
) -> Iterator[_GroupUpdate]:
    """The updates of a lane, group by group; a step that no operation waits for is made at the end of the lane.

    ``summed`` counts the updates that are surely summed at each place, for groups to which some worker adds nothing in
    an update.
    """
    # The last backward of each update, and the last reader of each version.
    backwards: dict[tuple[WeightGroup, int], int] = {}
    lasts: dict[tuple[WeightGroup, int], int] = {}
    for place, operation in enumerate(singles(lane)):
        for group in header.groups_with[operation.stage]:
            lasts[group, operation.version or 0] = place
            if operation.kind.sums:
                backwards[group, header.update_of(operation.micros)] = place
    for group, steps in places_after(header, lane).items():
        steps += [len(lane)] * (header.updates - len(steps))
        # The step before an update without backwards is made early, so that its launch keeps no worker waiting.
        for number in range(1, header.updates):
            if (group, number) not in backwards:
                steps[number - 1] = min(steps[number - 1], bisect_left(summed[group], number))
        # An update is launched after its last backward, or else behind the step before.
        for number, step in enumerate(steps):
            last = backwards.get((group, number))
            behind = _Gap(steps[number - 1] if number else 0, behind_steps=True)
            launch = behind if last is None else _Gap(last + 1, behind_steps=False)
            yield _GroupUpdate(group, Version(number + 1), launch, step, lasts.get((group, number), -1))


def _agreed(
    net: Net, duration: Duration, updates: list[list[_GroupUpdate]]
) -> Mapping[tuple[Version, WeightGroup], tuple[Fraction, int]]:
    """The sort key of every sum in the order of the launches; of sums with the same time, the later group is first."""
    header = net.schedule.header
    # The operations after which each sum is launched.
    launched: dict[tuple[Version, WeightGroup], list[int]] = defaultdict(list)
    for lane, group_updates in zip(net.lanes, updates, strict=True):
        for group, version, launch, *_ in group_updates:
            launched[version, group] += lane[launch.place - 1 : launch.place]
    if all(len(groups) < 2 for groups in header.groups_of):
        return {(version, group): (Fraction(version), 0) for version, group in launched}
    if any(update.launch.behind_steps for lane in updates for update in lane):
        net = _with_joins(net, updates, launched)
    end, numbers = _steady_ends(net, [*map(duration, net.operations)]), header.group_numbers
    # A sum is not over before the one for the version before it.
    latest: dict[WeightGroup, Fraction] = defaultdict(Fraction)
    agreed: dict[tuple[Version, WeightGroup], tuple[Fraction, int]] = {}
    for version, group in sorted(launched):
        latest[group] = max([latest[group], *map(end, launched[version, group])])
        agreed[version, group] = latest[group], -numbers[group]
    return agreed


def _with_joins(
    net: Net, updates: Iterable[list[_GroupUpdate]], launched: Mapping[tuple[Version, WeightGroup], list[int]]
) -> Net:
    """The net in which steps also wait for the workers that launch a sum with nothing to add."""
    before = [*net.predecessors]
    for lane, group_updates in zip(net.lanes, updates, strict=True):
        for group, version, _, step, _ in group_updates:
            for number in lane[step : step + 1]:
                before[number] += tuple(launched[version, group])
    return replace(net, predecessors=tuple(before), order=play(net.lanes, before).order)


def _steady_ends(net: Net, durations: Sequence[int]) -> Callable[[int], Fraction]:
    """The end of an operation in a run that repeats every turn, so that the order of its sums is that of every turn.

    The run is the earliest one that repeats and begins no operation on a micro-batch from 0 on before time 0.
    """
    if len(net.order) < len(net.operations):
        return lambda _: Fraction(0)  # workers wait for each other in a cycle, whatever the order
    places = [in_turn(net.schedule.header, operation) for operation in net.operations]
    numbers: dict[Instruction, int] = {}
    for number, (place, turn) in enumerate(places):
        if turn == 0:
            numbers[place] = number
    # The waits of each operation in any turn that is shown, by its number in turn 0: versions below 0 hide some.
    waits: dict[int, dict[int, int]] = {number: {} for number in numbers.values()}
    for number, before in enumerate(net.predecessors):
        of_node = waits[numbers[places[number][0]]]
        for other in before:
            node, ago = numbers[places[other][0]], places[number][1] - places[other][1]
            of_node[node] = min(ago, of_node.get(node, ago))
    # Numbers without gaps, as `steady_run` wants them.
    dense = {number: place for place, number in enumerate(waits)}
    steady = steady_run(
        [[(dense[other], ago) for other, ago in of_node.items()] for of_node in waits.values()],
        [durations[number] for number in waits],
        [0] * len(waits),
    )

    def end(number: int) -> Fraction:
        place, turn = places[number]
        return steady.ends[dense[numbers[place]]] + turn * steady.ratio

    return end
