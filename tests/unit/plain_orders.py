"""A plain model of the problem of ordering, the oracle of searches and bounds; instances of library schemes."""

from collections import defaultdict
from dataclasses import replace
from random import Random

import chimera_ir
from chimera_ir.cost.durations import Costs
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.memory_bounds import Quantity
from chimera_ir.orders.improve import with_limits
from chimera_ir.orders.instance import Costing, OrderInstance, instance_of


def costs(**by_kind: int) -> Costs:
    made = Costs()
    for kind, cost in by_kind.items():
        made = made.using(kind, str(cost))
    return made


def instance(scheme: str, kinds: Costs, limit: int = 0, **parameters: int) -> OrderInstance:
    schedule = chimera_ir.compile(scheme, **parameters).schedule
    assert isinstance(schedule, Schedule)
    limits = {Quantity.ACTIVATIONS: limit} if limit else {}
    bounded = replace(schedule, header=with_limits(schedule.header, limits))
    return instance_of(bounded, Costing(kinds.durations(bounded.header)))


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
