"""The pass that searches for a better order of a schedule's operations: each stays on its worker and in its pipe."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain

from chimera_ir.cost.durations import Durations
from chimera_ir.cost.number_text import Unit, exact, percent
from chimera_ir.errors import WrongOption
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.memory_bounds import Bound, Quantity
from chimera_ir.ir.streams import ScheduleStream
from chimera_ir.orders.budget import SearchBudget
from chimera_ir.orders.cp_sat import require_solver
from chimera_ir.orders.instance import Costing, OrderInstance, instance_of
from chimera_ir.orders.search import Ended, Found, NoOrder, search
from chimera_ir.plural import listed

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


def searchable(schedule: Callable[[], Schedule | ScheduleStream], *, is_program: bool) -> Schedule:
    """Returns the schedule that ``schedule`` makes, if a search can look for better orders of its operations.

    Raises `WrongOption` if the text is a program (``is_program``) or the schedule is a stream, and as `require_solver`.
    """
    require_solver("a search")
    if is_program:
        raise WrongOption("search", ": the text of a program has its messages in place; search with its schedule")
    made = schedule()
    if isinstance(made, ScheduleStream):
        raise WrongOption("search", ": it searches among the orders of one update, and the scheme has no flush")
    return made


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
    instance = instance_of(replace(schedule, header=header), Costing.of(durations, header))
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
    """Words for why there is no order, and for the bounds on memory with which there is one."""
    needed: dict[str, Fraction] = {}
    for store, amount in error.needed.items():
        name = instance.stores[store].quantity.value
        needed[name] = max(needed.get(name, Fraction(0)), Fraction(amount, instance.header.units))
    least = listed([f"{name} {exact(amount)}" for name, amount in needed.items()])
    remedy = f"one micro-batch after another needs {least}"
    if error.impossible:
        return f"no order keeps the bounds on memory; {remedy}"
    return f"no order that keeps the bounds on memory was found in {budget.seconds:g} s; {remedy}"


def _limits(bound: Bound) -> str:
    return " ".join(map(str, bound.limits if len({*bound.limits}) > 1 else bound.limits[:1]))
