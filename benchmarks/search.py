"""How good the orders of a search are, on 52 instances, beside the best order of the heuristics alone.

    .venv/bin/python benchmarks/search.py [--work 10] [--only WORD] [--markdown PAGE]

Each instance is a library scheme with costs and a limit of activations. The search begins with the scheme's own order
and the others of the library with the same placement. Its budget is work, not time by the clock, so the orders are the
same on every machine; the processor time is that of all threads. The heuristics alone get the same work: list schedules
forwards and backwards in time, with disturbed preferences.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from tables import circumstances, put, table

import chimera_ir
from chimera_ir import comparison
from chimera_ir.cost.durations import Costs
from chimera_ir.ir.levels import Quantity, Schedule
from chimera_ir.orders.dispatch import TimedOrder, improving
from chimera_ir.orders.instance import OrderInstance, constraints_of, instance_of
from chimera_ir.orders.ordering import list_starts
from chimera_ir.orders.search import WORK_OF_OPERATION, Found, SearchBudget, lanes_of, search, with_limits

HOUR = 3600.0


@dataclass(frozen=True)
class Case:
    """A scheme with its parameters, costs by kind, a limit of activations (0: none), factors of stages, weights.

    The factors and the weights, which are those of micro-batches, begin again where there are too few.
    """

    scheme: str
    parameters: Mapping[str, int]
    costs: Mapping[str, int]
    limit: int = 0
    factors: Sequence[int] = (1,)
    weights: Sequence[int] = (1,)

    @property
    def name(self) -> str:
        """The case in a cell of a table."""
        sizes = ",".join(map(str, self.parameters.values()))
        costs = ",".join(map(str, self.costs.values()))
        stages = f" x {','.join(map(str, self.factors))}" if len(self.factors) > 1 else ""
        weights = f" weigh {','.join(map(str, self.weights))}" if len(self.weights) > 1 else ""
        return f"{self.scheme} ({sizes}) {costs}{stages}{weights}{f' M={self.limit}' if self.limit else ''}"

    def instance(self) -> tuple[OrderInstance, Mapping[str, Sequence[Sequence[int]]]]:
        """The instance, and the lanes to begin with."""
        compilation = chimera_ir.compile(self.scheme, **self.parameters)
        schedule = compilation.schedule
        assert isinstance(schedule, Schedule)
        costs = Costs()
        for kind, cost in self.costs.items():
            costs = costs.using(kind, str(cost))
        limits = {Quantity.ACTIVATIONS: self.limit} if self.limit else {}
        bounded = replace(schedule, header=with_limits(schedule.header, limits))
        problem = instance_of(bounded, costs.durations(bounded.header))
        durations = [
            duration
            * self.factors[part.parts[0].stage % len(self.factors)]
            * self.weights[part.parts[0].micros[0] % len(self.weights)]
            for part, duration in zip(problem.operations, problem.durations, strict=True)
        ]
        others = comparison.same_placement(compilation.request, schedule)
        hints = {name: lanes for name, other in others if (lanes := lanes_of(problem, other)) is not None}
        return replace(problem, durations=durations), {self.scheme: problem.lanes} | hints


F1B2, EVEN, UNEVEN, PRIMES = (
    {"F": 1, "B": 2},
    {"F": 1, "I": 1, "W": 1},
    {"F": 2, "I": 3, "W": 2},
    {"F": 31, "I": 47, "W": 22},
)
LATE = {"F": 1, "I": 3, "W": 2}


def split(d: int, n: int, costs: Mapping[str, int], limit: int, factors: Sequence[int] = (1,)) -> Case:
    """A chain with split backwards."""
    return Case("zb_h1", {"D": d, "N": n}, costs, limit, factors)


CASES: Mapping[str, Sequence[Case]] = {
    "chains": (
        Case("dapple", {"D": 8, "N": 32}, F1B2),
        Case("dapple", {"D": 8, "N": 32}, {"F": 4, "B": 7}, 0, (4, 4, 5, 4, 4, 4, 4, 6)),
        Case("dapple", {"D": 8, "N": 16}, F1B2, 8, (3, 2, 2, 2, 2, 2, 2, 4)),
    ),
    "split chains, at least P": (
        *(split(4, 8, costs, 4) for costs in (EVEN, {"F": 2, "I": 2, "W": 1}, UNEVEN, LATE)),
        *(split(8, 32, costs, 8) for costs in (EVEN, UNEVEN, PRIMES, LATE)),
        split(8, 16, PRIMES, 12),
        split(8, 32, UNEVEN, 16),
        split(4, 8, UNEVEN, 4, (3, 4, 4, 6)),
        split(8, 16, UNEVEN, 8, (3, 4, 4, 4, 4, 4, 4, 6)),
        split(8, 32, UNEVEN, 8, (3, 4, 4, 4, 4, 4, 4, 6)),
        split(8, 32, PRIMES, 8, (9, 10, 11, 10, 10, 10, 11, 13)),
    ),
    "split chains, below P": (
        *(split(4, 8, UNEVEN, limit) for limit in (1, 2, 3)),
        split(4, 16, EVEN, 2),
        *(split(8, 16, UNEVEN, limit) for limit in (3, 5)),
        *(split(8, 32, UNEVEN, limit) for limit in (3, 5)),
    ),
    "chains whose micro-batches differ": (
        Case("dapple", {"D": 4, "N": 8}, F1B2, 4, weights=(4, 1, 3, 1, 2, 4, 4, 1)),
        Case("zb_h1", {"D": 4, "N": 8}, UNEVEN, 4, weights=(4, 1, 3, 1, 2, 4, 4, 1)),
        Case("dapple", {"D": 8, "N": 16}, F1B2, 8, weights=(1, 2, 1, 4)),
        Case("dapple", {"D": 8, "N": 16}, F1B2, 8, weights=(2, 1, 3, 1, 4, 4, 4, 4)),
    ),
    "V": (
        *(Case("zb_v", {"P": 4, "N": 8}, EVEN, limit) for limit in (4, 6, 8)),
        Case("zb_v", {"P": 4, "N": 8}, UNEVEN, 8),
        Case("zb_v", {"P": 8, "N": 16}, UNEVEN, 16),
        Case("v_half", {"P": 8, "N": 16}, EVEN, 10),
        Case("v_min", {"P": 8, "N": 16}, EVEN, 8),
    ),
    "waves": (
        Case("waves", {"P": 2, "N": 2}, F1B2),
        Case("waves", {"P": 4, "N": 8}, F1B2),
        Case("waves", {"P": 4, "N": 8}, F1B2, 6),
        Case("waves", {"P": 8, "N": 8}, F1B2),
        Case("waves", {"P": 8, "N": 16}, {"F": 3, "B": 5}),
    ),
    "two directions": (
        Case("chimera", {"D": 4, "N": 8}, F1B2, 4),
        Case("chimera", {"D": 8, "N": 8}, F1B2, 8),
        Case("chimera", {"D": 8, "N": 16}, {"F": 3, "B": 5}, 8),
        Case("chimera", {"D": 8, "N": 16}, F1B2, 6),
        Case("bitpipe", {"P": 4, "N": 8}, F1B2),
    ),
    "unequal stages": (
        split(8, 16, UNEVEN, 8, (4, 4, 4, 6, 4, 4, 4, 3)),
        split(8, 16, PRIMES, 8, (10, 11, 9, 10, 14, 10, 11, 8)),
        Case("zb_v", {"P": 4, "N": 8}, UNEVEN, 8, (4, 4, 4, 4, 4, 4, 4, 6)),
        Case("waves", {"P": 4, "N": 8}, F1B2, 0, (4, 4, 4, 4, 4, 4, 4, 6)),
        Case("chimera", {"D": 4, "N": 8}, F1B2, 4, (4, 4, 4, 6)),
        Case("chimera", {"D": 8, "N": 16}, F1B2, 8, (4, 4, 4, 4, 4, 4, 4, 6)),
    ),
}


def row(case: Case, work: float) -> list[str]:
    """The results of a case."""
    problem, hints = case.instance()
    began = time.process_time()
    found = search(problem, hints, SearchBudget(HOUR, work=work))
    spent = time.process_time() - began
    own = problem.starts(problem.lanes)
    assert own is not None
    makespan = problem.makespan(own)
    fits = "" if problem.fits_stores(problem.lanes) else " (over M)"
    return [case.name, f"{makespan}{fits}", _heuristic(problem, found, work), *_result(problem, found), f"{spent:.1f}"]


def _heuristic(problem: OrderInstance, found: Found, work: float) -> str:
    constraints = constraints_of(problem)
    starts = list_starts(problem)
    orders = chain(
        [] if starts is None else [TimedOrder.by_starts(constraints, starts)],
        improving(constraints, 0, [] if starts is None else [starts]),
    )
    best = None
    for order in islice(orders, max(4, int(work / WORK_OF_OPERATION / len(problem.operations)))):
        if not order.waiting and (best is None or order.makespan < best):
            best = order.makespan
        if best is not None and best * problem.tick <= found.bound:
            break
    return str(best)


def _result(problem: OrderInstance, found: Found) -> Iterator[str]:
    yield from (str(value / problem.tick) for value in (found.makespan, found.bound))
    yield f"{float(found.gap):.1%}" if found.gap else "proven"


def main() -> None:
    """Prints a row for each instance, and writes the table into a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=float, default=10.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    rows = []
    for kind, cases in CASES.items():
        for case in cases:
            if options.only in f"{kind} {case.name}":
                rows.append(row(case, options.work))
                print(*rows[-1], sep=" | ", flush=True)
    heads = ["instance", "its own order", "heuristics", "search", "bound", "gap", "processor time, s"]
    if options.markdown:
        put(options.markdown, "orders", f"{circumstances()}\n\n{table(heads, rows)}")


if __name__ == "__main__":
    main()
