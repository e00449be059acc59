"""Sums, steps and weight versions of an asynchronous schedule.

On every worker and for every stage that it holds:

``all_reduce``
    right after the last backward of an update.
``wait all_reduce``, ``stash``, ``step``
    right before the first operation that reads the version that the step makes, or, if that comes first, before the
    first backward of a later update: its gradients go where those of this one are. The version that the step supersedes
    is stashed if a later operation reads it.
``drop``
    right after the last operation that reads a stashed version.

All workers launch in one agreed order, as `sync` does: by the time at which the last member wants to.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from chimera_ir.ir.ids import Stage, Version
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import AllReduce, Backward, Compute, Drop, Instruction, Stash, Step, WaitAllReduce
from chimera_ir.lower.sync import Duration, Insertions, earliest_ends


class _Update(NamedTuple):
    """An update of a stage on one worker, by places in its lane.

    ``launch`` is that of its last backward, ``step`` that of the operation before which the step must be made, ``last``
    that of the last one to read the version that the step supersedes.
    """

    stage: Stage
    version: Version
    launch: int
    step: int
    last: int


def update(schedule: Schedule, duration: Duration) -> Iterator[Insertions]:
    """The sums, steps, stashes and drops of every lane, by the policy above.

    Parameters
    ----------
    schedule
        Asynchronous, complete and acyclic; its versions are not cut off at 0 where that matters.
    duration
        How long operations take, in any unit.
    """
    found = [list(_updates(schedule.header, lane)) for lane in schedule.lanes]
    agreed = _agreed(schedule, duration, found)
    for lane, updates in zip(schedule.lanes, found, strict=True):
        yield _insertions(lane, sorted(updates, key=lambda each: agreed[each.version, each.stage]))


def copies(schedule: Schedule) -> Iterator[dict[Stage, int]]:
    """For each worker, how many copies of the weights of a stage it keeps at most: the newest, and what is stashed."""
    for lane in schedule.lanes:
        changes: dict[Stage, list[tuple[int, int]]] = defaultdict(list)
        for each in _updates(schedule.header, lane):
            changes[each.stage] += _stashed(each)
        yield {
            stage: 1 + max(accumulate((change for _, change in sorted(its)), initial=0))
            for stage, its in changes.items()
        }


def _stashed(update: _Update) -> list[tuple[int, int]]:
    """When the version that an update supersedes is stashed and dropped, before and after operations."""
    return [(2 * update.step, 1), (2 * update.last + 1, -1)] if update.last >= update.step else []


def _insertions(lane: tuple[Compute, ...], updates: list[_Update]) -> Insertions:
    before: dict[int, list[Instruction]] = defaultdict(list)
    after: dict[int, list[Instruction]] = defaultdict(list)
    place = -1
    for stage, version, launch, step, last in updates:
        place = max(place, launch)
        origin = lane[launch].origin
        after[place].append(AllReduce(stage, origin, version))
        before[step].append(WaitAllReduce(stage, origin, version))
        if last >= step:
            before[step].append(Stash(stage, Version(version - 1), origin))
            after[last].append(Drop(stage, Version(version - 1), lane[last].origin))
        before[step].append(Step(stage, origin, version))
    return Insertions(before, after)


def _updates(header: Header, lane: tuple[Compute, ...]) -> Iterator[_Update]:
    """The updates of a lane, stage by stage; those at its end that no operation waits for are made there."""
    places: dict[Stage, list[int]] = defaultdict(list)
    for place, operation in enumerate(lane):
        places[operation.stage].append(place)
    for stage, own in places.items():
        launches: dict[int, int] = {}
        lasts: dict[int, int] = {}
        needs: dict[int, int] = {}
        for place in own:
            operation = lane[place]
            update = max(operation.micros) // header.per_update
            lasts[operation.version or 0] = place
            needs.setdefault(operation.version or 0, place)
            if isinstance(operation, Backward):
                launches[update] = place
                needs[update] = min(needs.get(update, place), place)
        yield from _of_stage(stage, launches, lasts, sorted(needs.items()), len(lane))


def _of_stage(
    stage: Stage, launches: dict[int, int], lasts: dict[int, int], needs: list[tuple[int, int]], end: int
) -> Iterator[_Update]:
    """``needs`` has for updates, ascending, the first place at which they must have been made that come before them."""
    numbers = [number for number, _ in needs]
    earliest = [place for _, place in needs]
    for index in range(len(earliest) - 2, -1, -1):
        earliest[index] = min(earliest[index], earliest[index + 1])
    for number, launch in sorted(launches.items()):
        following = bisect_left(numbers, number + 1)
        step = earliest[following] if following < len(numbers) else end
        yield _Update(stage, Version(number + 1), launch, step, lasts.get(number, -1))


def _agreed(
    schedule: Schedule, duration: Duration, found: list[list[_Update]]
) -> dict[tuple[Version, Stage], tuple[int, int]]:
    """The rank of every sum in the order in which all workers launch them; of equals, the later stage first."""
    ends = earliest_ends(schedule, duration)
    wanted: dict[tuple[Version, Stage], int] = {}
    for worker, updates in enumerate(found):
        for each in updates:
            time = ends[worker][each.launch]
            wanted[each.version, each.stage] = max(wanted.get((each.version, each.stage), 0), time)
    return {key: (time, -key[1]) for key, time in wanted.items()}
