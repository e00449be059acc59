"""Inserts the sums of each weight group's gradients over the workers that hold any of its stages, and the steps.

    worker 0:                    worker 0:
      F m0 s0                      F m0 s0
      F m1 s0                      F m1 s0
      F m2 s3                      F m2 s3
      B m2 s3                      B m2 s3
      F m3 s3                      F m3 s3
      B m3 s3                      B m3 s3
      B m0 s0                      all_reduce s3         (eager: a bubble follows)
      B m1 s0                      B m0 s0
                                   B m1 s0
                                   all_reduce s0
                                   wait all_reduce s3
                                   step s3
                                   wait all_reduce s0
                                   step s0

The strategy of a stage says when a worker launches its sum (section 3.2 of the paper): right after the worker's last
backward of that stage in any pipe (eager), or after all its compute (lazy). By default (eager_opt) the launch is eager
only where the schedule leaves the worker a bubble between these two points: without a bubble, an eager launch would
only disturb the compute that follows. Times are those of a run in which each operation begins as early as it can, with
the given durations and free communication.

A worker that holds a stage only for pipes without micro-batches takes part in the sum as well, with nothing to add. All
workers launch their sums in one agreed order: by the time at which the last member wants to launch. So overlapping
groups of workers never wait for each other in a cycle. If this order delays a launch, then only until after a sum that
begins no later than the delayed one could.

The sums are waited for at the end of the lane, in the order of their launches, each before its step. A stage that only
one worker holds has a sum, too: the number of copies W is known only when the program is started.

All this holds for each weight group, not only for stages. Stages that share parameters are a group in addition to the
groups of the single stages; its sum follows the worker's last backward of any of these stages.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple, assert_never

from chimera_ir.flow.net import Net
from chimera_ir.ir.ids import Stage, WeightGroup
from chimera_ir.ir.levels import Schedule, Strategy
from chimera_ir.ir.ops import NOWHERE, AllReduce, Instruction, Operation, Step, WaitAllReduce, singles
from chimera_ir.source import Span

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
    """A worker's wish to launch a sum right after the operation at place ``after``, which ends at ``time``."""

    after: int
    time: int


def synchronise(schedule: Schedule, duration: Duration, net: Net) -> Iterator[Insertions]:
    """Yields the sums and steps to insert into each lane by the policy above: one of each per group of the worker.

    If no operation adds to gradients, there are none.
    """
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
