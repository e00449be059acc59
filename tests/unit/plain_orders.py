"""A plain model of the problem of ordering, the oracle of searches and bounds; instances of library schemes."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from random import Random

import chimera_ir
from chimera_ir.cost.durations import Costs
from chimera_ir.flow.engine import ordered
from chimera_ir.ir.levels import Quantity
from chimera_ir.orders.instance import OrderInstance, instance_of
from chimera_ir.orders.search import with_limits
from chimera_ir.source import Source
from chimera_ir.verify.holdings import memory


def costs(**by_kind: int) -> Costs:
    made = Costs()
    for kind, cost in by_kind.items():
        made = made.using(kind, str(cost))
    return made


def instance(scheme: str | Source, kinds: Costs, limit: int = 0, **parameters: int) -> OrderInstance:
    schedule = chimera_ir.compile(scheme, **parameters).schedule
    limits = {Quantity.ACTIVATIONS: limit} if limit else {}
    bounded = replace(schedule, header=with_limits(schedule.header, limits))
    return instance_of(bounded, kinds.durations(bounded.header))


def with_random_durations(problem: OrderInstance, random: Random, most: int) -> OrderInstance:
    """The instance with random durations by stage and kind; of two, one has micro-batches of weight 1 and 2 as well."""
    weights, lengths = random.choice([(1,), (1, 1, 2)]), dict[object, int]()
    weight_of = defaultdict[int, int](lambda: random.choice(weights))
    durations = []
    for operation in problem.operations:
        part = operation.parts[0]
        length = lengths.setdefault((part.kind, part.stage), random.randint(0, most))
        durations.append(length * weight_of[part.micros[0] // problem.header.slices])
    return replace(problem, durations=durations)


def plain_optimum(problem: OrderInstance) -> int:
    """The least makespan by a model with nothing but the problem: no turns, no implied waits, stores as reservoirs."""
    from ortools.sat.python import cp_model

    model, horizon = cp_model.CpModel(), sum(problem.durations)
    starts = [model.new_int_var(0, horizon, "") for _ in problem.durations]
    ends = [start + duration for start, duration in zip(starts, problem.durations, strict=True)]
    lanes = defaultdict(list)
    levels = [(list[object](), list[int]()) for _ in problem.stores]
    for number, machine in enumerate(problem.machines):
        lanes[machine].append(model.new_fixed_size_interval_var(starts[number], problem.durations[number], ""))
        for other, delay in zip(problem.waits[number], problem.delays[number], strict=True):
            model.add(starts[number] >= ends[other] + delay)
        for change in problem.changes[number]:
            times, amounts = levels[change.store]
            times += [starts[number], ends[number]]
            amounts += [change.at_start, change.at_end]
    for lane in lanes.values():
        model.add_no_overlap(lane)
    for store, (times, amounts) in zip(problem.stores, levels, strict=True):
        model.add_reservoir_constraint(times, amounts, 0, store.limit)
    makespan = model.new_int_var(0, horizon, "")
    model.add_max_equality(makespan, ends)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)


def shortest_of_all(problem: OrderInstance) -> int | None:
    """The least makespan of all orders that the rule "memory" allows, each tried; None if it allows none."""
    before, places = _before_in_lane(problem), range(problem.header.workers)
    lanes_of = [[[*lane] for lane in _orders(before[worker]) if _fits(problem, worker, lane)] for worker in places]
    played = (problem.starts(lanes) for lanes in product(*lanes_of))
    return min((problem.makespan(starts) for starts in played if starts is not None), default=None)


def _fits(problem: OrderInstance, worker: int, lane: Sequence[int]) -> bool:
    return not [*memory(problem.schedule([lane if w == worker else [] for w in range(problem.header.workers)]))]


def _before_in_lane(problem: OrderInstance) -> list[dict[int, set[int]]]:
    """For each worker its operations, each with those of the worker that it waits for, directly or through others."""
    reached: dict[int, set[int]] = {}
    for number in ordered(problem.waits):
        reached[number] = set().union(*({other} | reached[other] for other in problem.waits[number]))
    worker_of = [problem.places[machine].worker for machine in problem.machines]
    return [
        {
            number: {other for other in before if worker_of[other] == worker}
            for number, before in sorted(reached.items())
            if worker_of[number] == worker
        }
        for worker in range(problem.header.workers)
    ]


def _orders(before: dict[int, set[int]], *lane: int) -> Iterator[tuple[int, ...]]:
    if len(lane) == len(before):
        yield lane
    for number, others in before.items():
        if number not in lane and others <= {*lane}:
            yield from _orders(before, *lane, number)
