"""Heuristic orders: a list schedule, run forwards and backwards in time, again and again with disturbed preferences.

A machine that is free takes the ready operation with the longest way to the end. Then time is reversed: the order in
which operations ended is the preference of a list schedule from the end, and so on as long as the makespan falls.

If micro-batches cost unequally, it matters most which one comes first. So most list schedules then prefer what is
nearest to the end of its micro-batch, and of such operations the micro-batch whose turn it is. Two micro-batches
exchange their turns; the exchange stays unless the makespan grows. After many exchanges in vain, other turns are drawn.
All this is done for time as it is and for time reversed.

No list schedule jams: an operation waits that would leave no room to finish all micro-batches one after the other.
"""

import heapq
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from random import Random
from typing import NamedTuple, Protocol

from chimera_ir.flow.engine import ordered
from chimera_ir.orders.instance import Constraints

# List schedule: a free worker runs the job that is preferred among those that are ready.
#
#     F takes 1, B takes 2, of two micro-batches on two stages; a backward is preferred to a forward
#     time      0     1     2     3     4     5     6     7     8
#     worker 0  F m0  F m1              B m0  B m0        B m1  B m1
#     worker 1        F m0  B m0  B m0  F m1  B m1  B m1
#
# A job that would exceed a declared bound waits until enough is freed. Greedy choices can jam: what one micro-batch
# keeps leaves no room for another, and each waits for the other. `reserve.Admission` then keeps enough room, before
# each choice, for all that has begun.

Keeps = tuple[int, int, int]
"""A change to a store: its number, the amount added at the start of a job, and the amount added at its end, <= 0."""


@dataclass(frozen=True)
class Jobs:
    """Jobs, by number, each of which occupies a machine for a while.

    Machine w is the lane of worker w; ``owners[m]`` is the worker of machine m, whose jobs start only while the lane is
    free. Job j may start ``delays[j]`` ticks after each of the jobs ``waits[j]`` is over, and once each of the jobs
    ``begun[j]`` has started. ``changes[j]`` says what job j adds to stores and frees; ``limits`` are the amounts that
    fit into the stores. Of the jobs that may start on a machine, the one with the least rank does.
    """

    owners: Sequence[int]
    workers: int
    machines: Sequence[int]
    durations: Sequence[int]
    waits: Sequence[Sequence[int]]
    delays: Sequence[Sequence[int]]
    changes: Sequence[Sequence[Keeps]]
    limits: Sequence[int]
    begun: Sequence[Sequence[int]]
    ranks: Sequence[int]

    @cached_property
    def backwards(self) -> "Jobs":
        """These jobs with time reversed: each waits for those that waited for it, and the last ones come first.

        Waits in ``begun`` cannot be reversed: there must be none.
        """
        waits: list[list[int]] = [[] for _ in self.machines]
        delays: list[list[int]] = [[] for _ in self.machines]
        for job, (others, lags) in enumerate(zip(self.waits, self.delays, strict=True)):
            for other, lag in zip(others, lags, strict=True):
                waits[other].append(job)
                delays[other].append(lag)
        changes = [
            tuple((store, -at_end, -at_start) for store, at_start, at_end in several) for several in self.changes
        ]
        return replace(self, waits=waits, delays=delays, changes=changes)

    @cached_property
    def tails(self) -> list[int]:
        """The least time from the end of each job to the end of all."""
        tails = [0] * len(self.machines)
        for job in reversed(ordered(self.waits)):
            for other, delay in zip(self.waits[job], self.delays[job], strict=True):
                tails[other] = max(tails[other], tails[job] + self.durations[job] + delay)
        return tails


class Capacity(Protocol):
    """Room in the stores: decides which jobs fit, and counts what they keep."""

    def queue(self, job: int) -> tuple[Hashable, int]:
        """Returns a key for the queue in which a ready job waits, and a number by which this queue is sorted.

        If the first job of a queue does not fit, no other job of the queue does.
        """

    def admits(self, job: int) -> bool:
        """Whether a job fits now."""

    def start(self, job: int) -> Sequence[int]:
        """Counts a job that starts; returns ready jobs that change their queue."""

    def end(self, job: int) -> None:
        """Counts a job that ends."""


class Greedy:
    """Room without foresight: a job fits if there is room for what it adds when it starts."""

    def __init__(self, jobs: Jobs) -> None:
        self._changes, self._ranks, self._free = jobs.changes, jobs.ranks, list(jobs.limits)

    def queue(self, job: int) -> tuple[Hashable, int]:
        """A queue for all jobs that add the same amounts, by rank."""
        return tuple((store, amount) for store, amount, _ in self._changes[job] if amount), self._ranks[job]

    def admits(self, job: int) -> bool:
        """Whether each store has room for what the job adds at its start."""
        return all(amount <= self._free[store] for store, amount, _ in self._changes[job] if amount)

    def start(self, job: int) -> Sequence[int]:
        """Counts a job that starts; no job changes its queue."""
        for store, amount, _ in self._changes[job]:
            self._free[store] -= amount
        return ()

    def end(self, job: int) -> None:
        """Counts a job that ends."""
        for store, _, amount in self._changes[job]:
            self._free[store] -= amount


class Placed(NamedTuple):
    """Jobs in the order of their starts, and the time at which all of them are over.

    Some jobs may never start. Of these, ``waiting`` has those that are ready and find no room. If it is empty, those
    that never start wait for one another.
    """

    started: Sequence[int]
    end: int
    waiting: Sequence[int]


_END, _ARRIVAL = 0, 1


def place(jobs: Jobs, room: Capacity) -> Placed:
    """Starts every job as early as its machine, the jobs that it waits for and the room in stores allow.

    A machine that is free takes the ready job of least rank that fits. A few operations on heaps are done for each job.
    """
    machines, durations, changes, ranks = jobs.machines, jobs.durations, jobs.changes, jobs.ranks
    count = len(machines)
    # ``missing`` counts what a job still waits for; ``earliest`` is when the messages for it have arrived.
    missing = [len(waits) for waits in jobs.waits]
    after: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for job, (waits, delays) in enumerate(zip(jobs.waits, jobs.delays, strict=True)):
        for other, delay in zip(waits, delays, strict=True):
            after[other].append((job, delay))
    following: dict[int, list[int]] = {}
    for job, others in enumerate(jobs.begun):
        missing[job] += len(others)
        for other in others:
            following.setdefault(other, []).append(job)
    earliest = [0] * count
    queues: list[dict[Hashable, list[tuple[int, int]]]] = [{} for _ in jobs.owners]
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
        """Removes from its queue and returns the job that a free machine starts now; None if no ready job fits."""
        firsts: list[tuple[int, int, list[tuple[int, int]]]] = []
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
    return Placed(started, now, waiting)


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
    """The use that the jobs of a group make of one store.

    The jobs have places in the group's order: job j is at place ``index[j]``, and ``amounts`` has for each place what
    the job adds at its start and, 0 or negative, at its end. ``most[i]`` is the most that the group keeps from place i
    on, if its jobs run in this order. ``level`` is what the group keeps now. ``started`` marks the places whose jobs
    have started; ``next`` is the first place without a mark. Jobs after ``next`` that have started anyway add
    ``ahead``. ``first`` is the first place whose job adds anything.
    """

    __slots__ = ("ahead", "amounts", "first", "index", "level", "most", "next", "started")

    def __init__(self) -> None:
        self.amounts: list[tuple[int, int]] = []
        self.most: list[int] = []
        self.index: dict[int, int] = {}
        self.level = self.next = self.ahead = self.first = 0
        self.started = bytearray()

    def add(self, job: int, start: int, end: int) -> None:
        self.index[job] = len(self.amounts)
        self.amounts.append((start, end))

    def close(self) -> None:
        """Computes ``most`` and ``first``, after the last job."""
        level, peaks = 0, []
        for start, end in self.amounts:
            peaks.append(level + start)
            level += start + end
        for number in range(len(peaks) - 2, -1, -1):
            peaks[number] = max(peaks[number], peaks[number + 1])
        self.most, self.started = peaks, bytearray(len(peaks))
        self.first = next((place for place, (start, _) in enumerate(self.amounts) if start), 0)

    def opens(self, job: int) -> bool:
        """Whether no job before this one in the group's order adds anything."""
        return self.index[job] <= self.first

    def need(self, starting: int | None = None) -> int:
        """Returns an upper bound on how much more the group will keep than now, until it has run to its end.

        With ``starting``, a job of the group, it is counted from the moment after this job has started.
        """
        following, ahead, level = self.next, self.ahead, self.level
        if starting is not None:
            place = self.index[starting]
            level += self.amounts[place][0]
            if place == following:
                following, ahead = self._after(place, ahead)
            else:
                ahead += self.amounts[place][0]
        return max(0, self.most[following] + ahead - level) if following < len(self.most) else 0

    def start(self, job: int) -> None:
        place = self.index[job]
        self.started[place] = 1
        self.level += self.amounts[place][0]
        if place == self.next:
            self.next, self.ahead = self._after(place, self.ahead)
        else:
            self.ahead += self.amounts[place][0]

    def end(self, job: int) -> bool:
        """Counts a job that ends; returns whether the group keeps nothing, and all of its jobs have started."""
        self.level += self.amounts[self.index[job]][1]
        return not self.level and self.next == len(self.amounts)

    def _after(self, place: int, ahead: int) -> tuple[int, int]:
        """Returns the first place after ``place`` whose job has not started, and what the started jobs after that add.

        ``ahead`` is what the started jobs after ``place`` add.
        """
        place += 1
        while place < len(self.amounts) and self.started[place]:
            ahead -= self.amounts[place][0]
            place += 1
        return place, ahead


class Admission:
    """Room with foresight: a job fits only if all groups that have begun can afterwards still run to their end.

    They run one after the other, from the oldest on.
    """

    def __init__(self, jobs: Jobs) -> None:
        self._jobs, self._free = jobs, list(jobs.limits)
        self._group, members = groups(jobs)
        self._position = [0] * len(jobs.machines)
        self._shares: list[dict[int, _GroupUse]] = []
        for of_group in members:
            shares: dict[int, _GroupUse] = {}
            for position, job in enumerate(frugal(jobs, of_group)):
                self._position[job] = position
                for store, start, end in jobs.changes[job]:
                    shares.setdefault(store, _GroupUse()).add(job, start, end)
            for share in shares.values():
                share.close()
            self._shares.append(shares)
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

    def queue(self, job: int) -> tuple[Hashable, int]:
        """Returns a key for the queue of a ready job, and a number by which this queue is sorted.

        A group that has begun has queues of its own, sorted by the group's order. Jobs that would begin their groups
        share a queue with all that add the same amounts, by rank. So do jobs that add nothing.
        """
        adds = tuple((store, start) for store, start, _ in self._jobs.changes[job] if start)
        group = self._group[job]
        if not adds:
            return (), self._jobs.ranks[job]
        if self._entered[group] or not all(self._shares[group][store].opens(job) for store, _ in adds):
            return (adds, group), self._position[job]
        self._outside.setdefault(group, []).append(job)
        return adds, self._jobs.ranks[job]

    def admits(self, job: int) -> bool:
        """Whether afterwards each group can still run to its end once all older ones have."""
        group = self._group[job]
        return all(
            start <= self._free[store] and self._safe(group, job, store, start)
            for store, start, _ in self._jobs.changes[job]
            if start
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
        """Counts a job that starts; returns the ready jobs that change their queue.

        If the job is the first of its group, these are all other ready jobs of the group.
        """
        group, shares = self._group[job], self._shares[self._group[job]]
        others: Sequence[int] = ()
        if not self._entered[group]:
            self._entered[group] = 1
            for store, share in shares.items():
                self._begun[store][group] = share
            others = [other for other in self._outside.pop(group, ()) if other != job]
        for store, start, _ in self._jobs.changes[job]:
            self._free[store] -= start
            shares[store].start(job)
        return others

    def end(self, job: int) -> None:
        """Counts a job that ends."""
        group = self._group[job]
        for store, _, end in self._jobs.changes[job]:
            self._free[store] -= end
            if self._shares[group][store].end(job):
                self._begun[store].pop(group, None)


def list_schedule(jobs: Jobs) -> Placed:
    """Makes the list schedule of jobs: without foresight or, if that jams, with room kept free (`Admission`)."""
    result = place(jobs, Greedy(jobs))
    return place(jobs, Admission(jobs)) if result.waiting else result


def groups(jobs: Jobs) -> tuple[list[int], list[list[int]]]:
    """Returns the number of each job's group, and the jobs of each group: those that waits connect."""
    parent = list(range(len(jobs.machines)))

    def root(job: int) -> int:
        while parent[job] != job:
            parent[job] = parent[parent[job]]
            job = parent[job]
        return job

    for job, others in enumerate(zip(jobs.waits, jobs.begun, strict=True)):
        for other in chain.from_iterable(others):
            first, second = root(job), root(other)
            parent[max(first, second)] = min(first, second)
    members: dict[int, list[int]] = {}
    for job in range(len(parent)):
        members.setdefault(root(job), []).append(job)
    group_of = [0] * len(parent)
    for number, several in enumerate(members.values()):
        for job in several:
            group_of[job] = number
    return group_of, list(members.values())


def frugal(jobs: Jobs, members: Sequence[int]) -> Iterator[int]:
    """Yields the jobs of a group in an order in which they can run one by one: of those that may, what frees first."""
    missing = {job: len(jobs.waits[job]) + len(jobs.begun[job]) for job in members}
    after: dict[int, list[int]] = {}
    for job in members:
        for other in chain(jobs.waits[job], jobs.begun[job]):
            after.setdefault(other, []).append(job)

    def entry(job: int) -> tuple[int, int, int]:
        adds = sum(start + end for _, start, end in jobs.changes[job])
        return (adds > 0) - (adds < 0), jobs.ranks[job], job

    ready = [entry(job) for job in members if not missing[job]]
    heapify(ready)
    while ready:
        job = heappop(ready)[2]
        yield job
        for other in after.get(job, ()):
            missing[other] -= 1
            if not missing[other]:
                heappush(ready, entry(other))


_DISTURBANCES = (0.01, 0.03, 0.1, 0.2)
"""Amounts by which preferences are disturbed, as parts of the longest way to the end."""


_BY_TURNS = 16
"""The number of list schedules by turns (the sequence of micro-batches) before another one by disturbed preferences."""


_FAILURES = 60
"""The number of exchanges in vain after which other turns are drawn."""


class TimedOrder(NamedTuple):
    """An order, as the start of each operation by number, and its makespan; both in ticks."""

    makespan: int
    starts: list[int]


_Way = Callable[[Constraints, Sequence[float]], TimedOrder | None]


def improving(constraints: Constraints, seed: int, first: Sequence[list[int]] = ()) -> Iterator[TimedOrder | None]:
    """Yields orders without end, one for each list schedule that is tried, or None where a list schedule jams.

    ``seed`` fixes all chance. ``first`` are known orders to begin with, each as the starts of its operations.
    """
    random, tails, ways = Random(seed), constraints.tails, _ways(constraints)
    for starts in first:
        yield from refined(constraints, starts)
    disturbance, longest = 0.0, max(tails, default=0)
    by_turns = _by_turns(constraints, random) if constraints.costs_differ else iter(())
    while True:
        yield from islice(by_turns, _BY_TURNS)
        for way in ways:
            preferences = [random.uniform(0, disturbance * longest) - tail for tail in tails]
            yield from _back_and_forth(constraints, preferences, way)
        disturbance = random.choice(_DISTURBANCES)


def refined(constraints: Constraints, starts: Sequence[int]) -> Iterator[TimedOrder | None]:
    """Yields the list schedules that begin with a known order, by its starts, as long as they get shorter."""
    for way in _ways(constraints):
        yield from _back_and_forth(constraints, starts, way)


def _ways(constraints: Constraints) -> list[_Way]:
    return [_list_schedule] if constraints.holdings else [_list_schedule, _in_gaps]


def _back_and_forth(constraints: Constraints, preferences: Sequence[float], way: _Way) -> Iterator[TimedOrder | None]:
    """Yields list schedules by turns forwards and backwards in time, as long as they get shorter.

    The first one prefers operations by ``preferences``, the least first; each later one prefers those that ended last
    in the one before. ``way`` makes a list schedule.
    """
    best = None
    while True:
        forwards = way(constraints, preferences)
        yield forwards
        if forwards is None or (best is not None and forwards.makespan >= best):
            return
        ends = map(sum, zip(forwards.starts, constraints.durations, strict=True))
        backwards = way(constraints.backwards, [-end for end in ends])
        if backwards is None:
            return
        order = _reversed(backwards, constraints)
        yield order
        best, preferences = min(forwards.makespan, order.makespan), order.starts


def _reversed(order: TimedOrder, constraints: Constraints) -> TimedOrder:
    """Turns around an order that was made backwards in time; returns it as an order of ``constraints``."""
    ends = map(sum, zip(order.starts, constraints.durations, strict=True))
    return TimedOrder(order.makespan, [order.makespan - end for end in ends])


def _by_turns(constraints: Constraints, random: Random) -> Iterator[TimedOrder | None]:
    """Yields list schedules that prefer micro-batches by their turns; every second one is made backwards in time.

    A schedule that jams is None.
    """
    climbs = [_climb(side, random) for side in (constraints, constraints.backwards)]
    while True:
        forwards, backwards = map(next, climbs)
        yield forwards
        yield None if backwards is None else _reversed(backwards, constraints)


def _climb(constraints: Constraints, random: Random) -> Iterator[TimedOrder | None]:
    """Yields list schedules that prefer operations late in their micro-batch, then micro-batches by their turns.

    The turns are a sequence of the micro-batches. After each schedule, two micro-batches of unequal cost are exchanged
    in the best sequence so far. A schedule that jams is None.
    """
    ranks, progress, costs = constraints.ranks, _progress(constraints), defaultdict[int, int](int)
    for rank, duration in zip(ranks, constraints.durations, strict=True):
        costs[rank] += duration
    turn_of, best, failures = {rank: turn for turn, rank in enumerate(sorted(costs))}, sys.maxsize, 0
    best_turns = turn_of
    while True:
        order = _list_schedule(
            constraints, [turn_of[rank] - len(costs) * part for rank, part in zip(ranks, progress, strict=True)]
        )
        yield order
        makespan = sys.maxsize if order is None else order.makespan
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
    """Returns for each operation how many operations of its micro-batch come before it."""
    counts, progress = defaultdict[int, int](int), [0] * len(constraints.ranks)
    for number in constraints.order:
        progress[number] = counts[constraints.ranks[number]]
        counts[constraints.ranks[number]] += 1
    return progress


class _Stores:
    """Counts the room in the stores while operations start and end, and keeps enough to finish all micro-batches.

    An operation may start if there is room afterwards for the first unfinished micro-batch to add all that it needs;
    then, with what that one has freed, for the second one, and so on: the banker's algorithm.
    """

    def __init__(self, constraints: Constraints) -> None:
        self._ranks = constraints.ranks
        self._room = list(constraints.limits)
        self._added = defaultdict[int, dict[int, int]](dict)
        self._freed = defaultdict[int, list[tuple[int, int, int]]](list)
        # What each micro-batch keeps in each store, what it will still add there, and how many holdings are not over.
        self._held = [defaultdict[int, int](int) for _ in self._room]
        self._needed = [defaultdict[int, int](int) for _ in self._room]
        self._open = defaultdict[int, int](int)
        for store, amount, opened, closed in constraints.holdings:
            rank = self._ranks[opened]
            self._added[opened][store] = self._added[opened].get(store, 0) + amount
            self._freed[closed].append((store, amount, rank))
            self._needed[store][rank] += amount
            self._open[rank] += 1
        self._most = [max(needed.values(), default=0) for needed in self._needed]
        self._unfinished = sorted(self._open)

    def fits(self, number: int) -> bool:
        """Whether an operation may start now, so that afterwards all micro-batches can still be finished."""
        rank = self._ranks[number]
        return all(self._is_safe(store, amount, rank) for store, amount in self._added.get(number, {}).items())

    def _is_safe(self, store: int, amount: int, rank: int) -> bool:
        room = self._room[store] - amount
        if room >= self._most[store] or room < 0:
            return room >= 0
        needed, held = self._needed[store], self._held[store]
        holding = {*(other for other in held if held[other]), rank}
        for other in self._unfinished:
            added = amount if other == rank else 0
            if needed[other] - added > room:
                return False
            room += held[other] + added
            holding.discard(other)
            if not holding:
                break
        return True

    def start(self, number: int) -> None:
        """Takes the room that an operation needs from its start on."""
        for store, amount in self._added.get(number, {}).items():
            self._room[store] -= amount
            self._needed[store][self._ranks[number]] -= amount
            self._held[store][self._ranks[number]] += amount

    def end(self, number: int) -> bool:
        """Gives back the room that an operation frees; returns whether it finishes a micro-batch."""
        finished = False
        for store, amount, rank in self._freed.get(number, ()):
            self._room[store] += amount
            self._held[store][rank] -= amount
            self._open[rank] -= 1
            if not self._open[rank]:
                self._unfinished.remove(rank)
                finished = True
        return finished


def _list_schedule(constraints: Constraints, preferences: Sequence[float]) -> TimedOrder | None:
    """The list schedule in which a free machine takes the ready operation of least preference; None if it jams."""
    machines, durations = constraints.machines, constraints.durations
    missing = [len(waits) for waits in constraints.waits]
    earliest, starts = [0] * len(missing), [0] * len(missing)
    ready: list[list[tuple[float, int]]] = [[] for _ in constraints.by_machine]
    free, stores, done, makespan = [0] * len(ready), _Stores(constraints), 0, 0
    # Events: an operation becomes ready (0), or ends (1).
    events = [(0, 0, number) for number, count in enumerate(missing) if not count]
    while events:
        now, woken = events[0][0], set[int]()
        while events and events[0][0] == now:
            _, ends, number = heapq.heappop(events)
            if ends:
                if stores.end(number):
                    woken.update(range(len(ready)))
            else:
                heapq.heappush(ready[machines[number]], (preferences[number], number))
            woken.add(machines[number])
        for machine in sorted(woken):
            if free[machine] > now or (chosen := _first_that_fits(ready[machine], stores)) is None:
                continue
            stores.start(chosen)
            starts[chosen], free[machine] = now, now + durations[chosen]
            makespan, done = max(makespan, free[machine]), done + 1
            heapq.heappush(events, (free[machine], 1, chosen))
            for follower, lag in constraints.followers[chosen]:
                earliest[follower] = max(earliest[follower], free[machine] + lag)
                missing[follower] -= 1
                if not missing[follower]:
                    heapq.heappush(events, (earliest[follower], 0, follower))
    return TimedOrder(makespan, starts) if done == len(missing) else None


def _first_that_fits(ready: list[tuple[float, int]], stores: _Stores) -> int | None:
    """Takes the first ready operation for which there is room; None if there is none."""
    skipped, chosen = [], None
    while ready and chosen is None:
        entry = heapq.heappop(ready)
        if stores.fits(entry[1]):
            chosen = entry[1]
        else:
            skipped.append(entry)
    for entry in skipped:
        heapq.heappush(ready, entry)
    return chosen


def _in_gaps(constraints: Constraints, preferences: Sequence[float]) -> TimedOrder:
    """The order in which each operation takes the first gap on its machine that is long enough.

    Of the operations whose waits are over, the one of least preference is next. Holdings of memory are not regarded.
    """
    durations = constraints.durations
    missing = [len(waits) for waits in constraints.waits]
    earliest, starts = [0] * len(missing), [0] * len(missing)
    intervals: list[list[tuple[int, int]]] = [[(-1, 0)] for _ in constraints.by_machine]
    ready = [(preferences[number], number) for number, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    makespan = 0
    while ready:
        _, number = heapq.heappop(ready)
        lane, length = intervals[constraints.machines[number]], durations[number]
        place = bisect_right(lane, (earliest[number], makespan + 1))
        start = max(earliest[number], lane[place - 1][1])
        while place < len(lane) and lane[place][0] < start + length:
            start = lane[place][1]
            place += 1
        lane.insert(place, (start, start + length))
        starts[number] = start
        makespan = max(makespan, start + length)
        for follower, lag in constraints.followers[number]:
            earliest[follower] = max(earliest[follower], start + length + lag)
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (preferences[follower], follower))
    return TimedOrder(makespan, starts)
