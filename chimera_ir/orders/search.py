"""The search for the shortest order: heuristics and CP-SAT by turns, until the bound meets the best.

Where micro-batches cost unequally, many sequences of them are equally promising, and linear programs see little of
their delays. There `sequence_bound` raises the bound, and two solvers improve the best order in its neighbourhoods.

In each round two solvers work at the same time, each in a thread. One looks for any order that is over by a target:
the lower bound at first, then targets halfway to the best order, as long as none is found. The other one raises the
bound with a linear program, as long as these do so; then two more improve the best order, one of them the bound as
well. Once the best order is longer than the bound by a single tick, one round gets all the work that is left.

A search is a sequence of steps, each with a fixed amount of work. What they are does not depend on the budget, which
says only before which of them the search ends: so a longer search does all that a shorter one does, and more. The
result depends on the clock only if that ends the search.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from heapq import nsmallest
from itertools import chain, count, islice
from operator import itemgetter
from time import monotonic

from chimera_ir.cost.durations import Durations, Unit, exact, percent
from chimera_ir.errors import WrongOption
from chimera_ir.ir.levels import Bound, Header, Quantity, Schedule
from chimera_ir.ir.text.printer import show
from chimera_ir.orders.cp_sat import Aim, Solved, Solver
from chimera_ir.orders.dispatch import TimedOrder, improving, refined
from chimera_ir.orders.instance import Constraints, OrderInstance, constraints_of, instance_of
from chimera_ir.orders.lower_bound import FlowAttempt, FlowBound, lower_bound, sequence_bound
from chimera_ir.orders.ordering import list_starts
from chimera_ir.orders.timetable import first_micro_batches, repeated
from chimera_ir.plural import listed

# The limits of a search for a better order: time by the clock, and work.

SHARE_OF_SECONDS = Fraction(4, 5)
"""Deterministic time of the solver in each thread for each second of a budget."""


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """Limits of the time and the work of a search.

    A search ends after a fixed amount of work, so that its result is the same each time; a machine that has two cores
    for it does the work within ``seconds`` by the clock, and after these the search ends in any case. ``work`` sets the
    amount, in seconds of the solver's deterministic time; by default it follows from ``seconds``. ``seed`` is that of
    all chance.
    """

    seconds: float
    seed: int = 0
    work: float = 0

    @property
    def deterministic_seconds(self) -> float:
        """The amount of work after which the search ends, in seconds of the solver's deterministic time."""
        return self.work or float(SHARE_OF_SECONDS * Fraction(self.seconds))


WORK_OF_OPERATION = 1e-5
"""About how much deterministic time of the solver a list schedule takes for each operation."""

_FIRST_ORDERS = 4
"""The list schedules that every search tries, whatever its budget."""

_HEURISTIC, _MOST_HEURISTIC = 0.15, 2.0
"""Work of the heuristics before a round, as a part of the round's, and the most in all rounds, in seconds."""

_FIRST_ROUND, _ROUND_OF_OPERATION, _GROWTH = 0.05, 4e-4, 1.6
"""Work of each solver in the first round: the least, and for each operation; then the factor of its growth."""

_PART_OF_ATTEMPT = 1 / 3
"""The most work of a linear program, as a part of the work that is done before it."""

_MOST_FOR_SOLVER = 6_000
"""The most operations of an instance that the solver gets as a whole."""

_MOST_OF_FEW, _BEST_OF_FEW = 1_500, 4
"""Limits for a larger instance, in which an order of few micro-batches is found first, and its middle repeated.

They are the most operations of those few micro-batches, and the most orders with a repeated middle that are offered
for each order of the few.
"""

_PART_OF_FEW, _WORK_OF_REPEATING = 0.2, 8
"""Work of a step with few micro-batches, and of repeating a middle, in list schedules of the whole."""


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
    instance = instance.in_longest_ticks
    constraints = constraints_of(instance)
    starts_of = {name: starts for name, lanes in hints.items() if (starts := instance.starts(lanes)) is not None}
    fits = {name: instance.fits_stores(hints[name]) for name in starts_of}
    best_so_far = _BestSoFar(constraints, budget.seed, monotonic() + budget.seconds, tell)
    try:
        for name, starts in starts_of.items():
            if fits[name]:
                best_so_far.offer(constraints.in_turn(starts))
        best_so_far.go_on(budget.deterministic_seconds, [*starts_of.values()])
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


def _few_of(constraints: Constraints) -> tuple[OrderInstance, list[int], int] | None:
    """Cuts a large instance down to few micro-batches of each pipe, if the middle of their order can be repeated.

    Returns the smaller instance, the number of each of its operations in the whole one, and the micro-batches of a
    pipe. None if micro-batches differ, or if there are too few of them.
    """
    instance, header = constraints.instance, constraints.instance.header
    totals = {pipe.name: len(pipe.micros) // header.slices for pipe in header.pipes}
    pipes = [header.pipe(instance.operations[numbers[0]].parts[0].micros[0]).name for numbers in constraints.classes]
    is_uniform = all(len(numbers) == totals[pipe] for pipe, numbers in zip(pipes, constraints.classes, strict=True))
    if sum(map(len, constraints.classes)) < len(constraints.durations) or not is_uniform:
        return None
    total, of_micro_batch = min(totals.values()), len(constraints.classes) // len(totals)
    count = max(_MOST_OF_FEW // (of_micro_batch * len(totals)), header.workers * 3 // 2)
    return None if 2 * count > total else (*first_micro_batches(instance, count), count)


def _makespan(instance: OrderInstance, lanes: Sequence[Sequence[int]]) -> int:
    starts = instance.starts(lanes)
    assert starts is not None
    return instance.makespan(starts)


class _BestSoFar:
    """The state of a search, which is over at time ``end`` in any case; ``least`` is its bound, in ticks."""

    def __init__(self, constraints: Constraints, seed: int, end: float, tell: Tell = lambda *_: None) -> None:
        self._constraints, self._seed, self._end, self._tell = constraints, seed, end, tell
        self._instance = constraints.instance
        self._work = self._work_done = self._work_of_step = 0.0
        self._coming: Iterator[float] | None = None
        self.least, self.ended = lower_bound(constraints), Ended.BUDGET
        self.best: TimedOrder | None = None
        self._aimed: int | None = None

    def offer(self, starts: Sequence[int]) -> None:
        """Keeps an order, given by starts in ticks, if it is shorter than the best so far and keeps all limits.

        The starts are computed anew from the lanes, which launch moves between operations and wait for them.
        """
        if self.best is not None and self._instance.makespan(starts) >= self.best.makespan:
            return
        lanes = self._instance.by_start(starts)
        timed = self._instance.starts(lanes)
        if timed is None or not self._instance.fits_stores(lanes):
            return
        makespan = self._instance.makespan(timed)
        if self.best is None or makespan < self.best.makespan:
            self.best = TimedOrder.by_starts(self._constraints, timed)
            self._report()

    def raise_bound(self, bound: int) -> None:
        """Notes that no order is over before ``bound``."""
        if bound > self.least:
            self.least = bound
            self._report()

    def go_on(self, work: float, known: Sequence[list[int]] = ()) -> None:
        """Searches for so much more work, and ends before the first step that might take more than is left."""
        self._work += work
        self._coming = self._coming or self._steps(known)
        while not self._over():
            self._work_of_step = next(self._coming)

    def _steps(self, known: Sequence[list[int]]) -> Iterator[float]:
        """Takes the steps of the search without end; yields before each how much work it may take."""
        listed = list_starts(self._instance)
        if listed is not None:
            self.offer(self._constraints.in_turn(listed))
        heuristics = iter(improving(self._constraints, self._seed, [*([] if listed is None else [listed]), *known]))
        self._offer_each(islice(heuristics, _FIRST_ORDERS))
        if self.best is not None and not self.proven:
            raised, work = sequence_bound(self._constraints, self.least, self.best.makespan - 1)
            self._work_done += work
            self.raise_bound(raised)
        if len(self._constraints.durations) > _MOST_FOR_SOLVER:
            yield from self._steps_with_few(heuristics)
            return
        part = max(_FIRST_ROUND, _ROUND_OF_OPERATION * len(self._constraints.durations))
        flow_bound, heuristic_work = FlowBound(self._constraints), 0.0
        for number in count():
            if heuristic_work < _MOST_HEURISTIC:
                heuristic_work += _HEURISTIC * part
                yield from self._heuristic_step(heuristics, _HEURISTIC * part)
            attempt = flow_bound.next_attempt(self.least, self._most)
            if attempt and attempt.work > _PART_OF_ATTEMPT * self._work_done:
                attempt = None
            yield max(part, attempt.work if attempt else 0)
            self._run_round(part, attempt)
            if attempt:
                flow_bound.learn(attempt)
            yield part
            self._run_second_half(part, 2 * number, shortest=attempt is not None)
            part *= _GROWTH

    @property
    def _work_of_order(self) -> float:
        return WORK_OF_OPERATION * len(self._constraints.durations)

    def _heuristic_step(self, heuristics: Iterator[TimedOrder], work: float) -> Iterator[float]:
        number = max(1, int(work / self._work_of_order))
        yield number * self._work_of_order
        self._offer_each(islice(heuristics, number))

    def _offer_each(self, orders: Iterable[TimedOrder]) -> None:
        for order in orders:
            self._work_done += self._work_of_order
            if not order.waiting:
                self.offer(order.starts)
            if self.proven or monotonic() >= self._end:
                return

    def _steps_with_few(self, heuristics: Iterator[TimedOrder]) -> Iterator[float]:
        """Steps for a large instance: by turns the search for few micro-batches goes on, and heuristics for all."""
        cut, constraints = _few_of(self._constraints), self._constraints
        few = None if cut is None else _BestSoFar(constraints_of(cut[0]), self._seed, self._end)
        while True:
            if cut is not None and few is not None and not few.proven:
                yield _PART_OF_FEW
                self._work_done += _PART_OF_FEW
                before = few.best
                few.go_on(_PART_OF_FEW)
                if few.best is not None and few.best is not before:
                    yield _WORK_OF_REPEATING * self._work_of_order
                    orders = repeated(constraints, cut[1], few.best.starts, cut[2])
                    for starts in nsmallest(_BEST_OF_FEW, orders, key=max):
                        earliest = self._instance.starts(self._instance.by_start(starts))
                        if earliest is not None:
                            self.offer(constraints.in_turn(earliest))
                        self._offer_each(refined(constraints, starts))
            yield from self._heuristic_step(heuristics, _PART_OF_FEW)

    def _run_round(self, work: float, attempt: FlowAttempt | None) -> None:
        """Looks for an order over by the target and, at the same time, for a higher bound."""
        most = self._most
        target = min(self._target(most), most)
        if attempt:
            work = max(work, attempt.work)
        elif self.least == most:  # A longer round would do the same again, from its beginning.
            work = self._work - self._work_done
        reached, _ = self._run_together(
            work, self._solver(Aim.ANY, target, work, 0), attempt or self._solver(Aim.SHORTEST, most, work, 1)
        )
        self._aimed = target if reached.starts is None else None

    def _run_second_half(self, work: float, number: int, *, shortest: bool) -> None:
        """Looks for shorter orders near the best one; if ``shortest``, with one solver for the shortest of all."""
        solvers = [self._solver(Aim.SHORTEST, self._most, work, 1)] if shortest or self.best is None else []
        if self.best is not None:
            count = 2 - len(solvers)
            solvers += [self._solver(Aim.NEAR, self.best.makespan, work, 2 + number + n) for n in range(count)]
        self._run_together(work, *solvers)

    def _run_together(self, work: float, *solvers: Solver | FlowAttempt) -> list[Solved]:
        """Runs solvers, each in a thread, and keeps what they find; at least a tenth of ``work`` counts as done."""
        seconds = max(0.01, self._end - monotonic())
        with ThreadPoolExecutor(len(solvers)) as pool:
            runs = [pool.submit(solver.run, seconds) for solver in solvers]
            try:
                wait(runs)
            except KeyboardInterrupt:
                for solver in solvers:
                    solver.stop()
                raise
            results = [run.result() for run in runs]
        self._work_done += max(work / 10, *(solved.work for solved in results))
        for solved in results:
            self.raise_bound(solved.bound)
            if solved.starts is not None:
                self.offer(solved.starts)
        return results

    def _solver(self, aim: Aim, most: int, limit: float, added: int) -> Solver:
        hint = self.best.starts if self.best else None
        return Solver(self._constraints, self.least, most, hint, aim, limit=limit, seed=self._seed + added)

    def _target(self, most: int) -> int:
        """The makespan that the next round tries to reach: the bound or, after a round in vain, halfway to ``most``."""
        aimed = self._aimed
        return self.least if aimed is None or aimed >= most - 1 else max(self.least, (aimed + most + 1) // 2)

    @property
    def proven(self) -> bool:
        """Whether it is proven that no order is shorter than the best or, without a best one, that there is none."""
        return self.least > self._most

    def _over(self) -> bool:
        if not self.proven and monotonic() >= self._end:
            self.ended = Ended.CLOCK
            return True
        return self.proven or self._work < self._work_done + self._work_of_step

    @property
    def _most(self) -> int:
        """The longest makespan of use: below the best or, without one, the sum of all durations and delays."""
        if self.best is not None:
            return self.best.makespan - 1
        constraints = self._constraints
        return sum(constraints.durations) + sum(lag for waits in constraints.waits for _, lag in waits)

    def _report(self) -> None:
        if self.best is not None:
            self._tell(self.best.makespan * self._instance.tick, self.least * self._instance.tick)


# The pass that searches for a better order of a schedule's operations: each stays on its worker and in its pipe.

Limits = Mapping[Quantity, int]
"""Limits in micro-batches, by quantity, that hold for every worker in place of the bounds that the text declares."""

_WHY = {
    Ended.PROVEN: "no order is shorter",
    Ended.BUDGET: "the budget was spent",
    Ended.CLOCK: "the time was over, another search may find another order",
    Ended.INTERRUPTED: "interrupted from the keyboard, another search may find another order",
}


ORDER_MARK = "# order of a search: "
"""The words with which a file begins that has an order found by a search."""


@dataclass(frozen=True, slots=True)
class Improvement:
    """A schedule that a search found, not yet verified.

    ``result`` is the result of the search, ``costs`` the costs in words, ``unit`` the unit of the result's times.
    """

    schedule: Schedule
    result: Found
    costs: str
    unit: Unit

    @property
    def words(self) -> str:
        """A line of text: the makespan, how much shorter it could be, and the orders that the search began from."""
        result, show = self.result, self.unit.show
        gap = (
            "proven to be the shortest"
            if result.proven
            else f"at least {show(result.bound)}, gap {percent(result.gap)}"
        )
        fitting = [(time, name) for name, time in result.hints.items() if time is not None]
        hints = ", ".join(f"{name} {show(time)}" for time, name in sorted(fitting))
        return f"{show(result.makespan)}, {gap}{f'; began with {hints}' if hints else ''}"

    @property
    def comments(self) -> str:
        """The lines above the text of the schedule, which say how it was found."""
        header, budget, ended = self.schedule.header, self.result.budget, self.result.ended
        bounds = [f"{bound.quantity.value} <= {_limits(bound)}" for bound in header.bounds]
        lines = (
            f"{ORDER_MARK.removeprefix('# ')}{self.words}",
            f"costs: {self.costs}",
            f"bounds on memory: {', '.join(bounds) or 'none'}",
            f"budget: {budget.seconds:g} s, seed {budget.seed}; it ended because {_WHY[ended]}",
        )
        return "".join(f"# {line}\n" for line in lines)

    @property
    def text(self) -> str:
        """The schedule as text, below the comments."""
        return f"{self.comments}{show(self.schedule)}"

    def as_json(self) -> dict[str, object]:
        """The search's result as plain data for JSON."""
        result = self.result
        return {
            "makespan": float(result.makespan),
            "bound": float(result.bound),
            "gap": float(result.gap),
            "proven": result.proven,
            "ended": result.ended.value,
            "seconds": result.budget.seconds,
            "seed": result.budget.seed,
            "began_with": {name: time if time is None else float(time) for name, time in result.hints.items()},
        }


def with_limits(header: Header, limits: Limits) -> Header:
    """Returns the header with ``limits``, the same for all workers, in place of bounds on the same quantities."""
    others = tuple(bound for bound in header.bounds if bound.quantity not in limits)
    added = tuple(Bound(quantity, (limit,) * header.workers) for quantity, limit in limits.items())
    return replace(header, bounds=others + added)


def improvement(
    schedule: Schedule,
    durations: Durations,
    limits: Limits,
    further: Mapping[str, Schedule],
    budget: SearchBudget,
    tell: Callable[[str], None],
) -> Improvement:
    """Searches for the best order of a verified schedule's operations.

    The search begins with the schedule's own order and with those of the ``further`` schedules, by name, that have the
    same operations on the same workers. ``tell`` gets a line of text for each improvement.

    Raises `WrongOption` if no order that meets the bounds on memory is found.
    """
    header = with_limits(schedule.header, limits)
    instance = instance_of(replace(schedule, header=header), durations)
    hints = {header.scheme: instance.lanes} | {
        name: lanes for name, other in further.items() if (lanes := lanes_of(instance, other)) is not None
    }

    def tell_progress(best: Fraction, bound: Fraction) -> None:
        show = durations.unit.show
        tell(f"best {show(best)}, at least {show(bound)}, gap {percent(1 - bound / best if best else Fraction(0))}")

    try:
        result = search(instance, hints, budget, tell_progress)
    except NoOrder as error:
        raise WrongOption("memory" if limits else "search", f": {_reason(instance, error, budget)}") from error
    kinds = {operation.kind.letter for operation in instance.operations}
    return Improvement(instance.schedule(result.lanes), result, durations.summary(header, kinds), durations.unit)


def lanes_of(instance: OrderInstance, schedule: Schedule) -> Sequence[Sequence[int]] | None:
    """The lanes of another schedule, with its operations as numbers of the instance.

    None if it has other operations than the instance, or has them on other workers.
    """
    places = [instance.places[machine].worker for machine in instance.machines]
    number_of = {operation: number for number, operation in enumerate(instance.operations)}
    if Counter(chain.from_iterable(schedule.lanes)) != Counter(instance.operations):
        return None
    lanes = [[number_of[operation] for operation in lane] for lane in schedule.lanes]
    return lanes if all(places[number] == w for w, lane in enumerate(lanes) for number in lane) else None


def _reason(instance: OrderInstance, error: NoOrder, budget: SearchBudget) -> str:
    needed: dict[str, Fraction] = {}
    for store, amount in error.needed.items():
        name = instance.stores[store].quantity.value
        needed[name] = max(needed.get(name, Fraction(0)), Fraction(amount, instance.header.units_of_m_a))
    least = listed([f"{name} {exact(amount)}" for name, amount in needed.items()])
    remedy = f"one micro-batch after another needs {least}"
    if error.impossible:
        return f"no order keeps the bounds on memory; {remedy}"
    return f"no order that keeps the bounds on memory was found in {budget.seconds:g} s; {remedy}"


def _limits(bound: Bound) -> str:
    return " ".join(map(str, bound.limits if len({*bound.limits}) > 1 else bound.limits[:1]))
