"""A lower bound for micro-batches that cost unequally: what a sequence on one machine means for all others.

Micro-batches that pass the same machines delay one another, whether or not one overtakes another on the way:

    machine 0    h h h h l           h h h h l
    machine 1            h h h h l             l h h h h
                 l ends after h      h waits for l: as long as l takes on machine 0, and then on machine 1

So if l comes after h on a machine, the way of h to its end, or what is still to come after it, is longer by what l
takes on one of the machines from there on, at least by the least of these times, b(l). The same holds before: let a(l)
be the least time that l takes on a machine up to this one. Then, for each operation h of a machine in an order over by
T,

    start of h  >=  the operations before h in its micro-batch  +  sum of a(l) of the l that come before h
    T - end of h  >=  the operations after it in its micro-batch  +  sum of b(l) of the l that come after h

where l are the operations like h of other micro-batches. Both sums depend on which operations have run, not on their
sequence, so dynamic programming finds the least T: over how many operations of each group of equal micro-batches have
run, with the earliest time for each. If there are too many groups, similar ones become one, with the least of their
times. All numbers are whole.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from chimera_ir.orders.constraints import Constraints, Lags

MOST_STATES = 30_000
"""The most states of a machine; beyond this, groups are merged."""

WORK_OF_STATE = 2e-5
"""About how much deterministic time of the solver a state takes."""


class SequenceBound(NamedTuple):
    """A makespan that no order is below, and the deterministic time that finding it took."""

    bound: int
    work: float


def sequence_bound(constraints: Constraints, least: int, most: int) -> SequenceBound:
    """Raises the known lower bound ``least`` of the makespan, where micro-batches cost unequally.

    A bound of ``most + 1`` says that no order is over by ``most``; the bound is raised no further.
    """
    if not constraints.costs_differ:
        return SequenceBound(least, 0.0)
    times, states = _times_of_operations(constraints), 0
    for numbers in reversed(constraints.by_machine):
        groups = _merged([*_groups(constraints, numbers, times)])
        if groups and least <= most:
            least, count = _least_makespan(groups, least, most)
            states += count
    return SequenceBound(least, states * WORK_OF_STATE)


class _Times(NamedTuple):
    """Times of an operation l; ``head`` and ``tail`` are those of `Constraints`.

    ``before`` and ``after`` are the least times that its own micro-batch takes before and after it. ``ahead`` and
    ``behind`` are a(l) and b(l) of the formulas above: by how much it delays others that come after it, or before it.
    """

    duration: int
    head: int
    tail: int
    before: int
    ahead: int
    after: int
    behind: int


def _times_of_operations(constraints: Constraints) -> Mapping[int, _Times]:
    """The times of each operation, by number."""
    durations, heads, tails = constraints.durations, constraints.heads, constraints.tails
    by_role = defaultdict[int, list[int]](list)
    for number, role in enumerate(constraints.roles):
        by_role[role].append(number)
    times: dict[int, _Times] = {}
    for numbers in by_role.values():
        ahead = _along_chain(constraints, numbers, constraints.waits, heads)
        behind = _along_chain(constraints, numbers, constraints.followers, tails)
        for number in numbers:
            times[number] = _Times(durations[number], heads[number], tails[number], *ahead[number], *behind[number])
    return times


def _along_chain(
    constraints: Constraints, numbers: Sequence[int], links: Sequence[Lags], way: Sequence[int]
) -> Mapping[int, tuple[int, int]]:
    """Follows a chain of waits from each of the operations ``numbers``, which have one role, in each one's micro-batch.

    Returns for each operation how long the others in its chain take, and the least duration in the chain, its own
    included. The chain is the longest way in the micro-batch of the first operation. It is followed as far as all the
    other micro-batches have the same one on the same machines, because only there they delay one another. A lag counts
    as the least in any of the micro-batches. ``links`` are the waits of each operation, or the followers; ``way`` is
    the time from each operation on in that direction.
    """
    durations, machines, roles, ranks = (
        constraints.durations,
        constraints.machines,
        constraints.roles,
        constraints.ranks,
    )
    now, total = [*numbers], [0] * len(numbers)
    least = [durations[number] for number in numbers]
    while True:
        following = {
            roles[other]: durations[other] + lag + way[other]
            for other, lag in links[now[0]]
            if ranks[other] == ranks[now[0]]
        }
        if not following:
            break
        role = max(following, key=lambda role: (following[role], role))
        steps = [
            [(other, lag) for other, lag in links[number] if roles[other] == role and ranks[other] == ranks[number]]
            for number in now
        ]
        if not all(len(step) == 1 for step in steps):
            break
        now = [other for ((other, _),) in steps]
        if len({machines[other] for other in now}) > 1:
            break
        lag = min(lag for ((_, lag),) in steps)
        total = [time + lag + durations[other] for time, other in zip(total, now, strict=True)]
        least = [min(time, durations[other]) for time, other in zip(least, now, strict=True)]
    return dict(zip(numbers, zip(total, least, strict=True), strict=True))


@dataclass(frozen=True)
class _Group:
    """Micro-batches whose operations on one machine have the same roles and the same waits among each other.

    The i-th operation of each has the role ``roles[i]`` and comes after the operations at the places ``needed[i]`` of
    the same micro-batch. ``times[m][i]`` are its times in micro-batch m.
    """

    roles: tuple[int, ...]
    needed: tuple[tuple[int, ...], ...]
    times: tuple[tuple[_Times, ...], ...]

    @property
    def size(self) -> int:
        """The time that the operations of its first micro-batch take together."""
        return sum(times.duration for times in self.times[0])

    @property
    def states(self) -> Sequence[tuple[int, ...]]:
        """All states that a machine can reach on the way; none if there are too many.

        A state is how many of the group's operations have run, of each role.
        """
        return _states_of(self.needed, len(self.times))


@cache
def _states_of(needed: tuple[tuple[int, ...], ...], total: int) -> Sequence[tuple[int, ...]]:
    """Returns the states of a group of ``total`` micro-batches: how many operations of each role have run.

    Which roles come before a role is in ``needed``. The result is empty if there are too many states.
    """
    first = (0,) * len(needed)
    reached, pending = {first}, [first]
    for counts in pending:
        new = {after for _, after in _steps(needed, total, counts)} - reached
        reached |= new
        pending += sorted(new)
        if len(reached) > MOST_STATES:
            return ()
    return pending


def _steps(
    needed: Sequence[Sequence[int]], total: int, counts: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields the steps from a state: the place of the role whose operation is next, and the state after that operation.

    A state, such as ``counts``, says how many operations of each role have run, in ``total`` micro-batches. A role may
    be next if more operations have run of each role that it needs.
    """
    for place, count in enumerate(counts):
        if count < min((counts[other] for other in needed[place]), default=total):
            yield place, (*counts[:place], count + 1, *counts[place + 1 :])


def _groups(constraints: Constraints, numbers: Sequence[int], times: Mapping[int, _Times]) -> Iterator[_Group]:
    """Yields the groups of equal micro-batches on a machine, which runs the operations ``numbers``.

    Micro-batches are equal if their operations have the same roles, the same waits for one another, and the same times
    except for heads and tails.
    """
    by_micro_batch = defaultdict[int, list[int]](list)
    for number in sorted(numbers, key=lambda number: constraints.roles[number]):
        by_micro_batch[constraints.ranks[number]].append(number)
    equal = defaultdict[object, list[_Group]](list)
    for several in by_micro_batch.values():
        roles = tuple(constraints.roles[number] for number in several)
        before = constraints.before_in_micro_batch(several)
        needed = tuple(
            tuple(place for place, other in enumerate(several) if other in before[number]) for number in several
        )
        group = _Group(roles, needed, (tuple(times[number] for number in several),))
        equal[roles, needed, tuple(of._replace(head=0, tail=0) for of in group.times[0])].append(group)
    for members in equal.values():
        yield _Group(members[0].roles, members[0].needed, tuple(group.times[0] for group in members))


def _merged(groups: Sequence[_Group]) -> Sequence[_Group]:
    """Merges the most similar groups until there are few enough states; returns none if that is impossible."""
    groups = sorted(groups, key=lambda group: (group.roles, group.needed, group.size))
    while True:
        counts = [len(group.states) for group in groups]
        if 0 < prod(counts) <= MOST_STATES:
            return groups
        losses = [
            ((second.size - first.size) * len(second.times), place)
            for place, (first, second) in enumerate(pairwise(groups))
            if (first.roles, first.needed) == (second.roles, second.needed)
        ]
        if not losses or 0 in counts:
            return ()
        _, place = min(losses)
        first, second = groups[place : place + 2]
        groups[place : place + 2] = [_Group(first.roles, first.needed, first.times + second.times)]


class _Transition(NamedTuple):
    """An operation that may be next in a state of a group, and the number of the state after it.

    Its ``times`` are lower bounds over the group's operations of the role. If k of these have run, ``head`` is the
    (k + 1)-th smallest of their heads, ``tail`` the (k + 1)-th largest of their tails; any other time is the least.
    """

    after: int
    role: int
    times: _Times


class _GroupState(NamedTuple):
    """A state of a group: its steps, and the time that the operations take that have not run (``left``).

    ``ahead[r]`` is the sum of a(l) over the group's operations l of role r that have run, ``behind[r]`` that of b(l)
    over those that have not.
    """

    steps: Sequence[_Transition]
    left: int
    ahead: Sequence[int]
    behind: Sequence[int]


def _states(group: _Group, role_of: Mapping[int, int]) -> Sequence[_GroupState]:
    """Returns the states of a group, the first one with nothing run; ``role_of`` numbers the roles on the machine."""
    total = len(group.times)
    # The k-th to start has the k-th least head or a later one; the k-th to end the k-th largest tail or a longer one.
    by_role = list(zip(*group.times, strict=True))
    heads = [sorted(times.head for times in several) for several in by_role]
    tails = [sorted((times.tail for times in several), reverse=True) for several in by_role]
    least = [_Times(*map(min, zip(*several, strict=True))) for several in by_role]
    all_counts = group.states
    number_of = {counts: number for number, counts in enumerate(all_counts)}
    states = []
    for counts in all_counts:
        ahead, behind = [0] * len(role_of), [0] * len(role_of)
        for role, count, times in zip(group.roles, counts, least, strict=True):
            ahead[role_of[role]] = count * times.ahead
            behind[role_of[role]] = (total - count) * times.behind
        steps = [
            _Transition(
                number_of[after],
                role_of[group.roles[place]],
                least[place]._replace(head=heads[place][counts[place]], tail=tails[place][counts[place]]),
            )
            for place, after in _steps(group.needed, total, counts)
        ]
        left = sum((total - count) * times.duration for count, times in zip(counts, least, strict=True))
        states.append(_GroupState(steps, left, ahead, behind))
    return states


def _least_makespan(groups: Sequence[_Group], least: int, most: int) -> tuple[int, int]:
    """Returns the least makespan that some sequence of a machine's operations allows, and the number of states visited.

    The makespan is at least ``least``, and ``most + 1`` if no sequence allows one of ``most``.

    Sequences are extended in the order of the makespan that they need so far. Of two that lead to the same state, the
    one that needs the longer makespan is dropped unless it is over earlier.
    """
    role_of = {role: place for place, role in enumerate(sorted({role for group in groups for role in group.roles}))}
    states_of = [_states(group, role_of) for group in groups]
    least_tail = min(times.tail for group in groups for several in group.times for times in several)
    number_of_steps = sum(len(group.times) * len(group.roles) for group in groups)
    earliest: dict[tuple[int, ...], int] = {}
    waiting = [(least, number_of_steps, 0, (0,) * len(groups))]
    visited = 0
    while waiting and waiting[0][0] <= most:
        needed, missing, now, numbers = heapq.heappop(waiting)
        if not missing:
            return needed, visited
        if earliest.get(numbers, now + 1) <= now:
            continue
        earliest[numbers] = now
        visited += 1
        states = [several[number] for several, number in zip(states_of, numbers, strict=True)]
        ahead = [sum(amounts) for amounts in zip(*(state.ahead for state in states), strict=True)]
        behind = [sum(amounts) for amounts in zip(*(state.behind for state in states), strict=True)]
        left = sum(state.left for state in states)
        for place, state in enumerate(states):
            for after, role, times in state.steps:
                end = max(now, times.head, times.before + ahead[role]) + times.duration
                tail = max(times.tail, times.after + behind[role] - times.behind, left - times.duration + least_tail)
                following = (*numbers[:place], after, *numbers[place + 1 :])
                if earliest.get(following, end + 1) > end:
                    heapq.heappush(waiting, (max(needed, end + tail), missing - 1, end, following))
    return most + 1, visited
