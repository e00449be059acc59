"""The constraints as a model of CP-SAT: interval variables, no overlap on a machine, holdings as a resource."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from typing import TYPE_CHECKING

from chimera_ir.errors import OptionError
from chimera_ir.orders.instance import Constraints

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntervalVar, IntVar


def require_solver(task: str) -> None:
    """Raises `OptionError`, which names the ``task``, if OR-Tools is not installed."""
    if find_spec("ortools") is None:
        raise OptionError(f"{task} needs OR-Tools, which is not installed: pip install 'chimera_ir[search]'")


@dataclass(frozen=True)
class Solved:
    """The result of a call of the solver: the starts of an order, if one was found, and a lower bound of the makespan.

    ``work`` is the deterministic time that the solver has spent.
    """

    starts: list[int] | None
    bound: int
    work: float


class Aim(Enum):
    """Aim of a solver: any order, the shortest one, or better ones near the order that it begins with.

    Near means by large neighbourhoods: it keeps most of an order, and looks for the best way to do the rest.
    """

    ANY = "any"
    SHORTEST = "shortest"
    NEAR = "near"


class Solver:
    """A search for orders whose makespan is from ``least`` to ``most``, by its ``aim``.

    ``hint`` has the starts of an order to begin with. The search works in one thread, with a ``seed``; within a
    ``limit`` of deterministic time it always finds the same.
    """

    def __init__(
        self,
        constraints: Constraints,
        least: int,
        most: int,
        hint: Sequence[int] | None,
        aim: Aim,
        limit: float,
        seed: int,
    ) -> None:
        from ortools.sat.python import cp_model

        self._model, self._least, self._most = cp_model.CpModel(), least, most
        self._starts, makespan = _variables(self._model, constraints, least, most)
        if aim is not Aim.ANY:
            self._model.minimize(makespan)
        for variable, start in zip(self._starts, hint or (), strict=False):
            self._model.add_hint(variable, start)
        self._solver = cp_model.CpSolver()
        parameters = self._solver.parameters
        parameters.num_workers = 1
        parameters.random_seed = seed
        parameters.max_deterministic_time = limit
        parameters.catch_sigint_signal = False
        parameters.interleave_search = parameters.use_lns_only = aim is Aim.NEAR

    def stop(self) -> None:
        """Ends `run` soon; another thread may call it."""
        self._solver.stop_search()

    def run(self, seconds: float) -> Solved:
        """Searches for an order, and ends after ``seconds`` by the clock at the latest."""
        from ortools.sat.python import cp_model

        self._solver.parameters.max_time_in_seconds = seconds
        status = self._solver.solve(self._model)
        work = self._solver.response_proto.deterministic_time
        if status == cp_model.INFEASIBLE:
            return Solved(None, self._most + 1, work)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Solved(None, self._least, work)
        bound = round(self._solver.best_objective_bound) if self._model.has_objective() else self._least
        return Solved([self._solver.value(start) for start in self._starts], bound, work)


def _variables(model: "CpModel", constraints: Constraints, least: int, most: int) -> "tuple[list[IntVar], IntVar]":
    """Adds the constraints to a model; returns the variables of the operations' starts, and that of the makespan."""
    durations, heads, tails = constraints.durations, constraints.heads, constraints.tails
    numbers = range(len(durations))
    starts = [model.new_int_var(heads[n], most - durations[n] - tails[n], "") for n in numbers]
    makespan = model.new_int_var(least, most, "makespan")
    intervals = [model.new_fixed_size_interval_var(starts[n], durations[n], "") for n in numbers]
    for lane in constraints.by_machine:
        model.add_no_overlap([intervals[number] for number in lane])
    for number, waits in enumerate(constraints.waits):
        for other, lag in waits:
            model.add(starts[number] >= starts[other] + durations[other] + lag)
        model.add(makespan >= starts[number] + durations[number] + tails[number])
    held = defaultdict[int, "tuple[list[IntervalVar], list[int]]"](lambda: ([], []))
    for store, amount, opened, closed in constraints.holdings:
        length = model.new_int_var(0, most, "")
        held[store][0].append(model.new_interval_var(starts[opened], length, starts[closed] + durations[closed], ""))
        held[store][1].append(amount)
    for store, (several, amounts) in held.items():
        model.add_cumulative(several, amounts, constraints.limits[store])
    return starts, makespan
