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
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from random import Random
from typing import NamedTuple

from chimera_ir.orders.constraints import Constraints

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
