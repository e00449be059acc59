"""The pass from operations without clocks to lanes: a list schedule under costs and declared bounds.

F m0 s0 on w0            worker 0:       worker 1:
F m0 s1 on w1              F m0 s0         F m0 s1
F m1 s0 on w0              F m1 s0         B m0 s1
F m1 s1 on w1              B m0 s0         F m1 s1
B m0 s0 on w0              B m1 s0         B m1 s1
B m0 s1 on w1
B m1 s0 on w0
B m1 s1 on w1
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain, pairwise
from math import ceil

from chimera_ir.diagnostics.catalogue.program import NoOrderFits, NoOrderFitsHost, NoTurnFound
from chimera_ir.diagnostics.model import Diagnostic, Rejected, raise_errors, reject
from chimera_ir.flow.host_moves import leaves
from chimera_ir.ir.levels import Plan, Schedule
from chimera_ir.ir.memory_bounds import Quantity
from chimera_ir.ir.ops import NOWHERE, Operation
from chimera_ir.ir.planned import Unclocked
from chimera_ir.ir.streams import LONGEST_TURN, PlanStream, ScheduleStream, stream_of
from chimera_ir.lower.order import order
from chimera_ir.orders.instance import Costing, KeepsChange, OrderInstance, instance_of
from chimera_ir.orders.list_schedule import Greedy, Jobs, Keeps, place
from chimera_ir.orders.reserve import Admission, list_schedule
from chimera_ir.orders.shortest import shortest
from chimera_ir.verify.verify import verify_operations, verify_schedule


def scheduled(level: Plan | PlanStream, costing: Costing) -> Schedule | ScheduleStream:
    """The schedule of a plan: by clocks, and where operations have none by a list schedule (`ordered`).

    Without a flush, the turn of its steady state is looked for in the list schedule of what the plan shows.

    Raises `Rejected` if operations without clocks are not complete, if no order of them keeps the declared bounds, or
    if their order does not repeat.
    """
    if level.is_clocked if isinstance(level, PlanStream) else not level.unclocked:
        return order(level)
    plan = level if isinstance(level, Plan) else level.shown
    raise_errors(verify_operations(order(plan)).diagnostics)
    schedule = ordered(plan, costing)
    return _turns_in(schedule) if plan.header.asynchronous else schedule


def _turns_in(shown: Schedule) -> ScheduleStream:
    """The stream whose first updates are shown; its turn is the shortest after which all lanes repeat.

    Raises `Rejected` if there is none.
    """
    for length in range(1, LONGEST_TURN + 1):
        schedule = Schedule(replace(shown.header, period=length * shown.header.period), shown.lanes)
        try:
            stream = stream_of(schedule)
        except ValueError:
            continue
        if not verify_schedule(stream, None).findings.errors:
            return stream
    raise Rejected([NoTurnFound(next((lane[0].origin for lane in shown.lanes if lane), NOWHERE))])


def ordered(plan: Plan, costing: Costing) -> Schedule:
    """The schedule of a complete plan in which each free worker runs what is preferred among what is ready.

    The first of these differences decides which of two operations is preferred: the one with a clock, by its clock; the
    one with a ``prefer`` line, by its value, the smaller first; the one that hands a gradient on; a forward; the
    smaller micro-batch; the deeper stage.

    Raises `Rejected` if a declared bound cannot be kept. Operations that wait for one another in a cycle are last in
    their lanes, where the rule "acyclic" finds them.
    """
    instance = instance_of(plan, costing)
    jobs = jobs_of(instance)
    result = place(jobs, Greedy(jobs))
    if result.waiting:
        room = Admission(jobs)
        reject(_too_tight(instance, room.least))
        result = place(jobs, room)
    if _is_free(plan):
        result = shortest(jobs, result)
    started = set(result.started)
    rest = [job for job in sorted(range(len(jobs.ranks)), key=jobs.ranks.__getitem__) if job not in started]
    lanes: list[list[int]] = [[] for _ in range(plan.header.workers)]
    for job in chain(result.started, rest):
        lanes[jobs.owners[jobs.machines[job]]] += instance.blocks[job]
    return instance.schedule(lanes)


def list_starts(instance: OrderInstance) -> list[int] | None:
    """The start of each operation, in ticks, in the shortest list schedule that is found.

    Clocks and ``prefer`` lines do not count. None if every list schedule jams, or if memory moves.
    """
    header = instance.header
    if header.moves:
        return None
    free = replace(instance, lanes=((),) * header.workers, preferences=[None] * len(instance.operations))
    jobs = jobs_of(free)
    result = shortest(jobs, list_schedule(jobs))
    if len(result.started) < len(instance.blocks):
        return None
    lanes: list[list[int]] = [[] for _ in range(header.workers)]
    for job in result.started:
        lanes[jobs.owners[jobs.machines[job]]] += instance.blocks[job]
    return instance.starts(lanes)


def _is_free(plan: Plan) -> bool:
    """Whether the compiler may order the operations by any rule: no line of the text has a clock or a preference.

    A plan without a flush, or with moves, may not: it is always ordered by the preferences of `ordered`.
    """
    header = plan.header
    return not (header.asynchronous or header.moves) and all(
        isinstance(planned, Unclocked) and planned.preference is None for planned in plan.operations
    )


_TOO_TIGHT = {Quantity.ACTIVATIONS: NoOrderFits, Quantity.HOST: NoOrderFitsHost}


def _too_tight(instance: OrderInstance, least: Sequence[int]) -> Iterator[Diagnostic]:
    """Yields a diagnostic for each bound that is below the room needed (``least``), at the worker that lacks most."""
    header = instance.header
    for bound in header.bounds:
        amounts = [
            (amount - store.limit, store.worker, amount)
            for store, amount in zip(instance.stores, least, strict=True)
            if store.quantity is bound.quantity and amount > store.limit
        ]
        if amounts:
            _, worker, amount = max(amounts, key=lambda excess: excess[0])
            whole = ceil(Fraction(amount, header.units))
            yield _TOO_TIGHT[bound.quantity](bound.origin, worker, whole, bound.limits[worker], "")


def jobs_of(instance: OrderInstance) -> Jobs:
    """The jobs of an instance: each block, an operation with the recomputations right before it, is one job."""
    blocks = instance.blocks
    job_of = [job for job, block in enumerate(blocks) for _ in block]
    chains = [tuple(dict.fromkeys(job_of[number] for number in lane)) for lane in instance.lanes]
    waits = [_outside(instance.waits, block, job_of) for block in blocks]
    begun: list[tuple[int, ...]] = [()] * len(blocks)
    for earlier, later in chain.from_iterable(map(pairwise, chains)):
        begun[later] = (earlier,)
    for reload, others in _useful(instance, chains, job_of, waits):
        begun[reload] = others
    return Jobs(
        owners=[machine.worker for machine in instance.places],
        workers=instance.header.workers,
        machines=[instance.machines[block[-1]] for block in blocks],
        durations=[sum(instance.durations[number] for number in block) for block in blocks],
        waits=waits,
        delays=[_outside_delays(instance, block) for block in blocks],
        changes=[_changes([instance.changes[number] for number in block]) for block in blocks],
        limits=[store.limit for store in instance.stores],
        begun=begun,
        ranks=_ranks(instance, chains),
    )


def _useful(
    instance: OrderInstance, chains: Sequence[Sequence[int]], job_of: Sequence[int], waits: Sequence[Sequence[int]]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields each reload without a clock as a job, with the jobs that must have started before the reload does.

    The reload then runs beside the last operation before its reader, the operation that reads what the reload brings
    back, and takes no memory sooner. The jobs are all others that the reader waits for. If the reader has a
    clock, the operation two places before the reader in its lane is one of them.
    """
    if not instance.header.moves:
        return
    operations, in_chain = instance.operations, {job for jobs in chains for job in jobs}
    lanes = ([job for job in jobs if not operations[instance.blocks[job][-1]].kind.moves] for jobs in chains)
    two_before = {lane[place]: lane[place - 2] for lane in lanes for place in range(2, len(lane))}
    for number, others in enumerate(instance.waits):
        for move in others:
            reader, job = job_of[number], job_of[move]
            if not operations[move].kind.moves or leaves(operations[move]) or job in in_chain:
                continue
            before = [other for other in waits[reader] if other != job]
            before += [two_before[reader]] if reader in two_before else []
            yield job, tuple(dict.fromkeys(before))


def _outside(waits: Sequence[tuple[int, ...]], block: tuple[int, ...], job_of: Sequence[int]) -> list[int]:
    """The jobs that a block waits for: one for each wait of its operations for an operation outside the block."""
    return [job_of[other] for number in block for other in waits[number] if other not in block]


def _outside_delays(instance: OrderInstance, block: tuple[int, ...]) -> list[int]:
    return [
        delay
        for number in block
        for other, delay in zip(instance.waits[number], instance.delays[number], strict=True)
        if other not in block
    ]


def _changes(several: Sequence[Sequence[KeepsChange]]) -> tuple[Keeps, ...]:
    """Adds up, for each store, the changes by operations of one block, which follow one another.

    Returns (store, added at the start, added at the end). At the start of the block its peak is added: the most that
    the operations keep on the way. At the end what they do not leave there is freed.
    """
    stores: dict[int, tuple[int, int]] = {}
    for changes in several:
        for store, at_start, at_end in changes:
            most, level = stores.get(store, (0, 0))
            most = max(most, level + at_start, level + at_start + at_end)
            stores[store] = most, level + at_start + at_end
    return tuple((store, most, level - most) for store, (most, level) in stores.items() if most or level)


def _ranks(instance: OrderInstance, chains: Sequence[Sequence[int]]) -> list[int]:
    """The place of each job in the order of preference (`ordered`)."""
    blocks, operations = instance.blocks, instance.operations
    in_chain = {job: number for chain in chains for number, job in enumerate(chain)}
    keys: list[tuple[int, ...]] = []
    for job, block in enumerate(blocks):
        preference = instance.preferences[block[-1]]
        of_kind, micro, stage = _urgency(operations[block[-1]])
        if job in in_chain:
            keys.append((0, in_chain[job], 0, 0, 0, job))
        elif preference is not None:
            keys.append((1, preference, of_kind, micro, -stage, job))
        else:
            keys.append((2, of_kind, micro, -stage, 0, job))
    ranks = [0] * len(blocks)
    for rank, job in enumerate(sorted(range(len(blocks)), key=keys.__getitem__)):
        ranks[job] = rank
    return ranks


def _urgency(operation: Operation) -> tuple[int, int, int]:
    """Returns what decides which of two operations is preferred: a number for the kind, the micro-batch, the stage.

    The number is 0 for an operation that hands a gradient on, 1 for another forward, 2 for any other operation; the
    smaller one is preferred, and so is the smaller micro-batch.
    """
    kinds = [part.kind for part in operation.parts]
    answers, opens = any(kind.hands_on and not kind.opens for kind in kinds), any(kind.opens for kind in kinds)
    part = operation.parts[0]
    return 0 if answers else 1 if opens else 2, min(part.micros), part.stage
