"""Lower bounds of the makespan that need no search.

- From a machine (Jackson): it runs its operations, interrupted where that helps; each begins no earlier than the waits
  before it allow, and the waits behind it take their time afterwards.
- From a store: it keeps each amount for the least time that it must. All amounts times these times, added up and
  divided by the store's limit, are a time that no order can beat.
"""

import heapq
from collections import defaultdict

from chimera_ir.orders.constraints import Constraints


def lower_bound(constraints: Constraints) -> int:
    """A time, in ticks, before which no order of the operations can be over."""
    machines = range(len(constraints.by_machine))
    return max((*(_of_machine(constraints, machine) for machine in machines), _of_stores(constraints)), default=0)


def _of_machine(constraints: Constraints, machine: int) -> int:
    """The least makespan that a machine's operations allow, if it could interrupt them.

    At any time the machine runs the operation, of those that may have begun, with the most time behind it (its tail).
    """
    heads, tails, durations = constraints.heads, constraints.tails, constraints.durations
    left = {number: durations[number] for number in constraints.by_machine[machine]}
    upcoming = sorted(left, key=heads.__getitem__, reverse=True)
    waiting: list[tuple[int, int]] = []
    now = least = 0
    while upcoming or waiting:
        if not waiting:
            now = max(now, heads[upcoming[-1]])
        while upcoming and heads[upcoming[-1]] <= now:
            number = upcoming.pop()
            heapq.heappush(waiting, (-tails[number], number))
        _, number = waiting[0]
        spent = min(left[number], heads[upcoming[-1]] - now) if upcoming else left[number]
        now += spent
        left[number] -= spent
        if not left[number]:
            heapq.heappop(waiting)
            least = max(least, now + tails[number])
    return least


def _of_stores(constraints: Constraints) -> int:
    """Returns a lower bound of the makespan that follows from the limits of the stores, which count what workers keep.

    What a store keeps takes an amount of it for some time, at least for the shortest time from the operation that adds
    it to the one that frees it. The sum of amount times shortest time, divided by the limit, is a time that cannot be
    undercut; the bound is the largest of all stores.
    """
    heads, tails = constraints.heads, constraints.tails
    class_of = {number: place for place, several in enumerate(constraints.classes) for number in several}
    times: dict[tuple[int, int], int] = {}
    by_store = defaultdict[int, list[tuple[int, int, int]]](list)
    for store, amount, opened, closed in constraints.holdings:
        key = class_of.get(opened, -1 - opened), class_of.get(closed, -1 - closed)
        if key not in times:
            times[key] = _least_time(constraints, opened, closed)
        by_store[store].append((heads[opened], tails[closed], amount * times[key]))
    return max(
        (
            min(head for head, _, _ in several)
            + min(tail for _, tail, _ in several)
            + -(-sum(area for *_, area in several) // max(1, constraints.limits[store]))
            for store, several in by_store.items()
        ),
        default=0,
    )


def _least_time(constraints: Constraints, opened: int, closed: int) -> int:
    """The least time from the start of operation ``opened`` to the end of ``closed``.

    It follows from the waits of operations on their micro-batch, one for another.
    """
    durations, ranks = constraints.durations, constraints.ranks
    ends, pending = {opened: durations[opened]}, [opened]
    # Few operations are on one micro-batch: an end that grows is followed again.
    for number in pending:
        for follower, lag in constraints.followers[number]:
            end = ends[number] + lag + durations[follower]
            if ranks[follower] == ranks[opened] and end > ends.get(follower, 0):
                ends[follower] = end
                pending.append(follower)
    return ends.get(closed, durations[opened])
