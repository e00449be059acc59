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

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain, pairwise
from math import ceil
from typing import TYPE_CHECKING

from chimera_ir.cost.durations import Durations, number
from chimera_ir.diagnostics.catalogue.program import NoOrderFits, NoOrderFitsHost, NoTurnFound
from chimera_ir.diagnostics.model import Diagnostic, Rejected, raise_errors, reject
from chimera_ir.errors import OptionError
from chimera_ir.flow import live
from chimera_ir.flow.live import leaves
from chimera_ir.ir.levels import Bound, Plan, Quantity, Schedule
from chimera_ir.ir.ops import NOWHERE, Operation, Unclocked
from chimera_ir.ir.streams import LONGEST_TURN, PlanStream, ScheduleStream, stream_of
from chimera_ir.ir.text.printer import line
from chimera_ir.lower.lower import order
from chimera_ir.orders.dispatch import Admission, Greedy, by_place, list_schedule, place
from chimera_ir.orders.instance import (
    UNITS,
    Jobs,
    KeepsChange,
    Lags,
    Machine,
    OrderInstance,
    Store,
    instance_of,
)
from chimera_ir.orders.timetable import shortest
from chimera_ir.plural import counted
from chimera_ir.verify.holdings import in_messages
from chimera_ir.verify.verify import verify_operations, verify_schedule

if TYPE_CHECKING:
    from chimera_ir.flow.engine import IntGraph


# The problem of ordering operations for programs that search: as JSON, as a graph of networkx, and a fast evaluation.
#
# operation     machine   duration   waits for
# 0  F m0 s0       0         1        -
# 1  B m0 s0       0         2        0, 3 with the delay of a message
# 2  F m0 s1       1         1        0 with the delay of a message
# 3  B m0 s1       1         2        2
#
# lanes [[0, 1], [2, 3]]  ->  starts [0, 4, 1, 2], makespan 6

Lanes = Sequence[Sequence[int]]
"""The operations of each worker, by number, in the order in which it runs them."""


@dataclass(frozen=True)
class OrderGraph:
    """The operations of a schedule and all that an order of them must respect; numbers are those of ``instance``.

    Times are in ticks, of which ``tick`` is the length in the unit of the costs. ``lanes`` are the schedule's own.
    Every method that takes lanes raises `OptionError` unless they have every operation once, on its own worker.
    ``unlimited`` are the quantities of memory that are counted although the schedule declares no bound on them.

    Examples
    --------
    >>> from chimera_ir import Compilation
    >>> graph = Compilation.of(Schedule.from_lanes([["F m0 s0", "B m0 s0"], ["F m0 s1", "B m0 s1"]])).graph
    >>> graph.operations, graph.makespan(graph.lanes)
    (('F m0 s0', 'B m0 s0', 'F m0 s1', 'B m0 s1'), 6)
    >>> graph.makespan([(0, 1), (3, 2)])
    >>> graph.makespan([(0, 1), (2,)])
    Traceback (most recent call last):
    ...
    chimera_ir.errors.OptionError: lanes: `B m0 s1` is missing: lanes have every operation once, on its own worker
    """

    instance: OrderInstance
    unlimited: tuple[Quantity, ...] = ()

    @property
    def tick(self) -> Fraction:
        """The length of a tick, in the unit of the costs."""
        return self.instance.tick

    @cached_property
    def operations(self) -> tuple[str, ...]:
        """The line of each operation in IR text."""
        return tuple(line(operation, self.instance.header) for operation in self.instance.operations)

    @property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """The lanes of the schedule that the graph was made of."""
        return self.instance.lanes

    def schedule(self, lanes: Lanes) -> Schedule | ScheduleStream:
        """The schedule in which the workers run these lanes; `Compilation.of` verifies it.

        The header is that of the schedule from which the graph was made. Without a flush, the schedule repeats what the
        lanes have in their middle; lanes that repeat nothing raise `OptionError`.
        """
        shown = self._shown(lanes)
        if not shown.header.asynchronous:
            return shown
        try:
            return stream_of(shown)
        except ValueError as error:
            raise OptionError(f"lanes: {error}") from error

    def _shown(self, lanes: Lanes) -> Schedule:
        self._require_complete(lanes)
        return self.instance.schedule(lanes)

    def by_start(self, starts: Sequence[int]) -> list[list[int]]:
        """The lanes in which the operations of each worker stand in the order of ``starts``, one for each operation."""
        return self.instance.by_start(starts)

    def makespan(self, lanes: Lanes) -> int | None:
        """The end of the last operation, in ticks, if each starts as early as it can; None if lanes close a cycle."""
        ends = self._ends(lanes)
        return None if ends is None else max(ends, default=0)

    def starts(self, lanes: Lanes) -> list[int] | None:
        """The earliest start of each operation, in ticks; None if the lanes close a cycle."""
        ends = self._ends(lanes)
        return ends and [end - duration for end, duration in zip(ends, self.instance.durations, strict=True)]

    def peaks(self, lanes: Lanes) -> list[int]:
        """The most that each store keeps, in parts of M_a (``parts`` in `json`), as the workers run these lanes."""
        self._require_complete(lanes)
        if self.instance.header.moves:
            schedule = self._shown(lanes)
            of = {store.quantity: live.peaks(schedule, *UNITS[store.quantity]) for store in self.instance.stores}
            return [of[store.quantity][store.worker].amount for store in self.instance.stores]
        return self.instance.peaks(lanes)

    def _require_complete(self, lanes: Lanes) -> None:
        if wrong := self._wrong(lanes):
            raise OptionError(f"lanes: {wrong}: lanes have every operation once, on its own worker")

    def _wrong(self, lanes: Lanes) -> str | None:
        """The first mistake in lanes, in words; None if there is none."""
        total, workers = len(self.instance.durations), self.instance.header.workers
        if len(lanes) != workers:
            return f"there are {counted(len(lanes), 'lane')} for {counted(workers, 'worker')}"
        times = [0] * total
        for worker, lane in enumerate(lanes):
            for operation in lane:
                if not 0 <= operation < total:
                    return f"there is no operation {operation}, numbers are 0 to {total - 1}"
                times[operation] += 1
                if (holder := self._places[operation].worker) != worker:
                    return f"`{self.operations[operation]}` of worker {holder} is on worker {worker}"
        if (place := next((n for n, count in enumerate(times) if count != 1), None)) is None:
            return None
        return f"`{self.operations[place]}` is {'there more than once' if times[place] else 'missing'}"

    def _ends(self, lanes: Lanes) -> list[int] | None:
        total, least = sum(map(len, lanes)), min((min(lane) for lane in lanes if lane), default=0)
        if least < 0 or total != len(self.instance.durations) or len(lanes) != self.instance.header.workers:
            self._require_complete(lanes)
        try:
            ends = self.instance.ends(lanes)
        except IndexError:
            ends = None
        # Lanes that do not get all operations through lack some or close a cycle.
        if ends is None or min(ends, default=0) < 0:
            self._require_complete(lanes)
        return ends

    def as_networkx(self) -> "IntGraph":
        """The operations as the nodes of a networkx graph, with an edge from each to those that wait for it.

        A node has its ``operation``, ``worker``, ``resource`` and ``duration``, an edge the ``delay``. The order of the
        lanes is no edge.
        """
        from chimera_ir.flow.engine import digraph

        nodes = (
            {"operation": text, "worker": int(place.worker), "resource": place.resource.value, "duration": duration}
            for text, place, duration in zip(self.operations, self._places, self.instance.durations, strict=True)
        )
        lags = enumerate(self.instance.lags)
        return digraph(nodes, ((other, number, {"delay": delay}) for number, waits in lags for other, delay in waits))

    @cached_property
    def _places(self) -> list[Machine]:
        return [self.instance.places[machine] for machine in self.instance.machines]

    def _limit(self, store: Store) -> int | None:
        return None if store.quantity in self.unlimited else store.limit

    @cached_property
    def json(self) -> str:
        """The graph as JSON, with a line for each operation."""
        instance = self.instance
        head = {
            "schedule": instance.header.title,
            "tick": number(self.tick),
            "parts": instance.header.units_of_m_a,
            "workers": instance.header.workers,
            "machines": [{"worker": worker, "resource": resource.value} for worker, resource in instance.places],
            "stores": [
                {"worker": store.worker, "quantity": store.quantity.value, "limit": self._limit(store)}
                for store in instance.stores
            ],
            "lanes": self.lanes,
            "starts": self.starts(self.lanes),
            "makespan": self.makespan(self.lanes),
        }
        rows = [
            {
                "operation": text,
                "machine": machine,
                "duration": duration,
                "waits": waits,
                "keeps": [dict(zip(("store", "at_start", "at_end"), change, strict=True)) for change in changes],
            }
            for text, machine, duration, waits, changes in zip(
                self.operations, instance.machines, instance.durations, instance.lags, instance.changes, strict=True
            )
        ]
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
        body = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        return "\n".join(["{", *lines, '  "operations": [', body, "  ]", "}"]) + "\n"


def graph_of(schedule: Schedule | ScheduleStream, durations: Durations) -> OrderGraph:
    """The graph of a verified schedule under the costs of operations, in which activations count on each worker.

    Of a stream it has the updates that are shown, from warm-up to drain.
    """
    if isinstance(schedule, ScheduleStream):
        schedule = schedule.view(schedule.updates_shown)
    header = schedule.header
    counted = Quantity.ACTIVATIONS
    if counted in {bound.quantity for bound in header.bounds}:
        return OrderGraph(instance_of(schedule, durations))
    most = header.micro_batches * max(header.stages, ceil(sum(header.shares)))
    header = replace(header, bounds=(*header.bounds, Bound(counted, (most,) * header.workers)))
    instance = instance_of(replace(schedule, header=header), durations)
    return OrderGraph(replace(instance, header=schedule.header), (counted,))


def scheduled(level: Plan | PlanStream, durations: Durations) -> Schedule | ScheduleStream:
    """The schedule of a plan: by clocks, and where operations have none by a list schedule (`ordered`).

    Without a flush, the turn of its steady state is looked for in the list schedule of what the plan shows.

    Raises `Rejected` if operations without clocks are not complete, if no order of them keeps the declared bounds, or
    if their order does not repeat.
    """
    if level.is_clocked:
        return order(level)
    plan = level if isinstance(level, Plan) else level.shown
    raise_errors(verify_operations(order(plan)).diagnostics)
    schedule = ordered(plan, durations)
    return _turns_in(schedule) if plan.header.asynchronous else schedule


def _turns_in(shown: Schedule) -> ScheduleStream:
    """The stream whose turn is the shortest after which all lanes repeat; raises `Rejected` if there is none."""
    for length in range(1, LONGEST_TURN + 1):
        schedule = Schedule(replace(shown.header, period=length * shown.header.period), shown.lanes)
        try:
            stream = stream_of(schedule)
        except ValueError:
            continue
        if not verify_schedule(stream, None).findings.errors:
            return stream
    raise Rejected([NoTurnFound(next((lane[0].origin for lane in shown.lanes if lane), NOWHERE))])


def ordered(plan: Plan, durations: Durations) -> Schedule:
    """The schedule of a complete plan in which each free worker runs what is preferred among what is ready.

    The first of these differences decides which of two operations is preferred: the one with a clock, by its clock; the
    one with a ``prefer`` line, by its value, the smaller first; the one that hands a gradient on; a forward; the
    smaller micro-batch; the deeper stage.

    Raises `Rejected` if a declared bound cannot be kept. Operations that wait for one another in a cycle are last in
    their lanes, where the rule "acyclic" finds them.
    """
    instance = instance_of(plan, durations)
    jobs = jobs_of(instance)
    result = place(jobs, Greedy(jobs, jobs.ranks), jobs.ranks)
    if result.waiting:
        room = Admission(jobs, jobs.ranks)
        reject(_too_tight(instance, room.least))
        result = place(jobs, room, jobs.ranks)
    if _is_free(plan):
        result = shortest(jobs, result)
    started = set(result.started)
    rest = [job for job in sorted(range(len(jobs.ranks)), key=jobs.ranks.__getitem__) if job not in started]
    return instance.schedule(_lanes(instance, jobs, [*result.started, *rest]))


def _lanes(instance: OrderInstance, jobs: Jobs, order: Iterable[int]) -> list[list[int]]:
    lanes: list[list[int]] = [[] for _ in range(jobs.workers)]
    for job in order:
        lanes[jobs.owners[jobs.machines[job]]] += instance.blocks[job]
    return lanes


def list_starts(instance: OrderInstance) -> list[int] | None:
    """The starts in the shortest list schedule, without clocks and ``prefer``; None if all jam, or if memory moves."""
    header = instance.header
    if header.moves:
        return None
    free = replace(instance, lanes=((),) * header.workers, preferences=[None] * len(instance.operations))
    jobs = jobs_of(free)
    result = shortest(jobs, list_schedule(jobs, jobs.ranks))
    if len(result.started) < len(instance.blocks):
        return None
    return instance.starts(_lanes(instance, jobs, result.started))


def _is_free(plan: Plan) -> bool:
    """Whether the compiler may order the operations by any rule: no line of the text has a clock or a preference.

    A plan without a flush, or with moves, is always ordered by the preferences of `ordered`.
    """
    header = plan.header
    return not (header.asynchronous or header.moves) and all(
        isinstance(planned, Unclocked) and planned.preference is None for planned in plan.operations
    )


_TOO_TIGHT = {Quantity.ACTIVATIONS: NoOrderFits, Quantity.HOST: NoOrderFitsHost}


def _too_tight(instance: OrderInstance, least: Sequence[int]) -> Iterator[Diagnostic]:
    """Yields a diagnostic for each bound below the room needed (``least``), at the worker that lacks most."""
    header = instance.header
    for bound in header.bounds:
        amounts = [
            (amount - store.limit, store.worker, amount)
            for store, amount in zip(instance.stores, least, strict=True)
            if store.quantity is bound.quantity and amount > store.limit
        ]
        if amounts:
            _, worker, amount = max(amounts, key=lambda excess: excess[0])
            kept = Fraction(amount, header.units_of_m_a)
            yield _TOO_TIGHT[bound.quantity](bound.origin, worker, in_messages(header, kept), bound.limits[worker], "")


def jobs_of(instance: OrderInstance) -> Jobs:
    """The jobs of an instance: each block, an operation with the recomputations right before it, is one job."""
    blocks = instance.blocks
    job_of = [job for job, block in enumerate(blocks) for _ in block]
    chains = [tuple(dict.fromkeys(job_of[number] for number in lane)) for lane in instance.lanes]
    # A job waits for those that its operations wait for outside their block.
    waits = [
        tuple((job_of[other], lag) for number in block for other, lag in instance.lags[number] if other not in block)
        for block in blocks
    ]
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
        changes=[_changes([instance.changes[number] for number in block]) for block in blocks],
        limits=[store.limit for store in instance.stores],
        begun=begun,
        ranks=_ranks(instance, chains),
    )


def _useful(
    instance: OrderInstance, chains: Sequence[Sequence[int]], job_of: Sequence[int], waits: Sequence[Lags]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields each reload without a clock as a job, with the jobs that must have started before the reload does.

    The reload then runs beside the last operation before its reader, and takes no memory sooner. The jobs are all
    others that the reader waits for and, if the reader has a clock, the operation two places before it in its lane.
    """
    if not instance.header.moves:
        return
    operations, in_chain = instance.operations, {job for jobs in chains for job in jobs}
    lanes = ([job for job in jobs if not operations[instance.blocks[job][-1]].kind.moves] for jobs in chains)
    two_before = {lane[place]: lane[place - 2] for lane in lanes for place in range(2, len(lane))}
    for node, others in enumerate(instance.waits):
        for move in others:
            reader, job = job_of[node], job_of[move]
            if not operations[move].kind.moves or leaves(operations[move]) or job in in_chain:
                continue
            before = [other for other, _ in waits[reader] if other != job]
            before += [two_before[reader]] if reader in two_before else []
            yield job, tuple(dict.fromkeys(before))


def _changes(several: Sequence[Sequence[KeepsChange]]) -> tuple[KeepsChange, ...]:
    """Adds up, for each store, the changes by operations of one block, which follow one another.

    At the start of the block its peak is added, at the end what the operations do not leave there is freed.
    """
    stores: dict[int, tuple[int, int]] = {}
    for changes in several:
        for store, at_start, at_end in changes:
            most, level = stores.get(store, (0, 0))
            most = max(most, level + at_start, level + at_start + at_end)
            stores[store] = most, level + at_start + at_end
    return tuple(KeepsChange(store, most, level - most) for store, (most, level) in stores.items() if most or level)


def _ranks(instance: OrderInstance, chains: Sequence[Sequence[int]]) -> list[int]:
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
    return by_place(sorted(range(len(blocks)), key=keys.__getitem__))


def _urgency(operation: Operation) -> tuple[int, int, int]:
    """Which of two operations is preferred: what hands a gradient on, a forward, the rest; micro-batch; stage."""
    kinds = [part.kind for part in operation.parts]
    answers, opens = any(kind.hands_on and not kind.opens for kind in kinds), any(kind.opens for kind in kinds)
    part = operation.parts[0]
    return 0 if answers else 1 if opens else 2, min(part.micros), part.stage
