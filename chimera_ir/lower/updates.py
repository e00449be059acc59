"""Decides where a stream sums gradients and steps, and which weight versions it keeps.

    worker 0:                    worker 0:
      F m0 s0 v0                   F m0 s0 v0
      F m1 s0 v0                   F m1 s0 v0
      B m0 s0 v0                   B m0 s0 v0
      F m2 s0 v1                   all_reduce s0 v1
      B m1 s0 v0                   wait all_reduce s0 v1
      ...                          stash s0 v0           (B m1 s0 still reads version 0)
                                   step s0 v1
                                   F m2 s0 v1
                                   B m1 s0 v0
                                   drop s0 v0
                                   ...

The policy, for every worker and every weight group of which it holds any stage:

``all_reduce``
    right after the last backward of an update.
``wait all_reduce``, ``stash``, ``step``
    right before the first operation that reads the version that the step makes, or before the first backward of a later
    update if that comes first: both updates add up their gradients in the same memory. The version that the step
    supersedes is stashed if a later operation reads it.
``drop``
    right after the last operation that reads a stashed version.

A worker whose pipes have none of an update's micro-batches adds nothing to the update, but takes part in its sum. There
is no last backward, so it launches right after the step of the update before, which frees the memory of the sum. Other
workers wait for this launch. So that no worker waits in a cycle, that step is made early: before the first operation
that can run only after the sum of the update before, if that operation comes before the place that the policy gives.

All workers launch in one agreed order, as in `sync`: by the time at which the last member wants to launch, in the
earliest run that repeats. A sum is over as soon as all workers have launched it; communication and steps take no time.

Places of a lane are counted on from turn to turn, as in `flow.net.TurnNet`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import accumulate, chain
from sys import maxsize
from typing import NamedTuple, assert_never

from chimera_ir.flow.engine import longest_paths, steady_run
from chimera_ir.flow.net import Net, TurnLane, TurnNet
from chimera_ir.ir.levels import Schedule, Strategy
from chimera_ir.ir.ops import (
    NOWHERE,
    AllReduce,
    Drop,
    Instruction,
    Operation,
    Stage,
    Stash,
    Step,
    Version,
    WaitAllReduce,
    WeightGroup,
    singles,
)
from chimera_ir.source import Span

# Inserts the sums of each weight group's gradients over the workers that hold any of its stages, and the steps.
#
#     worker 0:                    worker 0:
#       F m0 s0                      F m0 s0
#       F m1 s0                      F m1 s0
#       F m2 s3                      F m2 s3
#       B m2 s3                      B m2 s3
#       F m3 s3                      F m3 s3
#       B m3 s3                      B m3 s3
#       B m0 s0                      all_reduce s3         (eager: a bubble follows)
#       B m1 s0                      B m0 s0
#                                    B m1 s0
#                                    all_reduce s0
#                                    wait all_reduce s3
#                                    step s3
#                                    wait all_reduce s0
#                                    step s0
#
# The strategy of a stage says when a worker launches its sum (section 3.2 of the paper): right after the worker's last
# backward of that stage in any pipe (eager), or after all its compute (lazy). By default (eager_opt) the launch is
# eager only where the schedule leaves the worker a bubble between these two points: without a bubble, an eager launch
# would only disturb the compute that follows. Times are those of a run in which each operation begins as early as it
# can, with the given durations and free communication.
#
# A worker that holds a stage only for pipes without micro-batches takes part in the sum as well, with nothing to add.
# All workers launch their sums in one agreed order: by the time at which the last member wants to launch. So
# overlapping groups of workers never wait for each other in a cycle. If this order delays a launch, then only until
# after a sum that begins no later than the delayed one could.
#
# The sums are waited for at the end of the lane, in the order of their launches, each before its step. A stage that
# only one worker holds has a sum, too: the number of copies W is known only when the program is started.
#
# All this holds for each weight group, not only for stages. Stages that share parameters are a group in addition to the
# groups of the single stages; its sum follows the worker's last backward of any of these stages.

Duration = Callable[[Operation], int]
"""The time that an operation takes, in any unit."""


class Insertions(NamedTuple):
    """Instructions to insert before and after the operation at a place of a lane, and at the lane's end.

    The start of the lane is after place -1.
    """

    before: Mapping[int, Sequence[Instruction]]
    after: Mapping[int, Sequence[Instruction]]
    at_end: Sequence[Instruction] = ()


class Launch(NamedTuple):
    """The launch of a group's sum, right after the operation at place ``after``; -1 is the start of the lane."""

    after: int
    group: WeightGroup


class _Wish(NamedTuple):
    after: int
    time: int


def synchronise(schedule: Schedule, duration: Duration, net: Net) -> Iterator[Insertions]:
    """Yields the sums and steps to insert into each lane by the policy above; none if nothing is trained."""
    if not schedule.header.trains:
        yield from [Insertions({}, {})] * len(schedule.lanes)
        return
    launches_by_lane = launches(schedule, net, list(map(duration, net.operations)))
    for operations, launched in zip(schedule.lanes, launches_by_lane, strict=True):
        yield _launch_insertions(launched, {operation.stage: operation.origin for operation in singles(operations)})


def launches(schedule: Schedule, net: Net, durations: Sequence[int]) -> Iterator[tuple[Launch, ...]]:
    """Yields the launches of every lane; ``durations`` has one entry for each operation of the net."""
    wishes = list(_wishes(schedule, net, durations))
    # The agreed order: by the time at which the last member wants to launch, then the group later in the header first.
    last: dict[WeightGroup, int] = {}
    for group, wish in chain.from_iterable(lane.items() for lane in wishes):
        last[group] = max(last.get(group, 0), wish.time)
    numbers = schedule.header.group_numbers
    for lane in wishes:
        launched: list[Launch] = []
        after = -1
        # A launch is delayed to the one before it in the agreed order.
        for group in sorted(lane, key=lambda group: (last[group], -numbers[group])):
            after = max(after, lane[group].after)
            launched.append(Launch(after, group))
        yield tuple(launched)


def _launch_insertions(launched: Iterable[Launch], origin: Mapping[Stage, Span]) -> Insertions:
    after: dict[int, list[Instruction]] = defaultdict(list)
    at_end: list[Instruction] = []
    for place, group in launched:
        where = next((origin[stage] for stage in group if stage in origin), NOWHERE)
        after[place].append(AllReduce(group, where))
        at_end += [WaitAllReduce(group, where), Step(group, where)]
    return Insertions({}, after, at_end)


def _wishes(schedule: Schedule, net: Net, durations: Sequence[int]) -> Iterator[dict[WeightGroup, _Wish]]:
    """Yields for each lane when its worker wants to launch the sums of its groups, by their strategies."""
    times = net.ends(durations)
    for lane, numbers, groups in zip(schedule.lanes, net.lanes, schedule.header.groups_of, strict=True):
        ends = times[numbers.start : numbers.stop]
        # ``worked[p]`` is the time that the worker has computed before place p; the rest of the time it was idle.
        worked = list(accumulate(durations[numbers.start : numbers.stop], initial=0))
        backwards = {
            part.stage: place for place, operation in enumerate(lane) for part in operation.parts if part.kind.sums
        }
        at_end = _Wish(len(lane) - 1, ends[-1] if ends else 0)
        wishes: dict[WeightGroup, _Wish] = {}
        for group in groups:
            # The worker's last backward of any stage of the group; -1, the start of the lane, if it has none.
            last = max((backwards[stage] for stage in group if stage in backwards), default=-1)
            ready = _Wish(last, ends[last] if last >= 0 else 0)
            bubble = at_end.time - ready.time - (worked[-1] - worked[last + 1])
            wishes[group] = ready if _is_eager(schedule.header.strategy(group), bubble) else at_end
        yield wishes


def _is_eager(strategy: Strategy, bubble: int) -> bool:
    """Whether a sum of this strategy is launched eagerly.

    ``bubble`` is how long the worker idles between its last backward for the sum and the end of its lane.
    """
    match strategy:
        case Strategy.LAZY:
            return False
        case Strategy.EAGER:
            return True
        case Strategy.EAGER_OPT:
            return bubble > 0
        case _:
            assert_never(strategy)


class _Gap(NamedTuple):
    """The point of a lane right before the operation at ``place``, ``behind_steps`` that are made there or not."""

    place: int
    behind_steps: bool


class _GroupUpdate(NamedTuple):
    """An update of a group on one worker, by places in its lane.

    ``launch`` is the gap right after the worker's last backward of the update or, without one, after the step of the
    update before. The step must be made before the operation at ``step``. ``last`` is the place of the last operation
    that reads the version that the step supersedes; it is less than ``step`` if none does after the step.
    """

    group: WeightGroup
    version: int
    launch: _Gap
    step: int
    last: int


@dataclass(frozen=True)
class _LaneUpdates:
    """The updates of a worker's weight groups, found from the operations of its turn (``lane``).

    ``summed`` has an entry for each group to which some worker adds nothing in some update: pairs of a place in this
    worker's lane, and how many updates of the group are surely summed when the operation there runs.
    """

    lane: TurnLane
    summed: dict[WeightGroup, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def uneven(self) -> Iterator[WeightGroup]:
        """The groups to whose gradients the worker adds nothing in some update."""
        sums, updates = self.lane.sums, range(self.lane.per_turn)
        return (
            group for group in self.lane.needs if None in [self.lane.last(sums[group], update) for update in updates]
        )

    def of_turn(self) -> Iterator[_GroupUpdate]:
        """Yields the updates of turn 0, for each group from the one that makes version 1."""
        return (
            self.update(group, version) for group in self.lane.needs for version in range(1, 1 + self.lane.per_turn)
        )

    def update(self, group: WeightGroup, version: int) -> _GroupUpdate:
        """The update of a group whose step makes ``version``, with places that count on from turn to turn."""
        lane, step = self.lane, self._step(group, version)
        last, read = lane.last(lane.sums[group], version - 1), lane.last(lane.reads[group], version - 1)
        # An update is launched after its last backward, or else behind the step before.
        launch = (last + 1, False) if last is not None else (self._step(group, version - 1), True)
        return _GroupUpdate(group, version, _Gap(*launch), step, step - 1 if read is None else read)

    def _step(self, group: WeightGroup, version: int) -> int:
        """The place before which the step that makes ``version`` must be made.

        If the worker adds nothing to the update after it, the step is made early: the sum of that update is launched
        right after the step, and other workers wait for the launch.
        """
        is_early = self.lane.last(self.lane.sums[group], version) is None
        return self.lane.first_need(group, version, self.summed[group] if is_early else ())


def update(net: TurnNet, duration: Duration) -> Iterator[Insertions]:
    """Yields for each lane the sums, steps, stashes and drops of turn 0, by the policy above."""
    by_lane = _by_lane(net)
    order = _agreed(net, by_lane, duration)
    for updates in by_lane:
        # An update has lines in some turns. Launches that are as many turns earlier may delay its launch.
        lane = updates.lane
        places = ((update.launch.place, update.step, update.last) for update in updates.of_turn())
        turns = [place // lane.length for place in chain.from_iterable(places)]
        first, last = min(turns, default=0), max(turns, default=0)
        versions = range(1 + (first - 2 * last - 1) * lane.per_turn, 1 + (2 - first) * lane.per_turn)
        several = [updates.update(group, version) for group in lane.needs for version in versions]
        yield _insertions(lane, sorted(several, key=order))


def _insertions(lane: TurnLane, updates: Iterable[_GroupUpdate]) -> Insertions:
    """The lines of ``updates``, which are in the agreed order of sums, to insert into the turn of ``lane``."""
    before: dict[int, list[Instruction]] = defaultdict(list)
    after: dict[int, list[Instruction]] = defaultdict(list)
    gap = _Gap(-maxsize, behind_steps=False)
    for group, number, launch, step, last in updates:
        gap = max(gap, launch)  # a launch is delayed to the one before it in the agreed order
        version, superseded = Version(number), Version(number - 1)
        origin = lane.operations[(launch.place - (not launch.behind_steps)) % lane.length].origin
        launches = before[gap.place] if gap.behind_steps else after[gap.place - 1]
        launches.append(AllReduce(group, origin, version))
        before[step].append(WaitAllReduce(group, origin, version))
        if last >= step:
            before[step].append(Stash(group, superseded, origin))
            after[last].append(Drop(group, superseded, lane.operations[last % lane.length].origin))
        before[step].append(Step(group, origin, version))
    return Insertions(before, after)


def _by_lane(net: TurnNet) -> list[_LaneUpdates]:
    by_lane, per_turn = [*map(_LaneUpdates, net.lanes)], net.header.per_turn
    for group in {group for updates in by_lane for group in updates.uneven}:
        needs = [-maxsize] * len(net.operations)
        for lane in net.lanes:
            for place, need in lane.needs.get(group, ()):
                node, _ = lane.node(place)
                needs[node] = max(needs[node], need)
        # The newest version that any operation before needs; for one a turn earlier, less by the updates of a turn.
        counts, _ = longest_paths(net.waits, [0] * len(needs), Fraction(per_turn), needs)
        for updates in by_lane:
            updates.summed[group] = [
                (place, counts[updates.lane.first + place]) for place in range(updates.lane.length)
            ]
    return by_lane


def _agreed(
    net: TurnNet, by_lane: Sequence[_LaneUpdates], duration: Duration
) -> Callable[[_GroupUpdate], tuple[Fraction, int]]:
    """Returns the sort key by which all workers order the launches of their sums, as a function of an update.

    A sum comes by the time at which all workers want to have launched it; of equal times, that of the later group
    first. The times are those of the earliest run that repeats every turn, and that begins no operation on a
    micro-batch of turn 0, or of a later turn, before time 0.
    """
    header, numbers = net.header, net.header.group_numbers

    @cache
    def launched(group: WeightGroup, version: int) -> list[tuple[int, int]]:
        """The operations after which workers launch a sum, each as (node of the net, turn)."""
        return [
            updates.lane.node(updates.update(group, version).launch.place - 1)
            for updates in by_lane
            if group in updates.lane.needs
        ]

    run = None
    if any(len(groups) > 1 for groups in header.groups_of):
        waits = [*net.waits]
        if any(updates.summed for updates in by_lane):
            # Steps also wait for the workers that launch a sum with nothing to add.
            for updates in by_lane:
                for update in updates.of_turn():
                    node, step = updates.lane.node(update.step)
                    sums = launched(update.group, update.version)
                    waits[node] = (*waits[node], *((other, step - number) for other, number in sums))
        with suppress(ValueError):  # where workers wait for each other in a cycle, whatever the order
            turns = [min(operation.micros) // header.period for operation in net.operations]
            run = steady_run(waits, [*map(duration, net.operations)], turns)

    @cache
    def time(group: WeightGroup, version: int) -> Fraction:
        """The time at which the sum that leads to ``version`` is over: not before that of the version before."""
        if run is None:
            return Fraction(version)
        earlier = range(version - header.per_turn + 1, version + 1)
        sums = [operation for number in earlier for operation in launched(group, number)]
        return max(run.ends[node] + number * run.ratio for node, number in sums)

    return lambda update: (time(update.group, update.version), -numbers[update.group])
