"""List schedule: a free worker runs the job that is preferred among those that are ready.

    F takes 1, B takes 2, of two micro-batches on two stages; a backward is preferred to a forward
    time      0     1     2     3     4     5     6     7     8
    worker 0  F m0  F m1              B m0  B m0        B m1  B m1
    worker 1        F m0  B m0  B m0  F m1  B m1  B m1

A job that would exceed a declared bound waits until enough is freed. Greedy choices can jam: what one micro-batch keeps
leaves no room for another, and each waits for the other. `reserve.Admission` then keeps enough room, before each
choice, for all that has begun.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from chimera_ir.flow.engine import ordered

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
