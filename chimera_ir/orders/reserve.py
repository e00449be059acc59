"""Room kept free for what has begun, so that a list schedule never jams (the banker's algorithm of Dijkstra, 1965).

Jobs that wait for one another, such as those of a micro-batch, are a group. Each group has an order in which it can run
to its end by itself: what frees first. A group is as old as the first of its jobs that keeps anything. A job fits if,
after its start, the oldest group can still run to its end, then the next older one, and so on.

    a worker with two stages and room for 2:
      F m0 s0 keeps 1 and F m0 s3 will keep 1: F m1 s0 does not fit before m0 is over
    the same worker with room for 3:
      F m1 s0 fits as well: m0 can still run to its end, and then m1
"""

from collections.abc import Hashable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain

from chimera_ir.orders.list_schedule import Greedy, Jobs, Placed, place


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
