"""Sums, steps and weight versions of a stream.

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
earliest run. A sum is over as soon as all workers have launched it; communication and steps take no time.

Places of a lane are counted on from turn to turn, as in `streaming`: what is at place p in one turn is at p + n in the
next, where a turn has n operations, and its version is later by the updates of a turn.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from sys import maxsize
from typing import NamedTuple

from chimera_ir.flow.cycles import longest_paths, steady_run
from chimera_ir.flow.fold import FoldedTurn, fold
from chimera_ir.flow.net import Net, newest
from chimera_ir.ir.ids import Version, WeightGroup
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import AllReduce, Compute, Drop, Instruction, Stash, Step, WaitAllReduce
from chimera_ir.ir.streams import ScheduleStream, computes
from chimera_ir.ir.turns import in_turn
from chimera_ir.lower.sync import Duration, Insertions


class _Gap(NamedTuple):
    """A point of a lane right before the operation at ``place``; with ``behind_steps``, after the steps made there."""

    place: int
    behind_steps: bool


class _GroupUpdate(NamedTuple):
    """An update of a group on one worker, by places in its lane.

    ``launch`` is the gap right after the worker's last backward of the update or, without one, after the step before.
    The step must be made before the operation at ``step``; ``last`` is the place of the last operation that reads the
    version that the step supersedes, before ``step`` if there is none.
    """

    group: WeightGroup
    version: int
    launch: _Gap
    step: int
    last: int

    @property
    def places(self) -> tuple[int, int, int]:
        """The places of everything that an update has in a lane."""
        return self.launch.place, self.step, self.last


_Marks = dict[WeightGroup, list[tuple[int, int]]]
"""The operations of a turn that have to do with a group: the place and an update or a version of each."""


class _EndlessLane:
    """The lane of a worker: its operations in turn 0 and, by group, what they need, read and add to.

    ``summed`` counts the updates of a group that are surely summed when an operation runs, for groups to which some
    worker adds nothing in an update.
    """

    def __init__(self, header: Header, operations: Sequence[Compute]) -> None:
        self.operations, self.length, self.per_turn = operations, len(operations), header.per_turn
        self.needs: _Marks = defaultdict(list)
        self.reads: _Marks = defaultdict(list)
        self.sums: _Marks = defaultdict(list)
        self.summed: _Marks = {}
        for place, operation in enumerate(operations):
            for group in header.groups_with[operation.stage]:
                self.needs[group].append((place, newest(header, operation)))
                self.reads[group].append((place, operation.version or 0))
                if operation.kind.sums:
                    self.sums[group].append((place, header.update_of(operation.micros)))

    @property
    def uneven(self) -> Iterator[WeightGroup]:
        """The groups to whose gradients the worker adds nothing in some update."""
        updates = range(self.per_turn)
        return (group for group in self.needs if None in [self._last(self.sums[group], update) for update in updates])

    def of_turn(self) -> Iterator[_GroupUpdate]:
        """Yields the updates of turn 0: of each group, as many as a turn makes, from the one that makes version 1."""
        return (self.update(group, version) for group in self.needs for version in range(1, self.per_turn + 1))

    def update(self, group: WeightGroup, version: int) -> _GroupUpdate:
        """The update that makes a version of a group, in any turn."""
        last, step = self._last(self.sums[group], version - 1), self._step(group, version)
        read = self._last(self.reads[group], version - 1)
        # An update is launched after its last backward, or else behind the step before.
        launch = (last + 1, False) if last is not None else (self._step(group, version - 1), True)
        return _GroupUpdate(group, version, _Gap(*launch), step, step - 1 if read is None else read)

    def _step(self, group: WeightGroup, version: int) -> int:
        """The place of the step that makes a version.

        The step before an update without backwards is made early, so that its launch keeps no worker waiting.
        """
        early = self.summed[group] if self._last(self.sums[group], version) is None else []
        # The first place, in any turn, that needs this version or a later one.
        return min(
            place - self.length * ((need - version) // self.per_turn) for place, need in (*self.needs[group], *early)
        )

    def _last(self, marks: Iterable[tuple[int, int]], number: int) -> int | None:
        """The last place, in any turn, that has this number; None if there is no such place."""
        turns = ((place, *divmod(number - have, self.per_turn)) for place, have in marks)
        return max((place + self.length * turn for place, turn, rest in turns if not rest), default=None)


def update(stream: ScheduleStream, net: Net, duration: Duration) -> Iterator[Insertions]:
    """The sums, steps, stashes and drops of turn 0 of every lane, by the policy above; ``duration`` is in any unit.

    ``net`` is that of a view of the stream, which has the earliest run.
    """
    header, lanes = stream.header, _lanes(stream, net)
    order = _agreed(header, lanes, net, duration)
    for lane in lanes:
        # An update has lines in some turns. Launches that are as many turns earlier may delay its launch.
        turns = [place // lane.length for update in lane.of_turn() for place in update.places]
        first, last = min(turns, default=0), max(turns, default=0)
        versions = range(1 + (first - 2 * last - 1) * header.per_turn, 1 + (2 - first) * header.per_turn)
        updates = [lane.update(group, version) for group in lane.needs for version in versions]
        yield _insertions(lane, sorted(updates, key=order))


def _insertions(lane: _EndlessLane, updates: Iterable[_GroupUpdate]) -> Insertions:
    """The lines of updates, which come in the agreed order of their launches."""
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


def _lanes(stream: ScheduleStream, net: Net) -> list[_EndlessLane]:
    header = stream.header
    lanes = [_EndlessLane(header, tuple(computes(turn.instructions))) for turn in stream.turns]
    uneven = {group for lane in lanes for group in lane.uneven}
    if not uneven:
        return lanes
    turn = fold(net)
    for group in uneven:
        nodes = [[_node(header, lane, turn, place) for place in range(lane.length)] for lane in lanes]
        needs = [-maxsize] * len(turn.waits)
        for lane, of_lane in zip(lanes, nodes, strict=True):
            for place, need in lane.needs.get(group, ()):
                node, later = of_lane[place]
                needs[node] = max(needs[node], need - later * header.per_turn)
        # The most that any operation before needs: of an operation a turn earlier, less by the updates of a turn.
        counts, _ = longest_paths(turn.waits, [0] * len(needs), Fraction(header.per_turn), needs)
        for lane, of_lane in zip(lanes, nodes, strict=True):
            lane.summed[group] = [
                (place, counts[node] + later * header.per_turn) for place, (node, later) in enumerate(of_lane)
            ]
    return lanes


def _node(header: Header, lane: _EndlessLane, turn: FoldedTurn, place: int) -> tuple[int, int]:
    """The node of the operation at a place of a lane, and the turn of its micro-batches."""
    later, inside = divmod(place, lane.length)
    operation, number = in_turn(header, lane.operations[inside])
    return turn.nodes[operation], number + later


def _by_version(update: _GroupUpdate) -> tuple[Fraction, int]:
    return Fraction(update.version), 0


def _agreed(
    header: Header, lanes: Sequence[_EndlessLane], net: Net, duration: Duration
) -> Callable[[_GroupUpdate], tuple[Fraction, int]]:
    """The sort key of an update in the order of the launches; of sums with the same time, the later group is first.

    The times are those of a run that repeats every turn: the earliest one that ends no operation of a turn earlier than
    the earliest run of the view does in its middle turn. Mostly that has come to repeat by then.
    """
    if all(len(groups) < 2 for groups in header.groups_of) or len(net.order) < len(net.operations):
        return _by_version
    turn, durations, numbers = fold(net), [*map(duration, net.operations)], header.group_numbers

    @cache
    def launched(group: WeightGroup, version: int) -> list[tuple[int, int]]:
        """The operations after which a sum is launched, by node and turn."""
        updates = [(lane, lane.update(group, version)) for lane in lanes if group in lane.needs]
        return [_node(header, lane, turn, update.launch.place - 1) for lane, update in updates]

    waits = [*turn.waits]
    if any(lane.summed for lane in lanes):
        # Steps also wait for the workers that launch a sum with nothing to add.
        for lane in lanes:
            for update in lane.of_turn():
                node, step = _node(header, lane, turn, update.step)
                sums = launched(update.group, update.version)
                waits[node] = (*waits[node], *((other, step - number) for other, number in sums))
    ends = net.ends(durations)
    lengths, earliest = [durations[number] for number in turn.numbers], [ends[number] for number in turn.middle]
    try:
        run = steady_run(waits, lengths, earliest)
    except ValueError:  # workers wait for each other in a cycle, whatever the order
        return _by_version

    @cache
    def time(group: WeightGroup, version: int) -> Fraction:
        """The time at which a sum is over; it is not over before the one for the version before it."""
        earlier = range(version - header.per_turn + 1, version + 1)
        sums = [operation for number in earlier for operation in launched(group, number)]
        return max(run.ends[node] + number * run.ratio for node, number in sums)

    return lambda update: (time(update.group, update.version), -numbers[update.group])
