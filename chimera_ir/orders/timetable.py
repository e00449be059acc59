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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from math import gcd
from typing import NamedTuple

from chimera_ir.flow.engine import ordered
from chimera_ir.orders.list_schedule import Jobs, Keeps, Placed
from chimera_ir.orders.reserve import groups

_PERIODS, _STEP = 64, 50
"""The most periods to try; each is longer than the one before by the part 1 / _STEP of it."""

_CHANGES = 100
"""The most jobs that are tried, in each shorter period, as the one that starts later than it could."""


class _Timetable(NamedTuple):
    """Regular starts for all groups of a class: each group starts its jobs a ``period`` later than the group before.

    ``starts`` has the start of each job of the template, which is the first group of each class. ``end`` is the time at
    which the last group is over.
    """

    end: int
    period: int
    starts: Sequence[int]


def timetable(jobs: Jobs) -> Placed | None:
    """Finds a timetable and places all jobs in the order of its starts, each as early as this order allows.

    None if no timetable is found, or if a store has no room for a job in this order.
    """
    template = _template(jobs)
    best = _shortest(template, jobs.limits) if template is not None else None
    if template is None or best is None:
        return None
    timed = [
        (turn * best.period + start, template.durations[number] > 0, number, turn, job)
        for number, (start, members) in enumerate(zip(best.starts, template.members, strict=True))
        for turn, job in enumerate(members)
    ]
    return _early(jobs, [job for *_, job in sorted(timed)])


@dataclass(frozen=True)
class _Template:
    """One group of each class, with its jobs in an order in which each stands after those that it waits for.

    Job n of the template stands for the jobs ``members[n]``, one in each group of its class, and takes their mean
    duration. ``waits[n]`` has pairs of a job that it waits for and a delay. ``count`` is the number of groups in the
    largest class. Times are in a unit of their own, in which they are whole numbers.
    """

    members: Sequence[Sequence[int]]
    machines: Sequence[int]
    durations: Sequence[int]
    waits: Sequence[Sequence[tuple[int, int]]]
    changes: Sequence[Sequence[Keeps]]
    count: int

    @cached_property
    def followers(self) -> Sequence[Sequence[int]]:
        """The jobs that wait for each job."""
        followers: list[list[int]] = [[] for _ in self.waits]
        for number, waits in enumerate(self.waits):
            for other, _ in waits:
                followers[other].append(number)
        return followers

    def arrival(self, starts: Sequence[int], number: int) -> int:
        """The time at which job ``number`` may start, from the ``starts`` of the jobs that it waits for."""
        return max((starts[other] + self.durations[other] + lag for other, lag in self.waits[number]), default=0)

    @cached_property
    def tails(self) -> Sequence[int]:
        """The least time from the end of each job to the end of its group."""
        tails = [0] * len(self.waits)
        for number in reversed(range(len(tails))):
            for other, lag in self.waits[number]:
                tails[other] = max(tails[other], tails[number] + self.durations[number] + lag)
        return tails

    def least_period(self, limits: Sequence[int]) -> int:
        """The shortest period with time enough on machines and room enough in stores, if no job ever waits for them."""
        work, area = [0] * (1 + max(self.machines)), [0] * len(limits)
        starts = [0] * len(self.waits)
        for number, duration in enumerate(self.durations):
            starts[number] = self.arrival(starts, number)
            work[self.machines[number]] += duration
            for store, at_start, at_end in self.changes[number]:
                area[store] -= at_start * starts[number] + at_end * (starts[number] + duration)
        return max(1, *work, *(-(-amount // max(1, limit)) for amount, limit in zip(area, limits, strict=True)))


def _template(jobs: Jobs) -> _Template | None:
    """Finds the classes of groups, and makes the template; None if no class has two groups, or jobs wait in a cycle."""
    # Classes of groups, whose jobs are in the order of preference.
    ranks, classes = jobs.ranks, dict[object, list[list[int]]]()
    for group in sorted((sorted(group, key=ranks.__getitem__) for group in groups(jobs)[1]), key=lambda g: ranks[g[0]]):
        place_of = {job: place for place, job in enumerate(group)}
        shape = tuple(
            (jobs.machines[job], tuple(place_of[other] for other in jobs.waits[job]), *jobs.changes[job])
            for job in group
        )
        classes.setdefault(shape, []).append(group)
    count = max(map(len, classes.values()), default=0)
    members = [several for class_groups in classes.values() for several in zip(*class_groups, strict=True)]
    number_of = {several[0]: number for number, several in enumerate(members)}
    order = ordered([[number_of[other] for other in jobs.waits[several[0]]] for several in members])
    if count < 2 or len(order) < len(members):
        return None
    # Each job of the template after those that it waits for, and times in whole numbers.
    members = [members[number] for number in order]
    firsts = [several[0] for several in members]
    number_of = {job: number for number, job in enumerate(firsts)}
    durations = [-(-count * sum(map(jobs.durations.__getitem__, several)) // len(several)) for several in members]
    unit = gcd(*durations, *(count * delay for job in firsts for delay in jobs.delays[job])) or 1
    return _Template(
        members=members,
        machines=[jobs.machines[job] for job in firsts],
        durations=[duration // unit for duration in durations],
        waits=[
            [
                (number_of[other], count * delay // unit)
                for other, delay in zip(jobs.waits[job], jobs.delays[job], strict=True)
            ]
            for job in firsts
        ],
        changes=[jobs.changes[job] for job in firsts],
        count=count,
    )


def _shortest(template: _Template, limits: Sequence[int]) -> _Timetable | None:
    """The timetable that is over first, of several periods; None if none is found that keeps the stores' ``limits``."""
    best: _Timetable | None = None
    shorter: list[int] = []
    period = template.least_period(limits)
    for _ in range(_PERIODS):
        if best is not None and (template.count - 1) * period >= best.end:
            break
        if best is None:
            shorter.append(period)
        best = min(filter(None, (best, _with_period(template, limits, period))), default=None)
        period += max(1, period // _STEP)
    # Shorter periods, with one job later than in the first gap.
    jobs = range(0, len(template.durations), 1 + len(template.durations) // _CHANGES)
    while best is not None and shorter:
        period = shorter.pop()
        results = [result for late in jobs if (result := _with_period(template, limits, period, late)) is not None]
        if period < best.period and not results:
            break
        best = min(best, *results)
    return best


def _with_period(template: _Template, limits: Sequence[int], period: int, late: int | None = None) -> _Timetable | None:
    """The timetable of a period; None if a job finds no gap, or a store has no room.

    ``late`` is a job that starts later than it could, as in `_starts`.
    """
    starts = _starts(template, period, late)
    if starts is None or not _fits(template, starts, period, limits):
        return None
    end = max(map(sum, zip(starts, template.durations, strict=True)))
    return _Timetable((template.count - 1) * period + end, period, starts)


def _starts(template: _Template, period: int, late: int | None) -> list[int] | None:
    """Returns the start of each job of the template, in the first gap of its machine; None if a job finds no gap.

    Of the jobs whose waits are over, the one that was ready first comes first; jobs that nothing waits for come last.
    Job ``late`` lets as much time pass after it is ready as the shortest job takes, then takes the first gap.
    """
    lanes: list[list[tuple[int, int]]] = [[] for _ in range(1 + max(template.machines))]
    starts = [0] * len(template.waits)
    missing = [len(waits) for waits in template.waits]
    later = min(filter(None, template.durations), default=0)
    ready: list[tuple[bool, int, int, int]] = []

    def enqueue(number: int) -> None:
        arrival = template.arrival(starts, number) + (later if number == late else 0)
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
        for follower in template.followers[number]:
            missing[follower] -= 1
            if not missing[follower]:
                enqueue(follower)
    return starts


def _gap(lane: Sequence[tuple[int, int]], period: int, earliest: int, duration: int) -> int | None:
    """The first start at which a machine is free for long enough in every period; None if it never is.

    ``lane`` has the times of a period at which it is busy.
    """
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


def _fits(template: _Template, starts: Sequence[int], period: int, limits: Sequence[int]) -> bool:
    """Whether each store has room, at every time of a period, for all groups that are under way then."""
    levels = [0] * len(limits)
    steps: list[tuple[int, bool, int, int]] = []
    for start, duration, changes in zip(starts, template.durations, template.changes, strict=True):
        for store, at_start, at_end in changes:
            for time, amount in ((start, at_start), (start + duration, at_end)):
                levels[store] -= time // period * amount
                steps.append((time % period, amount > 0 or not duration, store, amount))
    for _, _, store, amount in sorted(steps):
        levels[store] += amount
        if levels[store] > limits[store]:
            return False
    return True


def _early(jobs: Jobs, order: Sequence[int]) -> Placed | None:
    """Starts the jobs of each machine in this order, each as early as it can; None if a store has no room for one."""
    free, room = [0] * len(jobs.owners), list(jobs.limits)
    starts, ends = [0] * len(order), [0] * len(order)
    for job in order:
        arrivals = [ends[other] + delay for other, delay in zip(jobs.waits[job], jobs.delays[job], strict=True)]
        starts[job] = max(free[jobs.machines[job]], *arrivals, 0)
        ends[job] = free[jobs.machines[job]] = starts[job] + jobs.durations[job]
        for store, at_start, at_end in jobs.changes[job]:
            if at_start > room[store]:
                return None
            room[store] -= at_start + at_end
    return Placed(sorted(order, key=starts.__getitem__), max(free), ())
