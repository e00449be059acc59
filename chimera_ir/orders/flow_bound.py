"""A lower bound from a linear program in which operations flow: it counts machines, waits and memory together.

Let N_c(t) be how many operations of class c have started by time t; d_c is their duration, and a class has operations
that are taken in turn, or a single one. Any order that is over by T has, at every time t,

    N_c(t) <= N_p(t - d_p - lag) + k                the n-th of c waits for the (n - k)-th of p
    sum of N_c(t) - N_c(t - d_c) <= 1               a machine runs one operation at a time
    sum of amount * (N_o(t) - N_e(t - d_e)) <= M    a store keeps what o has opened and e has not closed

and N_c(t) lies between how many must have started by t, for all to be over by T, and how many can. If even numbers
that are not whole cannot meet this, no order is over by T.

The solver of linear programs, GLOP, computes with floating-point numbers, so its answer is a proposal: the smallest
excess e by which machines and stores must exceed their limits, and a multiplier of each row. The rows, multiplied by
whole numbers near these and added, are one inequality; each N_c(t) is replaced by its most favourable value. All this
is exact, and if the inequality still needs an excess, T is excluded.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from chimera_ir.orders.constraints import Constraints
from chimera_ir.orders.cp_sat import Solved

if TYPE_CHECKING:
    from ortools.linear_solver.python.model_builder import Solver

_SCALE = 2**20
"""Multipliers are rounded to multiples of 1 / _SCALE."""

_WORK_OF_ROWS = 5e-9
"""Work of a linear program, divided by the square of its number of rows.

It is about the deterministic time that CP-SAT counts while the program is solved.
"""

_FALL_OF_EXCESS = 0.5
"""An estimate: a makespan T whose program needs the excess e is too short by about this factor times e times T."""


class _Class(NamedTuple):
    """Operations that start in the order of their numbers, all on one machine and of one duration."""

    numbers: Sequence[int]
    machine: int
    duration: int


class _ClassWait(NamedTuple):
    """A wait of class ``later`` for class ``earlier``: its n-th operation waits for the (n - shift)-th of the other.

    It starts at least ``ticks`` after the start of that one.
    """

    later: int
    earlier: int
    shift: int
    ticks: int


class _UpperLimit(NamedTuple):
    """A row of a linear program: the sum of variables, each times its factor, is at most ``most``.

    If ``may_exceed``, the sum may be larger by the excess, which the program makes as small as it can.
    """

    factors: Mapping[int, int]
    most: int
    may_exceed: bool


class FlowBound:
    """Makes the linear programs of an instance, one for each makespan to exclude, and chooses which one to try next."""

    def __init__(self, constraints: Constraints) -> None:
        self._constraints = constraints
        in_turn = {number for several in constraints.classes for number in several}
        alone = [(number,) for number in range(len(constraints.durations)) if number not in in_turn]
        machines, durations = constraints.machines, constraints.durations
        self._classes = [
            _Class(numbers, machines[numbers[0]], durations[numbers[0]]) for numbers in (*constraints.classes, *alone)
        ]
        self._place = {
            number: (key, place)
            for key, entry in enumerate(self._classes)
            for place, number in enumerate(entry.numbers)
        }
        self._waits = [*self._between_classes()]
        self._stores = self._kept_by_classes()
        # The makespan to try next, and one that was not excluded, so that no later one can be.
        self._promising, self._beyond = 0, sys.maxsize

    def _between_classes(self) -> Iterator[_ClassWait]:
        """Yields the waits that hold for a whole class: the n-th operation waits for the (n - k)-th of another class.

        Waits that only some operations of a class have are left out.
        """
        constraints, counts = self._constraints, defaultdict[_ClassWait, int](int)
        for number, waits in enumerate(constraints.waits):
            later, place = self._place[number]
            for other, lag in waits:
                earlier, turn = self._place[other]
                if earlier != later:
                    counts[_ClassWait(later, earlier, place - turn, constraints.durations[other] + lag)] += 1
        for wait, count in counts.items():
            if wait.shift >= 0 and count == len(self._classes[wait.later].numbers) - wait.shift:
                yield wait

    def _kept_by_classes(self) -> Mapping[int, Mapping[tuple[int, int], int]]:
        """Maps each store to what it keeps for whole classes, as {(c, e): amount}.

        From the start of the n-th operation of class c to the end of the n-th of class e, the store keeps the amount,
        for every n. What is not kept in this way is left out, so the store seems emptier than it is, and the bound
        still holds.
        """
        turns = defaultdict[tuple[int, int, int, int], list[tuple[int, int]]](list)
        for store, amount, opened, closed in self._constraints.holdings:
            (first, turn), (last, end) = self._place[opened], self._place[closed]
            turns[store, first, last, amount].append((turn, end))
        amounts = defaultdict[int, dict[tuple[int, int], int]](lambda: defaultdict(int))
        for (store, first, last, amount), pairs in turns.items():
            # What is not kept like this is left out: a store that has less to keep excludes no more.
            count = len(self._classes[first].numbers)
            if sorted(pairs) == [(turn, turn) for turn in range(count)]:
                amounts[store][first, last] += amount
        return amounts

    def next_attempt(self, least: int, most: int) -> "FlowAttempt | None":
        """An attempt to prove that no order has some makespan from ``least`` to ``most``, the most promising one.

        None if earlier attempts have shown that the linear program excludes none of these makespans.
        """
        most = min(most, self._beyond - 1)
        if most < least:
            return None
        makespan = min(max(self._promising, least), most)
        if self._promising >= self._beyond:
            makespan = (least + most) // 2
        return self.attempt(makespan)

    def attempt(self, makespan: int) -> "FlowAttempt":
        """An attempt to prove that no order is over by ``makespan``."""
        rows = (len(self._classes) + len(self._waits)) * makespan
        return FlowAttempt(lambda: self._program(makespan), makespan, _WORK_OF_ROWS * rows**2)

    def learn(self, attempt: "FlowAttempt") -> None:
        """Notes the result of an attempt that has run: it decides which makespan `next_attempt` tries."""
        if attempt.excluded:
            self._promising = max(attempt.makespan + 1, int(attempt.makespan * (1 + _FALL_OF_EXCESS * attempt.excess)))
        else:
            self._beyond = attempt.makespan

    def _program(self, makespan: int) -> "_FlowProgram":
        program = _FlowProgram(self._constraints, self._classes, makespan)
        if not program.impossible:
            program.add_turns()
            for wait in self._waits:
                program.add_wait(wait)
            program.add_machines()
            for store, amounts in self._stores.items():
                program.add_store(amounts, self._constraints.limits[store])
        return program


class FlowAttempt:
    """A linear program, to be made and solved, that may prove that no order is over by ``makespan``.

    ``work`` is about how much deterministic time it takes. Once it is solved, ``excluded`` says whether this is proven,
    and ``excess`` how far the program must exceed the limits of machines and stores.
    """

    def __init__(self, program: "Callable[[], _FlowProgram]", makespan: int, work: float) -> None:
        from ortools.linear_solver.python.model_builder import Solver

        self.program, self._solver = program, Solver("GLOP")
        self.makespan, self.work = makespan, work
        self.excluded, self.excess = False, 0.0

    def stop(self) -> None:
        """Ends `run` soon; another thread may call it."""
        self._solver.stop_search()  # type: ignore[no-untyped-call]

    def run(self, seconds: float) -> Solved:
        """Solves the linear program, within ``seconds`` by the clock; the result has a bound, and never an order."""
        program = self.program()
        self._solver.set_time_limit_in_seconds(seconds)
        self.excluded = program.impossible or program.contradicts(program.multipliers(self._solver))
        self.excess = program.excess
        return Solved(None, self.makespan + 1 if self.excluded else 0, self.work)


class _FlowProgram:
    """The linear program of a makespan; variable ``c * steps + t`` is the number of starts N_c(t)."""

    def __init__(self, constraints: Constraints, classes: Sequence[_Class], makespan: int) -> None:
        self._classes, self._steps = classes, makespan + 1
        self._least, self._most = list[int](), list[int]()
        self._rows: list[_UpperLimit] = []
        self.impossible, self.excess = False, 0.0
        for entry in classes:
            earliest, latest = [0] * self._steps, [0] * self._steps
            for number in entry.numbers:
                first, last = constraints.heads[number], makespan - constraints.tails[number] - entry.duration
                if last < first:
                    self.impossible = True
                    return
                earliest[first] += 1
                latest[last] += 1
            self._least += accumulate(latest)
            self._most += accumulate(earliest)

    def add_turns(self) -> None:
        """Adds rows: no N_c(t) is larger than N_c(t + 1), as operations that have started stay so."""
        for key in range(len(self._classes)):
            for now in range(self._steps - 1):
                self._add([(key, now, 1), (key, now + 1, -1)], 0)

    def add_wait(self, wait: _ClassWait) -> None:
        """Adds rows: at no time have more operations of the later class started than its wait allows."""
        for now in range(self._steps):
            self._add([(wait.later, now, 1), (wait.earlier, now - wait.ticks, -1)], wait.shift)

    def add_machines(self) -> None:
        """Adds rows: each machine runs one operation at a time."""
        by_machine = defaultdict[int, list[tuple[int, int]]](list)
        for key, entry in enumerate(self._classes):
            by_machine[entry.machine].append((key, entry.duration))
        for entries in by_machine.values():
            for now in range(self._steps - 1):
                terms = [(key, now, 1) for key, _ in entries] + [(key, now - length, -1) for key, length in entries]
                self._add(terms, 1, may_exceed=True)

    def add_store(self, amounts: Mapping[tuple[int, int], int], limit: int) -> None:
        """Adds rows: a store keeps no more than its limit. ``amounts`` is what it keeps, as {(c, e): amount}."""
        for now in range(self._steps - 1):
            terms = [(first, now, amount) for (first, _), amount in amounts.items()]
            terms += [(last, now - self._classes[last].duration, -amount) for (_, last), amount in amounts.items()]
            self._add(terms, limit, may_exceed=True)

    def _add(self, terms: Iterable[tuple[int, int, int]], most: int, may_exceed: bool = False) -> None:
        """Adds a row: the sum of N_c(t) times factor, for all (c, t, factor) of ``terms``, is at most ``most``.

        Variables of which only one value is possible are put in. A row that always holds is left out; one that cannot
        hold, because nothing in it varies, makes the program ``impossible``.
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
        if largest <= most:
            return
        if factors:
            self._rows.append(_UpperLimit(factors, most, may_exceed))
        else:
            self.impossible = True

    def multipliers(self, solver: "Solver") -> Sequence[int]:
        """Solves the linear program; returns for each row the whole number, 0 or more, by which to multiply it.

        The sum of the multiplied rows may be a contradiction (`contradicts`). All numbers are 0 without a solution.
        """
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
        if solver.solve(model) != SolveStatus.OPTIMAL:
            return [0] * len(rows)
        self.excess = solver.objective_value
        return [max(0, round(-_SCALE * solver.dual_value(row))) for row in rows]

    def contradicts(self, multipliers: Sequence[int]) -> bool:
        """Whether the sum of the rows, each times its multiplier, cannot hold without an excess.

        It is a contradiction if even the values of the variables that suit it best break it.
        """
        factors, most = defaultdict[int, int](int), 0
        for row, multiplier in zip(self._rows, multipliers, strict=True):
            if multiplier:
                most += multiplier * row.most
                for variable, factor in row.factors.items():
                    factors[variable] += multiplier * factor
        least = sum(factor * (self._least if factor > 0 else self._most)[v] for v, factor in factors.items())
        return least > most
