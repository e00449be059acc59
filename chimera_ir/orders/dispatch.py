"""Heuristic orders: a list schedule, run forwards and backwards in time, again and again with disturbed preferences.

A machine that is free takes the ready operation with the longest way to the end. Then time is reversed: the order in
which operations ended is the preference of a list schedule from the end, and so on as long as the makespan falls.

If micro-batches cost unequally, it matters most which one comes first. So most list schedules then prefer what is
nearest to the end of its micro-batch, and of such operations the micro-batch whose turn it is. Two micro-batches
exchange their turns; the exchange stays unless the makespan grows. After many exchanges in vain, other turns are drawn.
All this is done for time as it is and for time reversed.

A list schedule that jams for want of memory is made anew with room kept free (`Admission`).
"""

import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, islice
from random import Random
from typing import NamedTuple

from chimera_ir.orders.instance import Constraints, Jobs

# List schedule: a free worker runs the job that is preferred among those that are ready.
#
#     F takes 1, B takes 2, of two micro-batches on two stages; a backward is preferred to a forward
#     time      0     1     2     3     4     5     6     7     8
#     worker 0  F m0  F m1              B m0  B m0        B m1  B m1
#     worker 1        F m0  B m0  B m0  F m1  B m1  B m1
#
# A job that would exceed a declared bound waits until enough is freed. Greedy choices can jam: what one micro-batch
# keeps leaves no room for another, and each waits for the other. `Admission` then keeps room for all that has begun.

Ranks = Sequence[float]
"""A number for each job; of the jobs that may start on a machine, the one with the least number does."""


class TimedOrder(NamedTuple):
    """Jobs in the order of their starts (``started``), the start of each by number, and the time at which all are over.

    Some jobs may never start. Of these, ``waiting`` has those that are ready and find no room. If it is empty, those
    that never start wait for one another.
    """

    makespan: int
    starts: list[int]
    started: Sequence[int]
    waiting: Sequence[int] = ()

    @staticmethod
    def by_starts(jobs: Jobs, starts: Sequence[int], started: Sequence[int] = ()) -> "TimedOrder":
        """The order of complete jobs by their starts; of equal starts, the order is that of ``started``."""
        ends = map(sum, zip(starts, jobs.durations, strict=True))
        in_order = sorted(started or range(len(starts)), key=starts.__getitem__)
        return TimedOrder(max(ends, default=0), [*starts], in_order)


class Greedy:
    """Room in stores without foresight: a job fits if there is room for what it adds when it starts."""

    def __init__(self, jobs: Jobs, ranks: Ranks) -> None:
        self._jobs, self._ranks, self._free = jobs, ranks, list(jobs.limits)

    def queue(self, job: int) -> tuple[Hashable, float]:
        """Returns a key for the queue in which a ready job waits, and a number by which this queue is sorted.

        If the first job of a queue does not fit, no other job of the queue does. Here a queue has all jobs that add the
        same amounts, by rank.
        """
        return self._adds(job), self._ranks[job]

    def _adds(self, job: int) -> tuple[tuple[int, int], ...]:
        return tuple((store, amount) for store, amount, _ in self._jobs.changes[job] if amount)

    def admits(self, job: int) -> bool:
        """Whether a job fits now."""
        return all(amount <= self._free[store] for store, amount in self._adds(job))

    def start(self, job: int) -> Sequence[int]:
        """Counts a job that starts; returns ready jobs that change their queue."""
        for store, amount, _ in self._jobs.changes[job]:
            self._free[store] -= amount
        return ()

    def end(self, job: int) -> None:
        """Counts a job that ends."""
        for store, _, amount in self._jobs.changes[job]:
            self._free[store] -= amount


_END, _ARRIVAL = 0, 1


def place(jobs: Jobs, room: Greedy, ranks: Ranks) -> TimedOrder:
    """Starts every job as early as its machine, the jobs that it waits for and the room in stores allow.

    A machine that is free takes the ready job of least rank that fits; each job takes a few operations on heaps.
    """
    machines, durations, changes, after = jobs.machines, jobs.durations, jobs.changes, jobs.followers
    count = len(machines)
    # ``missing`` counts what a job still waits for; ``earliest`` is when the messages for it have arrived.
    missing = [len(waits) + len(others) for waits, others in zip(jobs.waits, jobs.begun, strict=True)]
    following: dict[int, list[int]] = {}
    for job, others in enumerate(jobs.begun):
        for other in others:
            following.setdefault(other, []).append(job)
    earliest, starts = [0] * count, [0] * count
    queues: list[dict[Hashable, list[tuple[float, int]]]] = [{} for _ in jobs.owners]
    begun, busy = bytearray(count), bytearray(len(jobs.owners))
    further: list[list[int]] = [[] for _ in range(jobs.workers)]
    for machine in range(jobs.workers, len(jobs.owners)):
        further[jobs.owners[machine]].append(machine)
    started: list[int] = []
    events: list[tuple[int, int, int]] = []
    free = ((),)

    def enqueue(job: int) -> None:
        kind, position = room.queue(job) if changes[job] else (free, ranks[job])
        heap = queues[machines[job]].get(kind)
        if heap is None:
            heap = queues[machines[job]][kind] = []
        heappush(heap, (position, job))

    def preferred(machine: int) -> int | None:
        """Takes from its queue the job that a free machine starts now; None if no ready job fits."""
        firsts: list[tuple[float, int, list[tuple[float, int]]]] = []
        for kind, heap in [*queues[machine].items()]:
            while heap and begun[heap[0][1]]:
                heappop(heap)
            if heap:
                firsts.append((ranks[heap[0][1]], heap[0][1], heap))
            else:
                del queues[machine][kind]
        firsts.sort()
        for _, job, heap in firsts:
            if not changes[job] or room.admits(job):
                heappop(heap)
                return job
        return None

    for job, number in enumerate(missing):
        if not number:
            enqueue(job)
    now, awake = 0, set(range(jobs.workers))
    while True:
        for worker in sorted(awake):
            for machine in (*further[worker], worker):
                while not busy[worker] and not busy[machine] and (chosen := preferred(machine)) is not None:
                    job = chosen
                    begun[job] = busy[machine] = 1
                    starts[job] = now
                    started.append(job)
                    if changes[job]:
                        for moved_job in room.start(job):
                            enqueue(moved_job)
                    heappush(events, (now + durations[job], _END, job))
                    for second in following.get(job, ()):
                        missing[second] -= 1
                        if not missing[second]:
                            heappush(events, (max(now, earliest[second]), _ARRIVAL, second))
        if not events:
            break
        now, awake = events[0][0], set()
        while events and events[0][0] == now:
            _, event, job = heappop(events)
            awake.add(jobs.owners[machines[job]])
            if event == _ARRIVAL:
                enqueue(job)
                continue
            busy[machines[job]] = 0
            if changes[job]:
                room.end(job)
            for other, delay in after[job]:
                arrival = now + delay
                if arrival > earliest[other]:
                    earliest[other] = arrival
                missing[other] -= 1
                if not missing[other]:
                    if earliest[other] > now:
                        heappush(events, (earliest[other], _ARRIVAL, other))
                    else:
                        enqueue(other)
                        awake.add(jobs.owners[machines[other]])
    waiting = sorted(
        {job for of_machine in queues for heap in of_machine.values() for _, job in heap if not begun[job]}
    )
    return TimedOrder(now, starts, started, waiting)


# Room kept free for what has begun, so that a list schedule never jams (the banker's algorithm of Dijkstra, 1965).
#
# Jobs that wait for one another, such as those of a micro-batch, are a group. Each group has an order in which it can
# run to its end by itself: what frees first. A group is as old as the first of its jobs that keeps anything. A job fits
# if, after its start, the oldest group can still run to its end, then the next older one, and so on.
#
#     a worker with two stages and room for 2:
#       F m0 s0 keeps 1 and F m0 s3 will keep 1: F m1 s0 does not fit before m0 is over
#     the same worker with room for 3:
#       F m1 s0 fits as well: m0 can still run to its end, and then m1


class _GroupUse:
    """The use that the jobs of a group make of one store; ``amounts`` has (job, at start, at end) in the group's order.

    ``most[i]`` is the most that the group keeps from place i of its order on, ``level`` what it keeps now. ``next`` is
    the first place whose job has not started. Jobs after it that have started anyway add ``ahead``. ``first`` is the
    first place whose job adds anything.
    """

    __slots__ = ("ahead", "amounts", "first", "index", "level", "most", "next", "started")

    def __init__(self, amounts: Sequence[tuple[int, int, int]]) -> None:
        self.index = {job: place for place, (job, _, _) in enumerate(amounts)}
        self.amounts = [(start, end) for _, start, end in amounts]
        levels = accumulate(map(sum, self.amounts), initial=0)
        peaks = [level + start for level, (start, _) in zip(levels, self.amounts, strict=False)]
        self.most = [*accumulate(reversed(peaks), max)][::-1]
        self.started = bytearray(len(peaks))
        self.first = next((place for place, (start, _) in enumerate(self.amounts) if start), 0)
        self.level = self.next = self.ahead = 0

    def opens(self, job: int) -> bool:
        """Whether no job before this one in the group's order adds anything."""
        return self.index[job] <= self.first

    def need(self, starting: int | None = None) -> int:
        """An upper bound on how much more the group will keep than now, or than after the start of ``starting``."""
        following, ahead, level = (self.next, self.ahead, self.level) if starting is None else self._after(starting)
        return max(0, self.most[following] + ahead - level) if following < len(self.most) else 0

    def start(self, job: int) -> None:
        self.next, self.ahead, self.level = self._after(job)
        self.started[self.index[job]] = 1

    def end(self, job: int) -> bool:
        """Counts a job that ends; returns whether the group keeps nothing, and all of its jobs have started."""
        self.level += self.amounts[self.index[job]][1]
        return not self.level and self.next == len(self.amounts)

    def _after(self, starting: int) -> tuple[int, int, int]:
        """``next``, ``ahead`` and ``level`` as they are after the start of a job."""
        following, ahead, place = self.next, self.ahead, self.index[starting]
        added = self.amounts[place][0]
        if place != following:
            return following, ahead + added, self.level + added
        following += 1
        while following < len(self.amounts) and self.started[following]:
            ahead -= self.amounts[following][0]
            following += 1
        return following, ahead, self.level + added


class Admission(Greedy):
    """Room with foresight: afterwards all groups that have begun can still run to their end, from the oldest on."""

    def __init__(self, jobs: Jobs, ranks: Ranks) -> None:
        super().__init__(jobs, ranks)
        self._group, members = jobs.groups
        self._position = [0] * len(jobs.machines)
        self._shares: list[dict[int, _GroupUse]] = []
        for of_group in members:
            amounts: dict[int, list[tuple[int, int, int]]] = {}
            for position, job in enumerate(_frugal(jobs, of_group, ranks)):
                self._position[job] = position
                for store, start, end in jobs.changes[job]:
                    amounts.setdefault(store, []).append((job, start, end))
            self._shares.append({store: _GroupUse(several) for store, several in amounts.items()})
        self._begun: list[dict[int, _GroupUse]] = [{} for _ in jobs.limits]
        self._entered = bytearray(len(members))
        self._outside: dict[int, list[int]] = {}

    @property
    def least(self) -> list[int]:
        """The least room in each store with which every group can run to its end by itself."""
        most = [0] * len(self._free)
        for shares in self._shares:
            for store, share in shares.items():
                most[store] = max(most[store], share.most[0])
        return most

    def queue(self, job: int) -> tuple[Hashable, float]:
        """The queue of `Greedy`.

        A group that has begun has queues of its own, sorted by the group's order. Jobs that would begin their groups
        share a queue with all that add the same amounts, by rank. So do jobs that add nothing.
        """
        adds, group = self._adds(job), self._group[job]
        if not adds:
            return (), self._ranks[job]
        if self._entered[group] or not all(self._shares[group][store].opens(job) for store, _ in adds):
            return (adds, group), self._position[job]
        self._outside.setdefault(group, []).append(job)
        return adds, self._ranks[job]

    def admits(self, job: int) -> bool:
        """Whether afterwards each group can still run to its end once all older ones have."""
        group = self._group[job]
        return all(
            start <= self._free[store] and self._safe(group, job, store, start) for store, start in self._adds(job)
        )

    def _safe(self, group: int, job: int, store: int, amount: int) -> bool:
        room = self._free[store] - amount
        for other, share in self._begun[store].items():
            if other == group:
                return share.need(job) <= room
            if share.need() > room:
                return False
            room += share.level
        return self._shares[group][store].need(job) <= room

    def start(self, job: int) -> Sequence[int]:
        """Counts a job that starts. With the first of a group, the group's other ready jobs change their queue."""
        group, shares = self._group[job], self._shares[self._group[job]]
        others: Sequence[int] = ()
        if not self._entered[group]:
            self._entered[group] = 1
            for store, share in shares.items():
                self._begun[store][group] = share
            others = [other for other in self._outside.pop(group, ()) if other != job]
        super().start(job)
        for store, *_ in self._jobs.changes[job]:
            shares[store].start(job)
        return others

    def end(self, job: int) -> None:
        """Counts a job that ends."""
        super().end(job)
        group = self._group[job]
        for store, *_ in self._jobs.changes[job]:
            if self._shares[group][store].end(job):
                self._begun[store].pop(group, None)


def list_schedule(jobs: Jobs, ranks: Ranks) -> TimedOrder:
    """Makes the list schedule of jobs: without foresight or, if that jams, with room kept free (`Admission`)."""
    result = place(jobs, Greedy(jobs, ranks), ranks)
    return place(jobs, Admission(jobs, ranks), ranks) if result.waiting else result


def _frugal(jobs: Jobs, members: Sequence[int], ranks: Ranks) -> Iterator[int]:
    """Yields the jobs of a group in an order in which they can run one by one: of those that may, what frees first."""
    missing = dict.fromkeys(members, 0)
    after: dict[int, list[int]] = {}
    for job in members:
        for other in (*[other for other, _ in jobs.waits[job]], *jobs.begun[job]):
            if other in missing:
                missing[job] += 1
                after.setdefault(other, []).append(job)

    def entry(job: int) -> tuple[int, float, int]:
        adds = sum(start + end for _, start, end in jobs.changes[job])
        return (adds > 0) - (adds < 0), ranks[job], job

    ready = [entry(job) for job in members if not missing[job]]
    heapify(ready)
    while ready:
        job = heappop(ready)[2]
        yield job
        for other in after.get(job, ()):
            missing[other] -= 1
            if not missing[other]:
                heappush(ready, entry(other))


Way = Callable[[Jobs, Ranks], TimedOrder]
"""A function that makes an order of jobs by their ranks: `list_schedule` or `_in_gaps`."""


def back_and_forth(
    jobs: Jobs, first: TimedOrder, rounds: int = sys.maxsize, way: Way = list_schedule
) -> Iterator[TimedOrder]:
    """Yields orders made by turns backwards and forwards in time, as long as they get shorter than ``first``.

    Each prefers the jobs that came last in the one before. There are at most ``rounds`` times two orders.
    """
    forwards, best, count = first, first.makespan, len(jobs.machines)
    for _ in range(rounds):
        if len(forwards.started) < count:
            return
        backwards = way(jobs.backwards, by_place(forwards.started[::-1]))
        if len(backwards.started) < count:
            return
        order = _reversed(jobs, backwards)
        yield order
        forwards = way(jobs, by_place(order.started))
        yield forwards
        shorter = min(forwards.makespan, order.makespan)
        if shorter >= best:
            return
        best = shorter


def by_place(order: Sequence[int]) -> list[int]:
    """Ranks that prefer all jobs in this order."""
    ranks = [0] * len(order)
    for rank, job in enumerate(order):
        ranks[job] = rank
    return ranks


def _reversed(jobs: Jobs, backwards: TimedOrder) -> TimedOrder:
    """Turns around an order that was made backwards in time."""
    ends = map(sum, zip(backwards.starts, jobs.durations, strict=True))
    starts = [backwards.makespan - end for end in ends]
    return TimedOrder(backwards.makespan, starts, backwards.started[::-1], backwards.waiting)


_DISTURBANCES = (0.01, 0.03, 0.1, 0.2)
"""Amounts by which preferences are disturbed, as parts of the longest way to the end."""


_BY_TURNS = 16
"""The number of list schedules by turns (the sequence of micro-batches) before another one by disturbed preferences."""


_FAILURES = 60
"""The number of exchanges in vain after which other turns are drawn."""


def improving(constraints: Constraints, seed: int, first: Sequence[list[int]] = ()) -> Iterator[TimedOrder]:
    """Yields orders without end, one for each that is tried; those with jobs that never start among them.

    ``seed`` fixes all chance. ``first`` are known orders to begin with, each as the starts of its operations.
    """
    random, tails = Random(seed), constraints.tails
    for starts in first:
        yield from refined(constraints, starts)
    disturbance, longest = 0.0, max(tails, default=0)
    by_turns = _by_turns(constraints, random) if constraints.costs_differ else iter(())
    while True:
        yield from islice(by_turns, _BY_TURNS)
        for way in _ways(constraints):
            yield from _refined(constraints, [random.uniform(0, disturbance * longest) - tail for tail in tails], way)
        disturbance = random.choice(_DISTURBANCES)


def refined(constraints: Constraints, starts: Sequence[int]) -> Iterator[TimedOrder]:
    """Yields orders that begin with a known order, by its starts, as long as they get shorter."""
    for way in _ways(constraints):
        yield from _refined(constraints, starts, way)


def _refined(constraints: Constraints, ranks: Ranks, way: Way) -> Iterator[TimedOrder]:
    first = way(constraints, ranks)
    yield first
    yield from back_and_forth(constraints, first, way=way)


def _ways(constraints: Constraints) -> list[Way]:
    return [list_schedule] if constraints.holdings else [list_schedule, _in_gaps]


def _by_turns(constraints: Constraints, random: Random) -> Iterator[TimedOrder]:
    """Yields list schedules that prefer micro-batches by their turns; every second one is made backwards in time."""
    climbs = [_climb(side, random) for side in (constraints, constraints.backwards)]
    while True:
        forwards, backwards = map(next, climbs)
        yield forwards
        yield _reversed(constraints, backwards)


def _climb(constraints: Constraints, random: Random) -> Iterator[TimedOrder]:
    """Yields list schedules that prefer operations late in their micro-batch, then micro-batches by their turns.

    After each schedule, two micro-batches of unequal cost exchange their turns in the best sequence so far.
    """
    ranks, progress, costs = constraints.ranks, _progress(constraints), defaultdict[int, int](int)
    for rank, duration in zip(ranks, constraints.durations, strict=True):
        costs[rank] += duration
    turn_of, best, failures = {rank: turn for turn, rank in enumerate(sorted(costs))}, sys.maxsize, 0
    best_turns = turn_of
    while True:
        order = list_schedule(
            constraints, [turn_of[rank] - len(costs) * part for rank, part in zip(ranks, progress, strict=True)]
        )
        yield order
        makespan = sys.maxsize if order.waiting else order.makespan
        failures = 0 if makespan < best else failures + 1
        if makespan <= best:
            best_turns, best = turn_of, makespan
        if failures > _FAILURES:
            best_turns, best, failures = (
                dict(zip(best_turns, random.sample([*best_turns.values()], len(best_turns)), strict=True)),
                sys.maxsize,
                0,
            )
            turn_of = best_turns
            continue
        first = random.choice([*best_turns])
        second = random.choice([rank for rank in best_turns if costs[rank] != costs[first]] or [first])
        turn_of = best_turns | {first: best_turns[second], second: best_turns[first]}


def _progress(constraints: Constraints) -> list[int]:
    """The number of operations of its micro-batch that come before each operation."""
    counts, progress = defaultdict[int, int](int), [0] * len(constraints.ranks)
    for number in constraints.order:
        progress[number] = counts[constraints.ranks[number]]
        counts[constraints.ranks[number]] += 1
    return progress


def _in_gaps(jobs: Jobs, ranks: Ranks) -> TimedOrder:
    """The order in which each operation takes the first gap on its machine that is long enough.

    Of the operations whose waits are over, the one of least preference is next. Holdings of memory are not regarded.
    """
    durations = jobs.durations
    missing = [len(waits) for waits in jobs.waits]
    earliest, starts = [0] * len(missing), [0] * len(missing)
    intervals: list[list[tuple[int, int]]] = [[(-1, 0)] for _ in jobs.owners]
    ready = [(ranks[number], number) for number, count in enumerate(missing) if not count]
    heapify(ready)
    makespan, placed = 0, list[int]()
    while ready:
        _, number = heappop(ready)
        lane, length = intervals[jobs.machines[number]], durations[number]
        place = bisect_right(lane, (earliest[number], makespan + 1))
        start = max(earliest[number], lane[place - 1][1])
        while place < len(lane) and lane[place][0] < start + length:
            start = lane[place][1]
            place += 1
        lane.insert(place, (start, start + length))
        starts[number] = start
        placed.append(number)
        makespan = max(makespan, start + length)
        for follower, lag in jobs.followers[number]:
            earliest[follower] = max(earliest[follower], start + length + lag)
            missing[follower] -= 1
            if not missing[follower]:
                heappush(ready, (ranks[follower], follower))
    return TimedOrder.by_starts(jobs, starts, placed)
