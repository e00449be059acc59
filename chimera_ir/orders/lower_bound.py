"""Lower bounds of the makespan that need no search.

- From a machine (Jackson): it runs its operations, interrupted where that helps; each begins no earlier than the waits
  before it allow, and the waits behind it take their time afterwards.
- From a store: it keeps each amount for the least time that it must. All amounts times these times, added up and
  divided by the store's limit, are a time that no order can beat.
"""

import heapq
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from chimera_ir.orders.cp_sat import Solved
from chimera_ir.orders.instance import Constraints, Lags, reached

# A lower bound from a linear program in which operations flow: it counts machines, waits and memory together.
#
# Let N_c(t) be how many operations of class c have started by time t; d_c is their duration, and a class has operations
# that are taken in turn, or a single one. Any order that is over by T has, at every time t,
#
#     N_c(t) <= N_p(t - d_p - lag) + k                the n-th of c waits for the (n - k)-th of p
#     sum of N_c(t) - N_c(t - d_c) <= 1               a machine runs one operation at a time
#     sum of amount * (N_o(t) - N_e(t - d_e)) <= M    a store keeps what o has opened and e has not closed
#
# and N_c(t) lies between how many must have started by t, for all to be over by T, and how many can. If even numbers
# that are not whole cannot meet this, no order is over by T.
#
# The solver of linear programs, GLOP, computes with floating-point numbers, so its answer is a proposal: the smallest
# excess e by which machines and stores must exceed their limits, and a multiplier of each row. The rows, multiplied by
# whole numbers near these and added, are one inequality; each N_c(t) is replaced by its most favourable value. All this
# is exact, and if the inequality still needs an excess, T is excluded.

_SCALE = 2**20
"""Multipliers are rounded to multiples of 1 / _SCALE."""

_WORK_OF_ROWS = 5e-9
"""Work of a linear program, divided by the square of its number of rows.

It is about the deterministic time that CP-SAT counts while the program is solved.
"""

_FALL_OF_EXCESS = 0.5
"""An estimate: a makespan T whose program needs the excess e is too short by about this factor times e times T."""


class _Class(NamedTuple):
    numbers: Sequence[int]
    machine: int
    duration: int


class _ClassWait(NamedTuple):
    """The n-th start of ``later`` is ``ticks`` or more after the (n - shift)-th start of ``earlier``."""

    later: int
    earlier: int
    shift: int
    ticks: int


class _UpperLimit(NamedTuple):
    """A row: the sum of variables, each times its factor, is at most ``most``.

    If ``may_exceed``, it may be larger by the excess, which the program makes as small as it can.
    """

    factors: Mapping[int, int]
    most: int
    may_exceed: bool


class FlowBound:
    """The linear programs of an instance, one for each makespan to exclude, and the choice which to try next."""

    def __init__(self, constraints: Constraints) -> None:
        self.constraints = constraints
        in_turn = {number for several in constraints.classes for number in several}
        alone = [(number,) for number in range(len(constraints.durations)) if number not in in_turn]
        machines, durations = constraints.machines, constraints.durations
        self.classes = [
            _Class(numbers, machines[numbers[0]], durations[numbers[0]]) for numbers in (*constraints.classes, *alone)
        ]
        self._place = {
            number: (key, place) for key, entry in enumerate(self.classes) for place, number in enumerate(entry.numbers)
        }
        self.waits = [*self._between_classes()]
        self.stores = self._kept_by_classes()
        # The makespan to try next, and one that was not excluded, so that no later one can be.
        self._promising, self._beyond = 0, sys.maxsize

    def _between_classes(self) -> Iterator[_ClassWait]:
        """Yields the waits that hold for a whole class; those that only some of its operations have are left out."""
        constraints, counts = self.constraints, defaultdict[_ClassWait, int](int)
        for number, waits in enumerate(constraints.waits):
            later, place = self._place[number]
            for other, lag in waits:
                earlier, turn = self._place[other]
                if earlier != later:
                    counts[_ClassWait(later, earlier, place - turn, constraints.durations[other] + lag)] += 1
        for wait, count in counts.items():
            if wait.shift >= 0 and count == len(self.classes[wait.later].numbers) - wait.shift:
                yield wait

    def _kept_by_classes(self) -> Mapping[int, Mapping[tuple[int, int], int]]:
        """Maps each store to what it keeps from the n-th start of c to the n-th end of e, for every n, by (c, e).

        What is not kept in this way is left out: the store seems emptier than it is, and the bound still holds.
        """
        turns = defaultdict[tuple[int, int, int, int], list[tuple[int, int]]](list)
        for store, amount, opened, closed in self.constraints.holdings:
            (first, turn), (last, end) = self._place[opened], self._place[closed]
            turns[store, first, last, amount].append((turn, end))
        amounts = defaultdict[int, dict[tuple[int, int], int]](lambda: defaultdict(int))
        for (store, first, last, amount), pairs in turns.items():
            count = len(self.classes[first].numbers)
            if sorted(pairs) == [(turn, turn) for turn in range(count)]:
                amounts[store][first, last] += amount
        return amounts

    def next_attempt(self, least: int, most: int) -> "FlowAttempt | None":
        """The most promising attempt to exclude a makespan from ``least`` to ``most``; None if none is left."""
        most = min(most, self._beyond - 1)
        if most < least:
            return None
        makespan = min(max(self._promising, least), most)
        if self._promising >= self._beyond:
            makespan = (least + most) // 2
        return FlowAttempt(self, makespan)

    def learn(self, attempt: "FlowAttempt") -> None:
        """Notes the result of an attempt that has run: it decides which makespan `next_attempt` tries."""
        if attempt.excluded:
            self._promising = max(attempt.makespan + 1, int(attempt.makespan * (1 + _FALL_OF_EXCESS * attempt.excess)))
        else:
            self._beyond = attempt.makespan


class FlowAttempt:
    """A linear program that may prove that no order is over by ``makespan``.

    ``work`` is about its deterministic time. Once it has run, ``excluded`` says whether this is proven, and ``excess``
    how far the program must exceed the limits of machines and stores.
    """

    def __init__(self, bound: FlowBound, makespan: int) -> None:
        from ortools.linear_solver.python.model_builder import Solver

        self.makespan, self.work = makespan, _WORK_OF_ROWS * ((len(bound.classes) + len(bound.waits)) * makespan) ** 2
        self.excluded, self.excess = False, 0.0
        self._bound, self._solver, self._steps = bound, Solver("GLOP"), makespan + 1
        # Variable ``c * steps + t`` is the number of starts N_c(t), from the least to the most.
        self._least, self._most = list[int](), list[int]()
        self._rows: list[_UpperLimit] = []

    def stop(self) -> None:
        """Ends `run` soon; another thread may call it."""
        self._solver.stop_search()  # type: ignore[no-untyped-call]

    def run(self, seconds: float) -> Solved:
        """Solves the linear program, within ``seconds`` by the clock; the result has a bound, and never an order."""
        self._solver.set_time_limit_in_seconds(seconds)
        self.excluded = not self.make() or self.contradicts(self.multipliers())
        return Solved(None, self.makespan + 1 if self.excluded else 0, self.work)

    def make(self) -> bool:
        """Makes the program; False if a row cannot hold, whatever the solver finds."""
        constraints = self._bound.constraints
        for entry in self._bound.classes:
            earliest, latest = [0] * self._steps, [0] * self._steps
            for number in entry.numbers:
                first, last = constraints.heads[number], self.makespan - constraints.tails[number] - entry.duration
                if last < first:
                    return False
                earliest[first] += 1
                latest[last] += 1
            self._least += accumulate(latest)
            self._most += accumulate(earliest)
        return all(self._add(*row) for row in self._inequalities())

    def _inequalities(self) -> Iterator[tuple[Sequence[tuple[int, int, int]], int, bool]]:
        """Yields rows: the sum of N_c(t) times factor, for all (c, t, factor), its limit, and if it may exceed it."""
        bound, times = self._bound, range(self._steps - 1)
        # Operations that have started stay so.
        for key in range(len(bound.classes)):
            yield from (([(key, now, 1), (key, now + 1, -1)], 0, False) for now in times)
        # At no time have more operations of a later class started than its wait allows.
        for later, earlier, shift, ticks in bound.waits:
            yield from (([(later, now, 1), (earlier, now - ticks, -1)], shift, False) for now in range(self._steps))
        # Each machine runs one operation at a time.
        by_machine = defaultdict[int, list[tuple[int, int]]](list)
        for key, entry in enumerate(bound.classes):
            by_machine[entry.machine].append((key, entry.duration))
        for entries in by_machine.values():
            for now in times:
                terms = [(key, now, 1) for key, _ in entries] + [(key, now - length, -1) for key, length in entries]
                yield terms, 1, True
        # A store keeps no more than its limit.
        for store, amounts in bound.stores.items():
            for now in times:
                terms = [(first, now, amount) for (first, _), amount in amounts.items()]
                terms += [(last, now - bound.classes[last].duration, -amount) for (_, last), amount in amounts.items()]
                yield terms, bound.constraints.limits[store], True

    def _add(self, terms: Iterable[tuple[int, int, int]], most: int, may_exceed: bool) -> bool:
        """Adds a row unless it always holds; False if it has no variables and cannot hold.

        Variables of which only one value is possible are put in.
        """
        factors = defaultdict[int, int](int)
        for key, time, factor in terms:
            if time < 0:
                continue
            variable = key * self._steps + time
            if self._least[variable] == self._most[variable]:
                most -= factor * self._least[variable]
            else:
                factors[variable] += factor
        largest = sum(factor * (self._most if factor > 0 else self._least)[v] for v, factor in factors.items())
        if largest > most and factors:
            self._rows.append(_UpperLimit(factors, most, may_exceed))
        return largest <= most or bool(factors)

    def multipliers(self) -> Sequence[int]:
        """Solves the program; returns a number for each row, 0 or more, with which `contradicts` may hold."""
        from ortools.linear_solver.python.model_builder import LinearExpr, Model, SolveStatus

        model = Model()  # type: ignore[no-untyped-call]
        used = sorted({variable for row in self._rows for variable in row.factors})
        variables = {variable: model.new_num_var(self._least[variable], self._most[variable], "") for variable in used}
        excess = model.new_num_var(0, len(self._rows), "")
        rows = []
        for row in self._rows:
            terms = [*map(variables.__getitem__, row.factors), excess]
            total = LinearExpr.weighted_sum(terms, [*row.factors.values(), -row.may_exceed])
            rows.append(model.add(total <= row.most))
        model.minimize(excess)
        if self._solver.solve(model) != SolveStatus.OPTIMAL:
            return [0] * len(rows)
        self.excess = self._solver.objective_value
        return [max(0, round(-_SCALE * self._solver.dual_value(row))) for row in rows]

    def contradicts(self, multipliers: Sequence[int]) -> bool:
        """Whether the sum of the rows, each times its multiplier, cannot hold without an excess.

        Even the values of the variables that suit it best then break it.
        """
        factors, most = defaultdict[int, int](int), 0
        for row, multiplier in zip(self._rows, multipliers, strict=True):
            if multiplier:
                most += multiplier * row.most
                for variable, factor in row.factors.items():
                    factors[variable] += multiplier * factor
        least = sum(factor * (self._least if factor > 0 else self._most)[v] for v, factor in factors.items())
        return least > most


# A lower bound for micro-batches that cost unequally: what a sequence on one machine means for all others.
#
# Micro-batches that pass the same machines delay one another, whether or not one overtakes another on the way:
#
#     machine 0    h h h h l           h h h h l
#     machine 1            h h h h l             l h h h h
#                  l ends after h      h waits for l: as long as l takes on machine 0, and then on machine 1
#
# So if l comes after h on a machine, the way of h to its end, or what is still to come after it, is longer by what l
# takes on one of the machines from there on, at least by the least of these times, b(l). The same holds before: let
# a(l) be the least time that l takes on a machine up to this one. Then, for each operation h of a machine in an order
# over by T,
#
#     start of h  >=  the operations before h in its micro-batch  +  sum of a(l) of the l that come before h
#     T - end of h  >=  the operations after it in its micro-batch  +  sum of b(l) of the l that come after h
#
# where l are the operations like h of other micro-batches. Both sums depend on which operations have run, not on their
# sequence, so dynamic programming finds the least T: over how many operations of each group of equal micro-batches have
# run, with the earliest time for each. If there are too many groups, similar ones become one, with the least of their
# times. All numbers are whole.

MOST_STATES = 30_000
"""The most states of a machine; beyond this, groups are merged."""

WORK_OF_STATE = 2e-5
"""About how much deterministic time of the solver a state takes."""


def sequence_bound(constraints: Constraints, least: int, most: int) -> tuple[int, float]:
    """Raises the known lower bound ``least`` of the makespan, where micro-batches cost unequally.

    Returns it with the deterministic time that this took. A bound of ``most + 1`` says that no order is over by
    ``most``; the bound is raised no further.
    """
    if not constraints.costs_differ:
        return least, 0.0
    times, states = _times_of_operations(constraints), 0
    for numbers in reversed(constraints.by_machine):
        groups = _merged([*_groups(constraints, numbers, times)])
        if groups and least <= most:
            least, count = _least_makespan(groups, least, most)
            states += count
    return least, states * WORK_OF_STATE


class _Times(NamedTuple):
    """Times of an operation l; ``head`` and ``tail`` are those of `Jobs`.

    ``before`` and ``after`` are the least times that its own micro-batch takes before and after it, ``ahead`` and
    ``behind`` a(l) and b(l) of the formulas above.
    """

    duration: int
    head: int
    tail: int
    before: int
    ahead: int
    after: int
    behind: int


def _times_of_operations(constraints: Constraints) -> Mapping[int, _Times]:
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

    Returns for each how long the others in its chain take, and the least duration in the chain. The chain is the
    longest way in the micro-batch of the first operation, as far as all the other micro-batches have the same one on
    the same machines, because only there they delay one another. A lag counts as the least in any micro-batch.
    ``links`` are the waits of each operation, or the followers; ``way`` is the time from each operation on in that
    direction.
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

    The i-th operation of each has the role ``roles[i]`` and comes after those at the places ``needed[i]``.
    ``times[m][i]`` are its times in micro-batch m.
    """

    roles: tuple[int, ...]
    needed: tuple[tuple[int, ...], ...]
    times: tuple[tuple[_Times, ...], ...]

    @property
    def size(self) -> int:
        return sum(times.duration for times in self.times[0])

    @property
    def states(self) -> Sequence[tuple[int, ...]]:
        return _states_of(self.needed, len(self.times))


@cache
def _states_of(needed: tuple[tuple[int, ...], ...], total: int) -> Sequence[tuple[int, ...]]:
    """The states that a machine can reach: how many operations of each role have run, in ``total`` micro-batches.

    Empty if there are too many. Which roles come before a role is in ``needed``.
    """
    states, first = [], (0,) * len(needed)
    for counts in reached(first, lambda counts: sorted(after for _, after in _steps(needed, total, counts))):
        states.append(counts)
        if len(states) > MOST_STATES:
            return ()
    return states


def _steps(
    needed: Sequence[Sequence[int]], total: int, counts: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields the steps from a state: the place of the role that runs next, and the state after it."""
    for place, count in enumerate(counts):
        if count < min((counts[other] for other in needed[place]), default=total):
            yield place, (*counts[:place], count + 1, *counts[place + 1 :])


def _groups(constraints: Constraints, numbers: Sequence[int], times: Mapping[int, _Times]) -> Iterator[_Group]:
    """Yields the groups of micro-batches with equal roles, waits and times, except for heads and tails."""
    by_micro_batch = defaultdict[int, list[int]](list)
    for number in sorted(numbers, key=lambda number: constraints.roles[number]):
        by_micro_batch[constraints.ranks[number]].append(number)
    equal = defaultdict[object, list[_Group]](list)
    for several in by_micro_batch.values():
        roles = tuple(constraints.roles[number] for number in several)
        before = map(constraints.before_in_micro_batch, several)
        needed = tuple(tuple(place for place, n in enumerate(several) if n in earlier) for earlier in before)
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
    """An operation that may be next in a state of a group, and the number of the state ``after`` it.

    If k operations of its role have run, ``times`` has the (k + 1)-th smallest head and the (k + 1)-th largest tail;
    any other time is the least of the role.
    """

    after: int
    role: int
    times: _Times


class _GroupState(NamedTuple):
    """A state of a group: its steps, and the time of the operations that have not run (``left``).

    ``ahead[r]`` is the sum of a(l) over the operations l of role r that have run, ``behind[r]`` that of b(l) over those
    that have not.
    """

    steps: Sequence[_Transition]
    left: int
    ahead: Sequence[int]
    behind: Sequence[int]


def _states(group: _Group, role_of: Mapping[int, int]) -> Sequence[_GroupState]:
    """The states of a group, the first one with nothing run; ``role_of`` numbers the roles on the machine."""
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
    """Returns the least makespan that some sequence of a machine allows, and the number of states visited.

    It is at least ``least``, and ``most + 1`` if no sequence allows one of ``most``. Sequences are extended in the
    order of the makespan that they need so far. Of two that lead to the same state, the one that needs the longer
    makespan is dropped unless it is over earlier.
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


def lower_bound(constraints: Constraints) -> int:
    """A time, in ticks, before which no order of the operations can be over."""
    machines = range(len(constraints.by_machine))
    return max((*(_of_machine(constraints, machine) for machine in machines), _of_stores(constraints)), default=0)


def _of_machine(constraints: Constraints, machine: int) -> int:
    """The least makespan that a machine's operations allow, if it could interrupt them.

    It always runs the operation, of those that may have begun, with the most time behind it (its tail).
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
    """The bound by stores, as this module's first lines say."""
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
    """The least time from the start of ``opened`` to the end of ``closed`` by the waits in their micro-batch."""
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
