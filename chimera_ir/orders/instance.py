"""The problem of ordering operations: durations, waits with the delays of messages, and what operations keep.

An instance is made of a plan or of a schedule, and of costs. Its operations are numbered. Times are in whole ticks;
amounts of memory are in units of which a micro-batch has `Header.units`.

F m0 s0     machine 0   1 tick    waits for -                               keeps +1 from its start
F m0 s1     machine 1   1 tick    waits for F m0 s0, 3 ticks after its end  keeps +1 from its start
B m0 s1     machine 1   2 ticks   waits for F m0 s1                         keeps -1 from its end
B m0 s0     machine 0   2 ticks   waits for F m0 s0, B m0 s1 (3 ticks)      keeps -1 from its end
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from math import ceil, gcd, lcm
from typing import TYPE_CHECKING, NamedTuple

from chimera_ir.cost.durations import Costs, Durations, duration_key
from chimera_ir.flow.engine import play
from chimera_ir.flow.flow import ABSENT, Flow
from chimera_ir.flow.host_moves import MoveStep, leaves, waited
from chimera_ir.flow.live import changes, is_at_end
from chimera_ir.flow.net import newest, queued
from chimera_ir.ir.ids import WeightGroup, Worker
from chimera_ir.ir.kinds import ON_HOST_UNITS, ON_WORKER, Resource
from chimera_ir.ir.levels import Header, Plan, Schedule
from chimera_ir.ir.memory_bounds import Quantity
from chimera_ir.ir.ops import Message, Operation, singles
from chimera_ir.ir.planned import Planned, Unclocked
from chimera_ir.ir.recomputation import in_blocks, in_full

if TYPE_CHECKING:
    from chimera_ir.predict.charges import Charges

UNITS = {
    Quantity.ACTIVATIONS: ON_WORKER,
    Quantity.HOST: ON_HOST_UNITS,
}
"""Maps the quantity of a declared bound to what counts against it.

Only those quantities are here that follow from the order of a schedule's operations.
"""

_FINEST = 10**9
"""Ticks per second, or a multiple of it, where messages take time: delays are rounded up to a tick."""


class Machine(NamedTuple):
    """A resource of a worker, which runs one operation at a time."""

    worker: Worker
    resource: Resource


class Store(NamedTuple):
    """A declared bound of a worker: the most that it may keep of a quantity.

    ``limit`` is in units of which a micro-batch has `Header.units`.
    """

    worker: Worker
    quantity: Quantity
    limit: int


class KeepsChange(NamedTuple):
    """The change by an operation to what a store keeps: what it adds at its start, and what it adds at its end.

    ``store`` is the store's number; an amount that is freed is negative.
    """

    store: int
    at_start: int
    at_end: int


class Costing(NamedTuple):
    """The costs under which operations are ordered: ``durations`` of operations, ``charges`` of messages.

    Without ``charges`` messages take no time.
    """

    durations: Durations
    charges: "Charges | None" = None

    @staticmethod
    def of(durations: Durations, header: Header) -> "Costing":
        """The costing with these ``durations``: if they are those of a profile, messages of its cluster take time."""
        if isinstance(durations, Costs):
            return Costing(durations)
        from chimera_ir.predict.charges import Charges
        from chimera_ir.predict.measured import Measured

        return Costing(durations, Charges(header, durations.setting) if isinstance(durations, Measured) else None)


@dataclass(frozen=True, repr=False)
class OrderInstance:
    """The operations of a schedule, and what any order of them must respect.

    ``machines[n]`` is the machine of operation n, by number in ``places``; the operation takes ``durations[n]`` ticks,
    each of length ``tick``. It may start ``delays[n][i]`` ticks after the end of operation ``waits[n][i]``, for every
    i. ``steps[n]`` are its computations and the waits for moves: an offload has the wait for itself, an operation that
    reads what reloads bring back has the waits for these reloads. ``changes[n]`` are the changes by these steps to the
    ``stores``. ``lanes[w]`` has the operations of worker w that have clocks, in the order of the clocks. ``blocks`` has
    each operation of a plan with the recomputations that the plan leaves out, which come right before it; a search may
    move the recomputations. ``preferences[n]`` is the value of the plan's ``prefer`` line for operation n, if any.
    """

    header: Header
    operations: tuple[Operation, ...]
    blocks: Sequence[tuple[int, ...]]
    places: tuple[Machine, ...]
    machines: Sequence[int]
    tick: Fraction
    durations: Sequence[int]
    waits: Sequence[tuple[int, ...]]
    delays: Sequence[tuple[int, ...]]
    stores: tuple[Store, ...]
    steps: Sequence[tuple[MoveStep, ...]]
    changes: Sequence[tuple[KeepsChange, ...]]
    lanes: tuple[tuple[int, ...], ...]
    preferences: Sequence[int | None]

    @property
    def in_longest_ticks(self) -> "OrderInstance":
        """The instance with the longest tick of which all durations and delays are multiples."""
        unit = gcd(*{*self.durations, *chain.from_iterable(self.delays)}) or 1
        return replace(
            self,
            tick=self.tick * unit,
            durations=[duration // unit for duration in self.durations],
            delays=[tuple(delay // unit for delay in delays) for delays in self.delays],
        )

    def schedule(self, lanes: Sequence[Sequence[int]]) -> Schedule:
        """The schedule in which worker w runs the operations ``lanes[w]``, by number; it is yet to be verified."""
        ordered = [[self.operations[number] for number in lane] for lane in lanes]
        return Schedule(self.header, in_full(self.header, ordered))

    def by_start(self, starts: Sequence[int]) -> list[list[int]]:
        """The operations of each worker in the order of their starts.

        Of equal starts, what takes no time comes first, then moves, which a lane only launches.
        """
        lanes: list[list[int]] = [[] for _ in range(self.header.workers)]
        lane_only = [not operation.kind.moves for operation in self.operations]
        durations = self.durations
        for number in sorted(
            range(len(starts)), key=lambda n: (starts[n], durations[n] > 0, lane_only[n], durations[n])
        ):
            lanes[self.places[self.machines[number]].worker].append(number)
        return lanes

    def starts(self, lanes: Sequence[Sequence[int]]) -> list[int] | None:
        """The earliest start of each operation, in ticks, with these lanes; None if they close a cycle.

        An operation waits for those in ``waits`` and, in its lane, for those before it that `flow.net.queued` gives.
        """
        waits = list(self.waits)
        after = [list(delays) for delays in self.delays]
        for number, others in self._queued(lanes):
            waits[number] = (*waits[number], *others)
            after[number] += [0] * len(others)
        played = play(lanes, self.waits)
        if len(played.order) < len(self.operations):
            return None
        starts = [0] * len(self.operations)
        ends = [0] * len(self.operations)
        for number in played.order:
            begun = [ends[other] + delay for other, delay in zip(waits[number], after[number], strict=True)]
            starts[number] = max(begun, default=0)
            ends[number] = starts[number] + self.durations[number]
        return starts

    def makespan(self, starts: Sequence[int]) -> int:
        """The end of the last operation, in ticks."""
        return max(map(sum, zip(starts, self.durations, strict=True)), default=0)

    def _queued(self, lanes: Sequence[Sequence[int]]) -> Iterator[tuple[int, tuple[int, ...]]]:
        for lane in lanes:
            if lane:
                yield from zip(
                    lane, queued(self.header, [self.operations[number] for number in lane], lane), strict=True
                )


def instance_of(level: Plan | Schedule, costing: Costing) -> OrderInstance:
    """The instance of a complete level; operations keep the order of the plan, or of the lanes.

    Raises `KeyError` if an operation is missing that another one needs: the level was not verified.
    """
    if isinstance(level, Schedule):
        blocks = in_blocks(level.header, list(chain.from_iterable(level.lanes)))
        workers = [Worker(w) for w, lane in enumerate(level.lanes) for _ in lane]
        return _instance(level.header, blocks, workers, range(len(blocks)), costing)
    blocks = in_blocks(level.header, [planned.operation for planned in level.operations])
    # At equal clocks, moves are launched first, as `lower.order` says.
    clocks = [
        ((planned.clock, not planned.operation.kind.moves), n)
        for n, planned in enumerate(level.operations)
        if isinstance(planned, Planned)
    ]
    workers = [planned.worker for planned in level.operations]
    instance = _instance(level.header, blocks, workers, [place for _, place in sorted(clocks)], costing)
    preferences = [
        planned.preference if isinstance(planned, Unclocked) else None
        for planned, block in zip(level.operations, blocks, strict=True)
        for _ in block
    ]
    return replace(instance, preferences=preferences)


def _instance(
    header: Header,
    blocks: Sequence[tuple[Operation, ...]],
    workers_of_blocks: Sequence[Worker],
    by_clock: Iterable[int],
    costing: Costing,
) -> OrderInstance:
    """Makes the instance of the operations in ``blocks``; the workers of the blocks are ``workers_of_blocks``.

    ``by_clock`` has the places of the blocks with clocks, in the order of the clocks.
    """
    operations = tuple(chain.from_iterable(blocks))
    workers = [worker for worker, block in zip(workers_of_blocks, blocks, strict=True) for _ in block]
    numbers = iter(range(len(operations)))
    numbered = [tuple(next(numbers) for _ in block) for block in blocks]
    lanes: list[list[int]] = [[] for _ in range(header.workers)]
    for place in by_clock:
        lanes[workers_of_blocks[place]] += numbered[place]
    # A backward reads what a reload brings back, so moves are entered last: of two makers the later one counts.
    by_kind = sorted(enumerate(operations), key=lambda numbered: numbered[1].kind.moves) if header.moves else None
    waits = list(map(Flow(header, by_kind or enumerate(operations)).needs, operations))
    if ABSENT in chain.from_iterable(waits):
        raise KeyError("an operation is missing; only a complete level can be ordered")
    if header.steps_inside:
        waits = [
            tuple(dict.fromkeys((*reads, *steps)))
            for reads, steps in zip(waits, _steps(header, operations), strict=True)
        ]
    places = {Machine(Worker(w), Resource.LANE): w for w in range(header.workers)}
    machines = [
        places.setdefault(Machine(worker, operation.kind.occupies), len(places))
        for worker, operation in zip(workers, operations, strict=True)
    ]
    tick, durations = _ticks(header, operations, costing)
    stores = tuple(
        Store(Worker(worker), bound.quantity, int(limit * header.units))
        for bound in header.bounds
        if bound.quantity in UNITS
        for worker, limit in enumerate(bound.limits)
    )
    steps = _move_steps(operations, waits) if header.moves else [operation.parts for operation in operations]
    return OrderInstance(
        header=header,
        operations=operations,
        blocks=numbered,
        places=tuple(places),
        machines=machines,
        tick=tick,
        durations=durations,
        waits=waits,
        delays=_delays(header, operations, workers, waits, costing, tick),
        stores=stores,
        steps=steps,
        changes=_changes(header, steps, workers, stores),
        lanes=tuple(map(tuple, lanes)),
        preferences=[None] * len(operations),
    )


def _steps(header: Header, operations: Sequence[Operation]) -> Iterator[tuple[int, ...]]:
    """Yields for each operation of a stream the operations that must be over instead of the step that it needs.

    The lanes have no steps; the step would come after the operations that add to the gradients of its update.
    """
    adding: dict[tuple[WeightGroup, int], list[int]] = {}
    for number, operation in enumerate(singles(operations)):
        if operation.kind.sums:
            for group in header.groups_with[operation.stage]:
                adding.setdefault((group, header.update_of(operation.micros)), []).append(number)
    for operation in singles(operations):
        groups, update = header.groups_with[operation.stage], newest(header, operation) - 1
        yield tuple(chain.from_iterable(adding.get((group, update), ()) for group in groups))


def _move_steps(operations: Sequence[Operation], waits: Sequence[Sequence[int]]) -> list[tuple[MoveStep, ...]]:
    """Lists for each operation the waits for moves that the lane makes with it, and its own computations, in order.

    These lists are ``steps`` of `OrderInstance`. A wait for a reload comes before the reader, a wait for an offload
    after the offload.
    """
    out = {number for number, operation in enumerate(operations) if operation.kind.moves and leaves(operation)}
    steps: list[tuple[MoveStep, ...]] = []
    for number, (operation, others) in enumerate(zip(operations, waits, strict=True)):
        before = (other for other in others if operations[other].kind.moves and other not in out)
        after = [number] if number in out else []
        steps.append((*waited(operations, before), *operation.parts, *waited(operations, after)))
    return steps


def _ticks(header: Header, operations: Iterable[Operation], costing: Costing) -> tuple[Fraction, Sequence[int]]:
    """The tick, of which every duration is a multiple, and the duration of every operation in ticks."""
    tick = costing.durations.tick(header)
    if costing.charges is not None:
        tick = Fraction(1, lcm(tick.denominator, _FINEST))
    lengths: dict[object, int] = {}

    def length(operation: Operation) -> int:
        key = duration_key(operation, header)
        if key not in lengths:
            lengths[key] = int(costing.durations.duration(operation, header) / tick)
        return lengths[key]

    return tick, list(map(length, operations))


def _delays(
    header: Header,
    operations: Sequence[Operation],
    workers: Sequence[Worker],
    waits: Sequence[tuple[int, ...]],
    costing: Costing,
    tick: Fraction,
) -> Sequence[tuple[int, ...]]:
    """The delay of each wait in ticks: the time of the longest message between the two, rounded up."""
    charges = costing.charges
    if charges is None:
        none = [(0,) * count for count in range(1 + max(map(len, waits), default=0))]
        return [none[len(others)] for others in waits]
    message_time = _message_time(header, charges)
    ticks: dict[object, int] = {}

    def delay(other: int, number: int) -> int:
        source, target = workers[other], workers[number]
        if source == target:
            return 0
        before, after = operations[other], operations[number]
        key = source, target, duration_key(before, header), duration_key(after, header)
        if key not in ticks:
            ticks[key] = ceil(message_time(before, after, source, target) / tick)
        return ticks[key]

    return [tuple(delay(other, number) for other in others) for number, others in enumerate(waits)]


def _message_time(header: Header, charges: "Charges") -> Callable[[Operation, Operation, Worker, Worker], Fraction]:
    """The function that gives the time of the longest message from an operation to one of another worker."""

    def between(before: Operation, after: Operation, source: Worker, target: Worker) -> Fraction:
        link = charges.link(source, target)
        times = [
            Fraction(link.message(charges.size(Message(part.micros, part.stage, reader, value))))
            for part in before.parts
            for value in part.kind.hands_on
            for reader in header.readers(value, part.stage)
            if any(reader == other.stage and value in other.kind.reads for other in after.parts)
        ]
        return max(times, default=Fraction(0))

    return between


def _changes(
    header: Header,
    steps: Sequence[tuple[MoveStep, ...]],
    workers: Sequence[Worker],
    stores: Sequence[Store],
) -> Sequence[tuple[KeepsChange, ...]]:
    """Computes for each operation, from its steps, the changes to the stores of its worker."""
    quantities = tuple(dict.fromkeys(store.quantity for store in stores))
    if not quantities:
        return [()] * len(steps)
    store_of = {(store.worker, store.quantity): number for number, store in enumerate(stores)}
    effects: dict[object, tuple[KeepsChange, ...]] = {}

    def of_worker(several: tuple[MoveStep, ...], worker: Worker) -> tuple[KeepsChange, ...]:
        kinds = tuple((type(step), step.kind, len(step.micros), step.micros[0] % header.slices) for step in several)
        key = worker, kinds
        if key not in effects:
            amounts = {quantity: [0, 0] for quantity in quantities}
            for quantity, pair in amounts.items():
                for step, unit, amount in changes(header, several, UNITS[quantity]):
                    pair[is_at_end(step, unit, amount)] += amount
            effects[key] = tuple(
                KeepsChange(store_of[worker, quantity], *pair) for quantity, pair in amounts.items() if any(pair)
            )
        return effects[key]

    return list(map(of_worker, steps, workers))
