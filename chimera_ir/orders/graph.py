"""The problem of ordering operations for programs that search: as JSON, as a graph of networkx, and a fast evaluation.

operation     machine   duration   waits for
0  F m0 s0       0         1        -
1  B m0 s0       0         2        0, 3 with the delay of a message
2  F m0 s1       1         1        0 with the delay of a message
3  B m0 s1       1         2        2

lanes [[0, 1], [2, 3]]  ->  starts [0, 4, 1, 2], makespan 6
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from operator import add
from typing import TYPE_CHECKING

from chimera_ir.cost.durations import Durations
from chimera_ir.cost.number_text import number
from chimera_ir.errors import OptionError
from chimera_ir.flow import live
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.memory_bounds import Bound, Quantity
from chimera_ir.ir.streams import ScheduleStream, stream_of
from chimera_ir.ir.text.printer import line
from chimera_ir.orders.instance import UNITS, Costing, Machine, OrderInstance, Store, instance_of
from chimera_ir.plural import counted

if TYPE_CHECKING:
    from chimera_ir.flow.graphs import IntGraph

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
        """The most that each store keeps, in parts of micro-batches, as the workers run these lanes."""
        self._require_complete(lanes)
        if self.instance.header.moves:
            schedule = self._shown(lanes)
            of = {store.quantity: live.peaks(schedule, *UNITS[store.quantity]) for store in self.instance.stores}
            return [of[store.quantity][store.worker].amount for store in self.instance.stores]
        amounts, peaks = [0] * len(self.instance.stores), [0] * len(self.instance.stores)
        changes = self.instance.changes
        for lane in lanes:
            for operation in lane:
                for store, at_start, at_end in changes[operation]:
                    amounts[store] += at_start
                    peaks[store] = max(peaks[store], amounts[store])
                    amounts[store] += at_end
                    peaks[store] = max(peaks[store], amounts[store])
        return peaks

    @cached_property
    def _waits(self) -> list[tuple[tuple[int, int], ...]]:
        """The operations that each one waits for, each with its delay."""
        pairs = zip(self.instance.waits, self.instance.delays, strict=True)
        return [tuple(zip(others, delays, strict=True)) for others, delays in pairs]

    def _require_complete(self, lanes: Lanes) -> None:
        """Raises `OptionError` unless the lanes have every operation once, on its own worker."""
        if wrong := self._wrong(lanes):
            raise OptionError(f"lanes: {wrong}: lanes have every operation once, on its own worker")

    def _wrong(self, lanes: Lanes) -> str | None:
        """Returns the first mistake in lanes in words, such as that an operation is missing; None if there is none."""
        total, workers = len(self.instance.durations), self.instance.header.workers
        if len(lanes) != workers:
            return f"there are {counted(len(lanes), 'lane')} for {counted(workers, 'worker')}"
        times = [0] * total
        for worker, lane in enumerate(lanes):
            for operation in lane:
                if not 0 <= operation < total:
                    return f"there is no operation {operation}, numbers are 0 to {total - 1}"
                times[operation] += 1
                if (holder := self._workers[self.instance.machines[operation]]) != worker:
                    return f"`{self.operations[operation]}` of worker {holder} is on worker {worker}"
        if (place := next((n for n, count in enumerate(times) if count != 1), None)) is None:
            return None
        return f"`{self.operations[place]}` is {'there more than once' if times[place] else 'missing'}"

    @cached_property
    def _workers(self) -> list[int]:
        """The worker of each machine."""
        return [place.worker for place in self.instance.places]

    def _ends(self, lanes: Lanes) -> list[int] | None:
        """The end of each operation, in time linear in the waits; None if the lanes close a cycle."""
        if self.instance.header.moves:  # lanes wait for them
            self._require_complete(lanes)
            starts = self.instance.starts(lanes)
            return starts and list(map(add, starts, self.instance.durations))
        total = sum(map(len, lanes))
        least = min((min(lane) for lane in lanes if lane), default=0)
        if least < 0 or total != len(self.instance.durations) or len(lanes) != self.instance.header.workers:
            self._require_complete(lanes)
        try:
            ends = self._played(lanes)
        except IndexError:
            ends = None
        # Lanes that do not get all operations through lack some or close a cycle.
        if ends is None or min(ends, default=0) < 0:
            self._require_complete(lanes)
        return ends

    def _played(self, lanes: Lanes) -> list[int] | None:
        """Runs the lanes; returns the end of each operation, -1 for one that no lane has.

        None if an operation waits for ever, or is on another worker than its own.
        """
        waits, machines, durations = self._waits, self.instance.machines, self.instance.durations
        owners = self._workers
        ends = [-1] * len(durations)
        # Machine w is the lane of worker w. An operation on another machine also follows the last one in the lane.
        free = [0] * len(self.instance.places)
        places = [0] * len(lanes)
        sleepers: dict[int, list[int]] = {}
        awake = list(range(len(lanes)))
        while awake:
            worker = awake.pop()
            lane = lanes[worker]
            for place in range(places[worker], len(lane)):
                operation = lane[place]
                machine = machines[operation]
                if machine == worker:
                    start = free[worker]
                elif owners[machine] == worker:
                    start = max(free[worker], free[machine])
                else:
                    return None
                for other, delay in waits[operation]:
                    end = ends[other]
                    if end < 0:  # the lane sleeps until the other operation is over
                        sleepers.setdefault(other, []).append(worker)
                        places[worker] = place
                        break
                    if end + delay > start:
                        start = end + delay
                else:
                    free[machine] = ends[operation] = start + durations[operation]
                    if operation in sleepers:
                        awake += sleepers.pop(operation)
                    continue
                break
        return None if sleepers else ends

    def as_networkx(self) -> "IntGraph":
        """The operations as the nodes of a networkx graph, with an edge from each to those that wait for it.

        A node has its ``operation``, ``worker``, ``resource`` and ``duration``, an edge the ``delay``. The order of the
        lanes is no edge.
        """
        from chimera_ir.flow.graphs import digraph

        nodes = (
            {"operation": text, "worker": int(place.worker), "resource": place.resource.value, "duration": duration}
            for text, place, duration in zip(self.operations, self._places, self.instance.durations, strict=True)
        )
        edges = ((other, number, delay) for number, waits in enumerate(self._waits) for other, delay in waits)
        return digraph(nodes, edges)

    @property
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
            "parts": instance.header.units,
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
                self.operations, instance.machines, instance.durations, self._waits, instance.changes, strict=True
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
    costing = Costing.of(durations, header)
    counted = Quantity.ACTIVATIONS
    if counted in {bound.quantity for bound in header.bounds}:
        return OrderGraph(instance_of(schedule, costing))
    most = header.micro_batches * header.stages
    header = replace(header, bounds=(*header.bounds, Bound(counted, (most,) * header.workers)))
    instance = instance_of(replace(schedule, header=header), costing)
    return OrderGraph(replace(instance, header=schedule.header), (counted,))
