"""The search for the shortest order: heuristics first, then CP-SAT in rounds, until the bound meets the best.

Where micro-batches cost unequally, many sequences of them are equally promising, and linear programs see little of
their delays. There `sequence_bound` raises the bound, and two solvers improve the best order in its neighbourhoods.

In each round two solvers work at the same time, each in a thread. One looks for any order that is over by a target:
the lower bound at first, then targets halfway to the best order, as long as none is found. The other one raises the
bound with linear programs, as long as these do so; then it improves the best order, and the bound. Each stops after a
fixed amount of work, so the result depends on the clock only if that ends the search. Once the best order
is longer than the bound by a single tick, one round gets all the work that is left.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cached_property
from itertools import islice
from operator import itemgetter
from time import monotonic

from chimera_ir.orders.budget import SearchBudget
from chimera_ir.orders.constraints import Constraints, constraints_of
from chimera_ir.orders.cp_sat import Aim, Solved, Solver
from chimera_ir.orders.dispatch import TimedOrder, improving
from chimera_ir.orders.flow_bound import FlowAttempt, FlowBound
from chimera_ir.orders.instance import OrderInstance
from chimera_ir.orders.lower_bound import lower_bound
from chimera_ir.orders.ordering import list_starts
from chimera_ir.orders.periodic import first_micro_batches, repeated
from chimera_ir.orders.sequence_bound import sequence_bound

WORK_OF_OPERATION = 1e-5
"""About how much deterministic time of the solver a list schedule takes for each operation."""

_HEURISTIC, _MOST_HEURISTIC = 0.15, 2.0
"""Work of the heuristics: the first number is the part of the budget, the second the most, in seconds."""

_NEIGHBOURHOODS = 0.04
"""Work of a search in neighbourhoods of the best order, as a part of the budget."""

_FIRST_ROUND, _MOST_FIRST_ROUND, _GROWTH = 0.04, 0.4, 1.6
"""Work of a round: for the first one a part of the budget and the most, in seconds; then the factor of its growth."""

_PART_OF_ATTEMPT = 0.5
"""The most work of a linear program, as a part of the work that is left."""

_MOST_FOR_SOLVER = 6_000
"""The most operations of an instance that the solver gets as a whole."""

_MOST_OF_FEW, _PART_OF_FEW, _BEST_OF_FEW = 1_500, 0.5, 4
"""Limits for a larger instance, in which an order of few micro-batches is found first, and its middle repeated.

They are the most operations of those few micro-batches, the part of the budget that their search gets, and the most
orders with a repeated middle that are offered.
"""


class Ended(Enum):
    """The reason for the end of a search."""

    PROVEN = "proven"
    BUDGET = "budget"
    CLOCK = "clock"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Found:
    """The best order that a search has found, and how good it is; times are in the unit of the costs.

    ``lanes`` has the operations of each worker, by number in the instance. No order is shorter than ``bound``.
    ``hints`` maps the names of the orders that the search began with to their makespans, or to None for an order that
    exceeds a bound on memory. ``budget`` is what the search was given, ``ended`` why it ended.
    """

    lanes: Sequence[Sequence[int]]
    makespan: Fraction
    bound: Fraction
    hints: Mapping[str, Fraction | None]
    budget: SearchBudget
    ended: Ended

    @property
    def gap(self) -> Fraction:
        """The share of the makespan by which another order could be shorter at most: 0 if this one is proven best."""
        return 1 - self.bound / self.makespan if self.makespan else Fraction(0)

    @property
    def proven(self) -> bool:
        """Whether it is proven that no order is shorter."""
        return self.bound == self.makespan


class NoOrder(Exception):
    """No order that meets the bounds on memory was found; ``impossible`` says whether it is proven that there is none.

    ``needed`` maps each store to the most that a single micro-batch keeps in it.
    """

    def __init__(self, impossible: bool, needed: Mapping[int, int]) -> None:
        super().__init__("there is no order" if impossible else "no order was found")
        self.impossible, self.needed = impossible, needed


Tell = Callable[[Fraction, Fraction], None]
"""A function that a search calls when it has a shorter order or a higher bound.

It gets the makespan of the best order, and the bound below which no order is, in the unit of the costs.
"""


def search(
    instance: OrderInstance,
    hints: Mapping[str, Sequence[Sequence[int]]],
    budget: SearchBudget,
    tell: Tell = lambda _best, _bound: None,
) -> Found:
    """Searches for the shortest order of an instance, within a budget; returns the best one that it finds.

    ``hints`` are known orders to begin with, by name, each as the lanes of all workers. Interrupted from the keyboard,
    the search returns the best order so far. Raises `NoOrder` if it has found none at its end.
    """
    constraints = constraints_of(instance)
    best_so_far = _BestSoFar(instance, constraints, budget, tell, lower_bound(constraints))
    starts_of = {name: starts for name, lanes in hints.items() if (starts := instance.starts(lanes)) is not None}
    fits = {name: fits_stores(instance, hints[name]) for name in starts_of}
    try:
        for name, starts in starts_of.items():
            if fits[name]:
                best_so_far.offer(constraints.in_turn(starts))
        listed = None if best_so_far.proven else list_starts(instance)
        if listed is not None:
            best_so_far.offer(constraints.in_turn(listed))
        few = sorted(_orders_from_few(instance, constraints, budget), key=max)[:_BEST_OF_FEW]
        for starts in few:
            repeating = instance.by_start(starts)
            earliest = instance.starts(repeating)
            if fits_stores(instance, repeating) and earliest is not None:
                best_so_far.offer(constraints.in_turn(earliest))
        best_so_far.run([*few, *([] if listed is None else [listed]), *starts_of.values()])
    except KeyboardInterrupt:
        best_so_far.ended = Ended.INTERRUPTED
    # Starts do not say before which operation a move was launched, so a hint with moves may be the best order.
    best = best_so_far.best
    orders: list[Sequence[Sequence[int]]] = [instance.by_start(best.starts)] if best is not None else []
    orders += [hints[name] for name in starts_of if fits[name]]
    if not orders:
        raise NoOrder(best_so_far.proven, constraints.needed_alone)
    makespan, lanes = min(((_makespan(instance, lanes), lanes) for lanes in orders), key=itemgetter(0))
    assert best_so_far.least <= makespan, f"an order of {makespan} ticks, below the bound of {best_so_far.least}"
    return Found(
        lanes,
        makespan * instance.tick,
        best_so_far.least * instance.tick,
        {name: instance.makespan(starts) * instance.tick if fits[name] else None for name, starts in starts_of.items()},
        budget,
        Ended.PROVEN if best_so_far.least == makespan else best_so_far.ended,
    )


def _orders_from_few(instance: OrderInstance, constraints: Constraints, budget: SearchBudget) -> Iterator[list[int]]:
    """Yields orders, as starts of all operations, that repeat the middle of the best order of few micro-batches.

    Some may exceed limits of memory. None are yielded if micro-batches differ, or if the instance is small enough for
    the solver to get the whole of it.
    """
    header = instance.header
    totals = {pipe.name: len(pipe.micros) // header.slices for pipe in header.pipes}
    pipes = [header.pipe(instance.operations[numbers[0]].parts[0].micros[0]).name for numbers in constraints.classes]
    is_uniform = all(len(numbers) == totals[pipe] for pipe, numbers in zip(pipes, constraints.classes, strict=True))
    covered = sum(map(len, constraints.classes)) == len(constraints.durations)
    if len(constraints.durations) <= _MOST_FOR_SOLVER or not covered or not is_uniform:
        return
    total, of_micro_batch = min(totals.values()), len(constraints.classes) // len(totals)
    count = max(_MOST_OF_FEW // (of_micro_batch * len(totals)), header.workers * 3 // 2)
    if 2 * count > total:
        return
    few, numbers = first_micro_batches(instance, count)
    part = SearchBudget(budget.seconds * _PART_OF_FEW, budget.seed, budget.deterministic_seconds * _PART_OF_FEW)
    try:
        result = search(few, {}, part)
    except NoOrder:
        return
    if result.ended is Ended.INTERRUPTED:
        raise KeyboardInterrupt
    starts = few.starts(result.lanes)
    assert starts is not None
    yield from repeated(instance, numbers, constraints_of(few).in_turn(starts), count)


def _makespan(instance: OrderInstance, lanes: Sequence[Sequence[int]]) -> int:
    starts = instance.starts(lanes)
    assert starts is not None
    return instance.makespan(starts)


def fits_stores(instance: OrderInstance, lanes: Sequence[Sequence[int]]) -> bool:
    """Whether no store exceeds its limit if the workers run these lanes."""
    amounts = [0] * len(instance.stores)
    for lane in lanes:
        for number in lane:
            for change in instance.changes[number]:
                amounts[change.store] += change.at_start
                if amounts[change.store] > instance.stores[change.store].limit:
                    return False
                amounts[change.store] += change.at_end
    return True


class _BestSoFar:
    """The state of a search: the best order so far, the bound below which no order is, and the work left of the budget.

    ``least`` is the bound, in ticks. ``ended`` is the reason for the end of the search. ``tell`` gets each improvement.
    """

    def __init__(
        self, instance: OrderInstance, constraints: Constraints, budget: SearchBudget, tell: Tell, least: int
    ) -> None:
        self._instance, self._constraints, self._budget, self._tell = instance, constraints, budget, tell
        self._end = monotonic() + budget.seconds
        self._work = self._work_left = budget.deterministic_seconds
        self.least, self.ended = least, Ended.BUDGET
        self.best: TimedOrder | None = None
        self._aimed: int | None = None

    def offer(self, starts: Sequence[int]) -> None:
        """Keeps an order, given by starts in ticks, if it is shorter than the best so far and keeps all limits.

        The starts are computed anew from the order of each lane. If memory moves, they may be later: a lane launches
        moves between operations, and waits for them.
        """
        if self.best is not None and self._constraints.makespan(starts) >= self.best.makespan:
            return
        lanes = self._instance.by_start(starts)
        timed = self._instance.starts(lanes)
        if timed is None or not fits_stores(self._instance, lanes):
            return
        makespan = self._constraints.makespan(timed)
        if self.best is None or makespan < self.best.makespan:
            self.best = TimedOrder(makespan, timed)
            self._report()

    def raise_bound(self, bound: int) -> None:
        """Notes that no order is over before ``bound``."""
        if bound > self.least:
            self.least = bound
            self._report()

    def run(self, first: Sequence[list[int]]) -> None:
        """Searches until the best order is proven, or the budget is spent; ``first`` are starts to begin with."""
        self._run_heuristics(first)
        self._run_sequence_bound()
        if len(self._constraints.durations) <= _MOST_FOR_SOLVER:
            self._run_neighbourhoods()
            for part in self._rounds():
                if self._over():
                    break
                self._run_round(part)

    def _run_heuristics(self, first: Sequence[list[int]]) -> None:
        work = WORK_OF_OPERATION * len(self._constraints.durations)
        solves = len(self._constraints.durations) <= _MOST_FOR_SOLVER
        budget = min(_HEURISTIC * self._work, _MOST_HEURISTIC) if solves else (1 - _PART_OF_FEW) * self._work
        for order in islice(improving(self._constraints, self._budget.seed, first), max(4, int(budget / work))):
            self._work_left -= work
            if order is not None:
                self.offer(order.starts)
            if self._over():
                return

    def _run_sequence_bound(self) -> None:
        if self.best is not None and not self.proven:
            raised = sequence_bound(self._constraints, self.least, self.best.makespan - 1)
            self._work_left -= raised.work
            self.raise_bound(raised.bound)

    def _run_neighbourhoods(self) -> None:
        """Looks for shorter orders near the best one, as long as it finds any, if micro-batches cost unequally."""
        work = _NEIGHBOURHOODS * self._work
        while self.best is not None and self._constraints.costs_differ and not self._over():
            most, seed = self.best.makespan, self._budget.seed
            results = self._together(*(self._solver(Aim.NEAR, most, work, seed + added) for added in range(2)))
            self._work_left -= max(work / 10, *(solved.work for solved in results))
            for solved in results:
                if solved.starts is not None:
                    self.offer(solved.starts)
            if self.best.makespan == most:
                break

    def _rounds(self) -> Iterator[float]:
        """Yields how much work each round may do, in deterministic time; it grows from round to round."""
        part = min(_FIRST_ROUND * self._work, _MOST_FIRST_ROUND)
        while True:
            yield part
            part *= _GROWTH

    def _run_round(self, work: float) -> None:
        # What is looked for: an order over by the target, and a higher bound or an order below the best.
        most = self._latest if self.best is None else self.best.makespan - 1
        target = min(self._target(most), most)
        attempt = self._next_attempt(most)
        if self.least == most and not attempt:  # A longer round would do the same again, from its beginning.
            work = self._work_left
        work = max(min(work, self._work_left), attempt.work if attempt else 0.0)
        aiming = self._solver(Aim.ANY, target, work, self._budget.seed)
        second = attempt or self._solver(Aim.SHORTEST, most, work, self._budget.seed + 1)
        reached, improved = self._together(aiming, second)
        # What is known afterwards.
        self._work_left -= max(work / 10, reached.work, improved.work)
        for solved in (reached, improved):
            self.raise_bound(solved.bound)
            if solved.starts is not None:
                self.offer(solved.starts)
        self._aimed = target if reached.starts is None and reached.bound <= target else None
        if attempt is not None:
            self._flow_bound.learn(attempt)

    def _solver(self, aim: Aim, most: int, limit: float, seed: int) -> Solver:
        """A solver that looks for orders that are over by tick ``most``, and begins with the best order so far."""
        hint = self.best.starts if self.best else None
        return Solver(self._constraints, self.least, most, hint, aim, limit=limit, seed=seed)

    def _next_attempt(self, most: int) -> FlowAttempt | None:
        """The next linear program that may raise the bound, for a makespan of at most ``most``.

        None if no program would raise it, or if the program takes too large a part of the work that is left.
        """
        attempt = self._flow_bound.next_attempt(self.least, most)
        return attempt if attempt and attempt.work <= _PART_OF_ATTEMPT * self._work_left else None

    def _target(self, most: int) -> int:
        """Returns the makespan that the next round tries to reach: first the bound, later a larger one, up to ``most``.

        A round that finds no order of its target is followed by a target halfway from there to ``most``.
        """
        aimed = self._aimed
        return self.least if aimed is None or aimed >= most - 1 else max(self.least, (aimed + most + 1) // 2)

    @cached_property
    def _flow_bound(self) -> FlowBound:
        return FlowBound(self._constraints)

    def _together(self, *solvers: Solver | FlowAttempt) -> list[Solved]:
        seconds = max(0.01, self._end - monotonic())
        with ThreadPoolExecutor(len(solvers)) as pool:
            runs = [pool.submit(solver.run, seconds) for solver in solvers]
            try:
                wait(runs)
            except KeyboardInterrupt:
                for solver in solvers:
                    solver.stop()
                raise
            return [run.result() for run in runs]

    @property
    def proven(self) -> bool:
        """Whether it is proven that no order is shorter than the best or, without a best one, that there is none."""
        return self.least > (self._latest if self.best is None else self.best.makespan - 1)

    def _over(self) -> bool:
        if not self.proven and monotonic() >= self._end:
            self.ended = Ended.CLOCK
            return True
        return self.proven or self._work_left <= 0

    @property
    def _latest(self) -> int:
        """An upper bound on the shortest makespan, if there is any order: all durations and all delays added up."""
        constraints = self._constraints
        return sum(constraints.durations) + sum(lag for waits in constraints.waits for _, lag in waits)

    def _report(self) -> None:
        if self.best is not None:
            self._tell(self.best.makespan * self._instance.tick, self.least * self._instance.tick)
