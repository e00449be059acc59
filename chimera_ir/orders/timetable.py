"""A timetable: every micro-batch has its jobs at the same times of a period (modulo scheduling, Rau and Glaeser 1981).

    F takes 1, B takes 2; worker 0 has stages 0 and 3, worker 1 has stages 1 and 2. F s0 starts at 0, F s1 at 1, F s2
    at 2, F s3 at 3, B s3 at 4, B s2 at 9, B s1 at 11, B s0 at 13; the next micro-batch 6 later

    time of a period of 6    0     1     2     3     4     5
    worker 0                 F s0  B s0  B s0  F s3  B s3  B s3
    worker 1                 B s1  F s1  F s2  B s2  B s2  B s1

Jobs that wait for one another, such as those of a micro-batch, are a group. Groups whose jobs have the same machines,
waits and amounts are of one class; a template has one group of each class. The jobs of the template take the first gaps
of their machines, in a period in which every store has room for all groups that are under way.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import chain
from math import gcd
from typing import NamedTuple

from chimera_ir.flow.engine import ordered
from chimera_ir.orders.dispatch import TimedOrder, back_and_forth, by_place, list_schedule
from chimera_ir.orders.instance import Constraints, Jobs, OrderInstance

# Orders of many micro-batches from an order of few: its middle is repeated.
#
# An order of n micro-batches becomes one of N if the micro-batches from the a-th on, p of them, come again and again, a
# period later each time: the operations of a micro-batch keep their distances, so nothing is before what it waits for.
#
#     4 micro-batches, a = 1, p = 2       F0 F1 B0 F2 B1 F3 B2 B3
#     6 micro-batches                     F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5


def first_micro_batches(instance: OrderInstance, count: int) -> tuple[OrderInstance, list[int]]:
    """Cuts an instance down to the first ``count`` micro-batches of each pipe.

    Returns the smaller instance, and for each of its operations the number that it has in the whole one.
    """
    header = instance.header
    pipes = tuple(replace(pipe, micros=tuple(sorted(pipe.micros)[: count * header.slices])) for pipe in header.pipes)
    micros = frozenset(micro for pipe in pipes for micro in pipe.micros)
    numbers = [
        number for number, operation in enumerate(instance.operations) if micros.issuperset(operation.parts[0].micros)
    ]
    place_of = {number: place for place, number in enumerate(numbers)}
    few = replace(
        instance,
        header=replace(header, pipes=pipes, micro_batches=len(micros)),
        operations=tuple(instance.operations[number] for number in numbers),
        blocks=[(place,) for place in range(len(numbers))],
        machines=[instance.machines[number] for number in numbers],
        durations=[instance.durations[number] for number in numbers],
        waits=[tuple(place_of[other] for other in instance.waits[number]) for number in numbers],
        delays=[instance.delays[number] for number in numbers],
        steps=[instance.steps[number] for number in numbers],
        changes=[instance.changes[number] for number in numbers],
        lanes=tuple(tuple(place_of[number] for number in lane if number in place_of) for lane in instance.lanes),
    )
    return few, numbers


def repeated(
    constraints: Constraints, numbers: Sequence[int], starts: Sequence[int], count: int
) -> Iterator[list[int]]:
    """Extends an order of few micro-batches, all of which are alike, to all operations: its middle is repeated.

    ``numbers`` are the operations of the first ``count`` micro-batches of each pipe, ``starts`` their starts in ticks.
    Yields the starts of all operations, once for each middle that is tried. They give lanes without cycles, but may
    exceed limits of memory.
    """
    pipes = len(constraints.instance.header.pipes)
    classes, at = constraints.roles, [rank // pipes for rank in constraints.ranks]
    start_of = {(classes[number], at[number]): start for number, start in zip(numbers, starts, strict=True)}
    added = max(at) + 1 - count
    for width, begin in _middles(count):
        lengths = [start_of[key, begin + width] - start for (key, place), start in start_of.items() if place == begin]
        period = max(1, round(sum(lengths) / len(lengths)))
        sources = [(place, 0) for place in range(begin)]
        sources += [(begin + turn % width, turn // width * period) for turn in range(added)]
        sources += [(place, added * period // width) for place in range(begin, count)]
        yield [start_of[key, sources[place][0]] + sources[place][1] for key, place in zip(classes, at, strict=True)]


def _middles(count: int) -> Iterator[tuple[int, int]]:
    """Yields the middles of ``count`` micro-batches to try: how many to repeat, and from which one on."""
    for width in dict.fromkeys((1, 2, 3, 4, count // 4, count // 3)):
        for begin in range((count - width) // 2 - 2, (count - width) // 2 + 3):
            if width and 0 <= begin < count - width:
                yield width, begin


_PERIODS, _STEP = 64, 50
"""The most periods to try; each is longer than the one before by the part 1 / _STEP of it."""

_CHANGES = 100
"""The most jobs that are tried, in each shorter period, as the one that starts later than it could."""


class _Timetable(NamedTuple):
    """Each group starts its jobs, which have the template's ``starts``, a ``period`` later than the one before."""

    end: int
    period: int
    starts: Sequence[int]


def timetable(jobs: Jobs) -> TimedOrder | None:
    """Finds a timetable and places all jobs in the order of its starts, each as early as this order allows.

    None if no timetable is found, or if a store has no room for a job in this order.
    """
    template = _template(jobs)
    best = _shortest(template) if template is not None else None
    if template is None or best is None:
        return None
    timed = [
        (turn * best.period + start, template.durations[number] > 0, number, turn, job)
        for number, (start, members) in enumerate(zip(best.starts, template.members, strict=True))
        for turn, job in enumerate(members)
    ]
    return _early(jobs, [job for *_, job in sorted(timed)])


@dataclass(frozen=True)
class _Template(Jobs):
    """One group of each class, with its jobs in an order in which each stands after those that it waits for.

    Job n of the template stands for the jobs ``members[n]``, one in each group of its class, and takes their mean
    duration. ``count`` is the number of groups in the largest class. Times are in a unit of their own, in which they
    are whole numbers.
    """

    members: Sequence[Sequence[int]]
    count: int

    def least_period(self) -> int:
        """The shortest period with time enough on machines and room enough in stores, if no job ever waits for them."""
        work, area = [0] * (1 + max(self.machines)), [0] * len(self.limits)
        for number, duration in enumerate(self.durations):
            work[self.machines[number]] += duration
            for store, at_start, at_end in self.changes[number]:
                area[store] -= at_start * self.heads[number] + at_end * (self.heads[number] + duration)
        return max(1, *work, *(-(-amount // max(1, limit)) for amount, limit in zip(area, self.limits, strict=True)))


def _template(jobs: Jobs) -> _Template | None:
    """The template; None if no class has two groups, or jobs wait in a cycle."""
    # Classes of groups, whose jobs are in the order of preference.
    ranks, classes = jobs.ranks, dict[object, list[list[int]]]()
    for group in sorted((sorted(group, key=ranks.__getitem__) for group in jobs.groups[1]), key=lambda g: ranks[g[0]]):
        place_of = {job: place for place, job in enumerate(group)}
        shape = tuple(
            (jobs.machines[job], tuple(place_of[other] for other, _ in jobs.waits[job]), *jobs.changes[job])
            for job in group
        )
        classes.setdefault(shape, []).append(group)
    count = max(map(len, classes.values()), default=0)
    members = [several for class_groups in classes.values() for several in zip(*class_groups, strict=True)]
    number_of = {several[0]: number for number, several in enumerate(members)}
    order = ordered([[number_of[other] for other, _ in jobs.waits[several[0]]] for several in members])
    if count < 2 or len(order) < len(members):
        return None
    # Each job of the template after those that it waits for, and times in whole numbers.
    members = [members[number] for number in order]
    firsts = [several[0] for several in members]
    number_of = {job: number for number, job in enumerate(firsts)}
    durations = [-(-count * sum(map(jobs.durations.__getitem__, several)) // len(several)) for several in members]
    unit = gcd(*durations, *(count * lag for job in firsts for _, lag in jobs.waits[job])) or 1
    return _Template(
        owners=jobs.owners,
        workers=jobs.workers,
        machines=[jobs.machines[job] for job in firsts],
        durations=[duration // unit for duration in durations],
        waits=[tuple((number_of[other], count * lag // unit) for other, lag in jobs.waits[job]) for job in firsts],
        changes=[jobs.changes[job] for job in firsts],
        limits=jobs.limits,
        begun=[()] * len(firsts),
        ranks=range(len(firsts)),
        members=members,
        count=count,
    )


def _shortest(template: _Template) -> _Timetable | None:
    """The timetable that is over first, of several periods; None if none keeps the stores' limits."""
    best: _Timetable | None = None
    shorter: list[int] = []
    period = template.least_period()
    for _ in range(_PERIODS):
        if best is not None and (template.count - 1) * period >= best.end:
            break
        if best is None:
            shorter.append(period)
        best = min(filter(None, (best, _with_period(template, period))), default=None)
        period += max(1, period // _STEP)
    # Shorter periods, with one job later than in the first gap.
    jobs = range(0, len(template.durations), 1 + len(template.durations) // _CHANGES)
    while best is not None and shorter:
        period = shorter.pop()
        results = [result for late in jobs if (result := _with_period(template, period, late)) is not None]
        if period < best.period and not results:
            break
        best = min([best, *results])
    return best


def _with_period(template: _Template, period: int, late: int | None = None) -> _Timetable | None:
    """The timetable of a period; None if a job finds no gap, or a store has no room."""
    starts = _starts(template, period, late)
    if starts is None or not _fits(template, starts, period):
        return None
    end = max(map(sum, zip(starts, template.durations, strict=True)))
    return _Timetable((template.count - 1) * period + end, period, starts)


def _starts(template: _Template, period: int, late: int | None) -> list[int] | None:
    """The start of each job of the template, in the first gap of its machine; None if a job finds no gap.

    Of the jobs whose waits are over, the one that was ready first comes first; jobs that nothing waits for come last.
    Job ``late`` first lets as much time pass as the shortest job takes.
    """
    lanes: list[list[tuple[int, int]]] = [[] for _ in range(1 + max(template.machines))]
    starts = [0] * len(template.waits)
    missing = [len(waits) for waits in template.waits]
    later = min(filter(None, template.durations), default=0)
    ready: list[tuple[bool, int, int, int]] = []

    def enqueue(number: int) -> None:
        arrivals = (starts[other] + template.durations[other] + lag for other, lag in template.waits[number])
        arrival = max(arrivals, default=0) + (later if number == late else 0)
        heappush(ready, (not template.followers[number], arrival, -template.tails[number], number))

    for number, count in enumerate(missing):
        if not count:
            enqueue(number)
    while ready:
        is_last, earliest, urgency, number = heappop(ready)
        lane, duration = lanes[template.machines[number]], template.durations[number]
        start = _gap(lane, period, earliest, duration)
        if start is None:
            return None
        if start > earliest:
            heappush(ready, (is_last, start, urgency, number))
            continue
        starts[number] = start
        phase = start % period
        if duration:
            insort(lane, (phase, min(period, phase + duration)))
        if phase + duration > period:
            insort(lane, (0, phase + duration - period))
        for follower, _ in template.followers[number]:
            missing[follower] -= 1
            if not missing[follower]:
                enqueue(follower)
    return starts


def _gap(lane: Sequence[tuple[int, int]], period: int, earliest: int, duration: int) -> int | None:
    """The first start at which a machine, busy in ``lane``, is free for long enough in every period."""
    start = earliest
    while start < earliest + period:
        phase = start % period
        place = bisect_right(lane, (phase, period))
        upcoming = lane[place][0] if place < len(lane) else period + (lane[0][0] if lane else phase)
        if place and lane[place - 1][1] > phase:
            start += lane[place - 1][1] - phase
        elif upcoming - phase >= duration:
            return start
        else:
            start += upcoming - phase
    return None


def _fits(template: _Template, starts: Sequence[int], period: int) -> bool:
    """Whether each store always has room for all groups that are under way."""
    levels = [0] * len(template.limits)
    steps: list[tuple[int, bool, int, int]] = []
    for start, duration, changes in zip(starts, template.durations, template.changes, strict=True):
        for store, at_start, at_end in changes:
            for time, amount in ((start, at_start), (start + duration, at_end)):
                levels[store] -= time // period * amount
                steps.append((time % period, amount > 0 or not duration, store, amount))
    for _, _, store, amount in sorted(steps):
        levels[store] += amount
        if levels[store] > template.limits[store]:
            return False
    return True


def _early(jobs: Jobs, order: Sequence[int]) -> TimedOrder | None:
    """Starts each job in this order, as early as its machine can; None if a store has no room for one."""
    free, room = [0] * len(jobs.owners), list(jobs.limits)
    starts, ends = [0] * len(order), [0] * len(order)
    for job in order:
        starts[job] = max(free[jobs.machines[job]], *(ends[other] + lag for other, lag in jobs.waits[job]), 0)
        ends[job] = free[jobs.machines[job]] = starts[job] + jobs.durations[job]
        for store, at_start, at_end in jobs.changes[job]:
            if at_start > room[store]:
                return None
            room[store] -= at_start + at_end
    return TimedOrder.by_starts(jobs, starts, order)


# Makes several list schedules, forwards and backwards in time, and keeps the shortest.
#
# They prefer jobs by their ranks, by the longest way to the end, and by a timetable. Then time is reversed: what
# started last comes first in a list schedule from the end, and so on as long as the makespan falls (Li and Willis
# 1992).

_FEW, _MANY = 5_000, 50_000
"""The most jobs for which everything is tried; the most for which the better of two orders is still improved.

More jobs than `_MANY` get the better of the list schedule by ranks and the timetable.
"""

_ROUNDS = 2
"""The most times that an order of few jobs (`_FEW` or less) is run backwards and then forwards."""


def shortest(jobs: Jobs, first: TimedOrder) -> TimedOrder:
    """Returns the shortest of several list schedules of the jobs.

    ``first`` is the one by ranks. It is returned if some of its jobs never start, or if no other one is shorter.
    """
    count = len(jobs.machines)
    if len(first.started) < count:
        return first
    results = [first]
    regular = timetable(jobs)
    if regular is not None:
        results.append(regular)
    if count <= _FEW:
        urgent = sorted(range(count), key=lambda job: (-jobs.tails[job], jobs.ranks[job]))
        results.append(list_schedule(jobs, by_place(urgent)))
        return _first_to_end(chain(results, *(back_and_forth(jobs, result, _ROUNDS) for result in results)))
    best = _first_to_end(results)
    return _first_to_end([best, *back_and_forth(jobs, best, 1)]) if count <= _MANY else best


def _first_to_end(results: Iterable[TimedOrder]) -> TimedOrder:
    """The order that ends first, of those in which no job waits for ever."""
    return min((result for result in results if not result.waiting), key=lambda result: result.makespan)
