"""The problem of ordering operations: durations, waits with the delays of messages, and what operations keep.

An instance is made of a plan or of a schedule, and of costs. Its operations are numbered. Times are in whole ticks;
amounts of memory are in units of which M_a has `Header.units_of_m_a`.

F m0 s0     machine 0   1 tick    waits for -                               keeps +1 from its start
F m0 s1     machine 1   1 tick    waits for F m0 s0, 3 ticks after its end  keeps +1 from its start
B m0 s1     machine 1   2 ticks   waits for F m0 s1                         keeps -1 from its end
B m0 s0     machine 0   2 ticks   waits for F m0 s0, B m0 s1 (3 ticks)      keeps -1 from its end
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain, pairwise
from math import ceil, gcd
from operator import add, sub
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from chimera_ir.cost.durations import Costs, Durations, duration_key
from chimera_ir.cost.simulate import ticks
from chimera_ir.flow.engine import ordered
from chimera_ir.flow.flow import ABSENT, Flow
from chimera_ir.flow.live import MoveStep, changes, is_at_end, leaves, waited
from chimera_ir.flow.net import newest, queued
from chimera_ir.ir.kinds import ON_HOST_UNITS, ON_WORKER, Resource
from chimera_ir.ir.levels import Header, Plan, Quantity, Schedule, in_blocks, in_full
from chimera_ir.ir.ops import Message, Micro, Operation, Planned, Stage, Unclocked, WeightGroup, Worker, singles

if TYPE_CHECKING:
    from chimera_ir.predict.setting import Charges


UNITS = {
    Quantity.ACTIVATIONS: ON_WORKER,
    Quantity.HOST: ON_HOST_UNITS,
}
"""Maps the quantity of a declared bound to what counts against it.

Only those quantities are here that follow from the order of a schedule's operations.
"""

_Node = TypeVar("_Node", bound=Hashable)

_FINEST = 10**9
"""Ticks per second, or a multiple of it, where messages take time: delays are rounded up to a tick."""


class Machine(NamedTuple):
    """A resource of a worker, which runs one operation at a time."""

    worker: Worker
    resource: Resource


class Store(NamedTuple):
    """A declared bound: the most that a worker may keep of a quantity, in `Header.units_of_m_a`."""

    worker: Worker
    quantity: Quantity
    limit: int


class KeepsChange(NamedTuple):
    """The change by an operation to what the store of a number keeps; an amount that is freed is negative."""

    store: int
    at_start: int
    at_end: int


@dataclass(frozen=True, repr=False)
class OrderInstance:
    """The operations of a schedule, and what any order of them must respect.

    ``machines[n]`` is the machine of operation n, by number in ``places``; the operation takes ``durations[n]`` ticks,
    each of length ``tick``. It may start ``delays[n][i]`` ticks after the end of operation ``waits[n][i]``, for every
    i. ``steps[n]`` are its computations and waits for moves: an offload has the wait for itself, an operation the waits
    for the reloads of what it reads. ``changes[n]`` are the changes by these steps to the ``stores``. ``lanes[w]`` has
    the operations of worker w that have clocks, in their order. ``blocks`` has each operation of a plan with the
    recomputations that the plan leaves out, which come right before it; a search may move them. ``preferences[n]`` is
    the value of the plan's ``prefer`` line for operation n, if any.
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
        """The schedule in which worker w runs the operations ``lanes[w]``; it is yet to be verified."""
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

    @cached_property
    def lags(self) -> "Sequence[Lags]":
        """The waits of each operation with their delays."""
        pairs = zip(self.waits, self.delays, strict=True)
        return [tuple(zip(others, delays, strict=True)) for others, delays in pairs]

    def starts(self, lanes: Sequence[Sequence[int]]) -> list[int] | None:
        """The earliest start of each operation, in ticks, with these lanes; None if they close a cycle.

        An operation waits for those in ``waits`` and, in its lane, for those before it that `flow.net.queued` gives.
        """
        ends = self.ends(lanes)
        return ends and list(map(sub, ends, self.durations))

    def ends(self, lanes: Sequence[Sequence[int]]) -> list[int] | None:
        """The end of each operation in place of its start, as by `starts`; -1 for an operation that no lane has.

        None if an operation waits for ever, or is on another worker than its own.
        """
        waits, machines, durations = self.lags, self.machines, self.durations
        if self.header.moves:
            waits = [*waits]
            for lane in filter(None, lanes):
                operations = [self.operations[number] for number in lane]
                for number, others in zip(lane, queued(self.header, operations, lane), strict=True):
                    waits[number] += tuple((other, 0) for other in others)
        owners = [place.worker for place in self.places]
        ends = [-1] * len(durations)
        # Machine w is the lane of worker w. An operation on another machine also follows the last one in the lane.
        free, at = [0] * len(owners), [0] * len(lanes)
        sleepers: dict[int, list[int]] = {}
        awake = list(range(len(lanes)))
        while awake:
            worker = awake.pop()
            lane = lanes[worker]
            for place in range(at[worker], len(lane)):
                number = lane[place]
                machine = machines[number]
                if machine == worker:
                    start = free[worker]
                elif owners[machine] == worker:
                    start = max(free[worker], free[machine])
                else:
                    return None
                for other, delay in waits[number]:
                    end = ends[other]
                    if end < 0:  # the lane sleeps until the other operation is over
                        sleepers.setdefault(other, []).append(worker)
                        at[worker] = place
                        break
                    if end + delay > start:
                        start = end + delay
                else:
                    free[machine] = ends[number] = start + durations[number]
                    if number in sleepers:
                        awake += sleepers.pop(number)
                    continue
                break
        return None if sleepers else ends

    def makespan(self, starts: Sequence[int]) -> int:
        """The end of the last operation, in ticks."""
        return max(map(add, starts, self.durations), default=0)

    def peaks(self, lanes: Sequence[Sequence[int]]) -> list[int]:
        """The most that each store keeps as the workers run these lanes."""
        amounts, peaks = [0] * len(self.stores), [0] * len(self.stores)
        for number in chain.from_iterable(lanes):
            for store, at_start, at_end in self.changes[number]:
                peaks[store] = max(peaks[store], amounts[store] + at_start, amounts[store] + at_start + at_end)
                amounts[store] += at_start + at_end
        return peaks

    def fits_stores(self, lanes: Sequence[Sequence[int]]) -> bool:
        """Whether no store exceeds its limit as the workers run these lanes."""
        return all(peak <= store.limit for peak, store in zip(self.peaks(lanes), self.stores, strict=True))


def instance_of(level: Plan | Schedule, durations: Durations) -> OrderInstance:
    """The instance of a complete level; operations keep the order of the plan, or of the lanes.

    If the ``durations`` are those of a profile, messages of its cluster take time.

    Raises `KeyError` if an operation is missing that another one needs: the level was not verified.
    """
    if isinstance(level, Schedule):
        blocks = in_blocks(level.header, list(chain.from_iterable(level.lanes)))
        workers = [Worker(w) for w, lane in enumerate(level.lanes) for _ in lane]
        return _instance(level.header, blocks, workers, range(len(blocks)), durations)
    blocks = in_blocks(level.header, [planned.operation for planned in level.operations])
    # At equal clocks, moves are launched first, as `lower.order` says.
    clocks = [
        ((planned.clock, not planned.operation.kind.moves), n)
        for n, planned in enumerate(level.operations)
        if isinstance(planned, Planned)
    ]
    workers = [planned.worker for planned in level.operations]
    instance = _instance(level.header, blocks, workers, [place for _, place in sorted(clocks)], durations)
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
    durations: Durations,
) -> OrderInstance:
    """``by_clock`` has the places of the blocks with clocks, in the order of the clocks."""
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
    charges = _charges(header, durations)
    tick, duration = ticks(header, durations, 0 if charges is None else _FINEST)
    stores = tuple(
        Store(Worker(worker), bound.quantity, int(limit * header.units_of_m_a))
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
        durations=list(map(duration, operations)),
        waits=waits,
        delays=_delays(header, operations, workers, waits, charges, tick),
        stores=stores,
        steps=steps,
        changes=_changes(header, steps, workers, stores),
        lanes=tuple(map(tuple, lanes)),
        preferences=[None] * len(operations),
    )


def _steps(header: Header, operations: Sequence[Operation]) -> Iterator[tuple[int, ...]]:
    """Yields for each operation of a stream the operations that must be over instead of the step that it needs.

    The lanes have no steps; the step would follow the operations that add to the gradients of its update.
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
    """``steps`` of `OrderInstance`: waits for reloads come before the reader, those for an offload after it."""
    out = {number for number, operation in enumerate(operations) if operation.kind.moves and leaves(operation)}
    steps: list[tuple[MoveStep, ...]] = []
    for number, (operation, others) in enumerate(zip(operations, waits, strict=True)):
        before = (other for other in others if operations[other].kind.moves and other not in out)
        after = [number] if number in out else []
        steps.append((*waited(operations, before), *operation.parts, *waited(operations, after)))
    return steps


def _charges(header: Header, durations: Durations) -> "Charges | None":
    if isinstance(durations, Costs):
        return None
    from chimera_ir.predict.setting import Charges, Measured

    return Charges(header, durations.setting) if isinstance(durations, Measured) else None


def _delays(
    header: Header,
    operations: Sequence[Operation],
    workers: Sequence[Worker],
    waits: Sequence[tuple[int, ...]],
    charges: "Charges | None",
    tick: Fraction,
) -> Sequence[tuple[int, ...]]:
    """The delay of each wait in ticks: the time of the longest message between the two, rounded up."""
    if charges is None:
        none = [(0,) * count for count in range(1 + max(map(len, waits), default=0))]
        return [none[len(others)] for others in waits]
    ticks: dict[object, int] = {}

    def delay(other: int, number: int) -> int:
        source, target = workers[other], workers[number]
        if source == target:
            return 0
        before, after = operations[other], operations[number]
        key = source, target, duration_key(before, header), duration_key(after, header)
        if key not in ticks:
            link = charges.link(source, target)
            times = (
                Fraction(link.message(charges.size(Message(part.micros, part.stage, reader, value))))
                for part in before.parts
                for value in part.kind.hands_on
                for reader in header.readers(value, part.stage, part.micros[0])
                if any(reader == read.stage and value in read.kind.reads for read in after.parts)
            )
            ticks[key] = ceil(max(times, default=Fraction(0)) / tick)
        return ticks[key]

    return [tuple(delay(other, number) for other in others) for number, others in enumerate(waits)]


def _changes(
    header: Header,
    steps: Sequence[tuple[MoveStep, ...]],
    workers: Sequence[Worker],
    stores: Sequence[Store],
) -> Sequence[tuple[KeepsChange, ...]]:
    quantities = tuple(dict.fromkeys(store.quantity for store in stores))
    if not quantities:
        return [()] * len(steps)
    store_of = {(store.worker, store.quantity): number for number, store in enumerate(stores)}
    effects: dict[object, tuple[KeepsChange, ...]] = {}

    def of_worker(several: tuple[MoveStep, ...], worker: Worker) -> tuple[KeepsChange, ...]:
        kinds = tuple(
            (type(step), step.kind, len(step.micros), step.micros[0] % header.slices, header.sizes[step.stage])
            for step in several
        )
        key = worker, kinds
        if key not in effects:
            amounts = {quantity: [0, 0] for quantity in quantities}
            for quantity, pair in amounts.items():
                for step, unit, amount in changes(header, several, UNITS[quantity]):
                    pair[is_at_end(step, unit, amount)] += amount * header.size(unit, step.stage)
            effects[key] = tuple(
                KeepsChange(store_of[worker, quantity], *pair) for quantity, pair in amounts.items() if any(pair)
            )
        return effects[key]

    return list(map(of_worker, steps, workers))


# The constraints of an instance, as heuristics and the solver need them: waits with lags, and holdings of memory.
#
# A lag is the time that must pass between the end of the awaited operation and the start of the one that waits. A
# holding is an amount of memory that is kept between two operations.
#
# Micro-batches of a pipe that cost the same are interchangeable. If any order meets the constraints, so does one in
# which each stage takes such micro-batches in turn: its k-th operation of a kind is that of the k-th micro-batch. So
# these operations, which are called a class, are made to wait for one another, and far fewer orders are left to search:
#
#     F m1 s0     after F m0 s0       in turn
#     F m4 s0     after W m0 s0       also in turn, if the worker has this stage alone and keeps at most 4 micro-batches
#
# Of micro-batches with weights 1, 2, 1, 2, those of weight 1 are taken in turn, and those of weight 2.


class Holding(NamedTuple):
    """An amount that a store keeps from the start of one operation to the end of another."""

    store: int
    amount: int
    opened: int
    closed: int


Lags = tuple[tuple[int, int], ...]
"""The waits of an operation: pairs of another operation, and the ticks that must pass after the end of that one."""


@dataclass(frozen=True)
class Jobs:
    """Jobs, by number, each of which occupies a machine for a while; times are in ticks.

    Machine w is the lane of worker w; ``owners[m]`` is the worker of machine m, whose jobs start only while the lane is
    free. Job j starts after the lags of its ``waits``, and once each of the jobs ``begun[j]`` has started.
    ``changes[j]`` says what job j adds to stores and frees; ``limits`` are the amounts that fit into the stores. Of the
    jobs that may start on a machine, the one with the least rank does.
    """

    owners: Sequence[int]
    workers: int
    machines: Sequence[int]
    durations: Sequence[int]
    waits: Sequence[Lags]
    changes: Sequence[Sequence[KeepsChange]]
    limits: Sequence[int]
    begun: Sequence[Sequence[int]]
    ranks: Sequence[int]

    @cached_property
    def followers(self) -> Sequence[Lags]:
        """The jobs that wait for each job, as pairs of such a follower and the lag of its wait."""
        followers: list[list[tuple[int, int]]] = [[] for _ in self.waits]
        for number, waits in enumerate(self.waits):
            for other, lag in waits:
                followers[other].append((number, lag))
        return [*map(tuple, followers)]

    @cached_property
    def order(self) -> list[int]:
        """All jobs, each after those that it waits for; of jobs that wait in a cycle there are none."""
        return ordered([[other for other, _ in waits] for waits in self.waits])

    @cached_property
    def heads(self) -> list[int]:
        """The earliest start of each job if machines and stores were free."""
        return _longest(self.order, self.waits, self.durations)

    @cached_property
    def tails(self) -> list[int]:
        """The least time from the end of each job to the end of all."""
        return _longest(self.order[::-1], self.followers, self.durations)

    @cached_property
    def groups(self) -> tuple[list[int], list[list[int]]]:
        """The number of each job's group, and the jobs of each group: those that waits connect, as a micro-batch's."""
        waits = ([other for other, _ in lags] for lags in self.waits)
        return connected([[*others, *begun] for others, begun in zip(waits, self.begun, strict=True)])

    @cached_property
    def backwards(self) -> Self:
        """The jobs with time reversed: an order of these, read backwards, is one of the jobs here.

        Waits in ``begun`` cannot be reversed: there must be none. What a subclass adds stays that of time as it is.
        """
        changes = [[KeepsChange(store, -end, -start) for store, start, end in several] for several in self.changes]
        return replace(self, waits=self.followers, changes=changes, ranks=[-rank for rank in self.ranks])


@dataclass(frozen=True)
class Constraints(Jobs):
    """All that an order of an instance's operations must respect; each operation is a job.

    ``holdings`` has only those of stores that may exceed their ``limits`` although the ``waits`` are kept, and
    ``changes`` those by these holdings. ``ranks[n]`` is the place of operation n's micro-batch in a sequence of
    micro-batches that can be finished one by one. ``roles[n]`` is equal for operations that do the same for different
    micro-batches. ``classes`` are the groups of operations that are taken in turn, each in the order of these turns.
    """

    instance: OrderInstance
    holdings: tuple[Holding, ...]
    roles: Sequence[int]
    classes: tuple[tuple[int, ...], ...]

    @cached_property
    def groups(self) -> tuple[list[int], list[list[int]]]:
        """The groups of `Jobs`: turns, which are waits here, connect no operations."""
        return connected(self.instance.waits)

    @cached_property
    def by_machine(self) -> Sequence[Sequence[int]]:
        """The operations of each machine."""
        lanes: list[list[int]] = [[] for _ in range(1 + max(self.machines, default=-1))]
        for number, machine in enumerate(self.machines):
            lanes[machine].append(number)
        return lanes

    @cached_property
    def costs_differ(self) -> bool:
        """Whether operations that do the same for different micro-batches (one role) take unequal times."""
        return len({*zip(self.roles, self.durations, strict=True)}) > len({*self.roles})

    @property
    def needed_alone(self) -> dict[int, int]:
        """The most that any single micro-batch keeps in each store that has holdings."""
        sums = defaultdict[tuple[int, int], int](int)
        for store, amount, opened, _ in self.holdings:
            sums[store, self.ranks[opened]] += amount
        most: dict[int, int] = {}
        for (store, _), amount in sums.items():
            most[store] = max(most.get(store, 0), amount)
        return most

    def before_in_micro_batch(self, number: int) -> set[int]:
        """The operations of the same micro-batch that must come before an operation."""
        rank = self.ranks[number]
        return {*reached(number, lambda later: (n for n, _ in self.waits[later] if self.ranks[n] == rank))} - {number}

    def in_turn(self, starts: Sequence[int]) -> list[int]:
        """Exchanges the starts within each class, so that its operations start in turn; returns all starts.

        The order stays feasible if it was.
        """
        turned = [*starts]
        for several in self.classes:
            for number, start in zip(several, sorted(starts[number] for number in several), strict=True):
                turned[number] = start
        return turned


def constraints_of(instance: OrderInstance) -> Constraints:
    """The constraints of an instance, with the waits that are added where micro-batches are taken in turn."""
    roles = [*_roles(instance)]
    classes = _interchangeable(instance, roles)
    waits = list(map(dict, instance.lags))
    implied, holdings = _in_full_stores(instance, classes)
    for earlier, later in chain(chain.from_iterable(map(pairwise, classes)), implied):
        waits[later].setdefault(earlier, 0)
    return Constraints(
        owners=[machine.worker for machine in instance.places],
        workers=instance.header.workers,
        machines=instance.machines,
        durations=instance.durations,
        waits=[tuple(several.items()) for several in waits],
        changes=_by_holdings(holdings, len(waits)),
        limits=[store.limit for store in instance.stores],
        begun=[()] * len(waits),
        ranks=_ranks(instance),
        instance=instance,
        holdings=holdings,
        roles=roles,
        classes=classes,
    )


def _by_holdings(holdings: Iterable[Holding], count: int) -> list[list[KeepsChange]]:
    changes = [defaultdict[int, list[int]](lambda: [0, 0]) for _ in range(count)]
    for store, amount, opened, closed in holdings:
        changes[opened][store][0] += amount
        changes[closed][store][1] -= amount
    return [[KeepsChange(store, *amounts) for store, amounts in several.items()] for several in changes]


def reached(first: _Node, following: Callable[[_Node], Iterable[_Node]]) -> Iterator[_Node]:
    """Yields ``first``, then all that follows from it step by step, each once."""
    known, pending = {first}, [first]
    for node in pending:
        yield node
        new = dict.fromkeys(other for other in following(node) if other not in known)
        known.update(new)
        pending += new


def connected(others: Sequence[Iterable[int]]) -> tuple[list[int], list[list[int]]]:
    """The number of each job's group, and the jobs of each group; job j is in one group with the jobs ``others[j]``."""
    linked: list[list[int]] = [[] for _ in others]
    for job, several in enumerate(others):
        for other in several:
            linked[job].append(other)
            linked[other].append(job)
    group_of, members = [-1] * len(linked), list[list[int]]()
    for job in range(len(linked)):
        if group_of[job] < 0:
            members.append(sorted(reached(job, linked.__getitem__)))
            for member in members[-1]:
                group_of[member] = len(members) - 1
    return group_of, members


def _longest(order: Iterable[int], before: Sequence[Lags], durations: Sequence[int]) -> list[int]:
    starts = [0] * len(durations)
    for number in order:
        starts[number] = max((starts[other] + durations[other] + lag for other, lag in before[number]), default=0)
    return starts


def _interchangeable(instance: OrderInstance, roles: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The classes: operations of one kind, stage and slice, in the order of their micro-batches.

    These micro-batches are of one pipe and cost the same.
    """
    slices, parts = instance.header.slices, [operation.parts for operation in instance.operations]
    micro_batches = [part.micros[0] // slices for part, *_ in parts]
    by_micro_batch, unlike = defaultdict[int, list[int]](list), set[int]()
    for number, micro_batch in enumerate(micro_batches):
        by_micro_batch[micro_batch].append(number)
        micros = [micro for part in parts[number] for micro in part.micros]
        if len(micros) > 1 or any(micro_batches[other] != micro_batch for other in instance.waits[number]):
            unlike.update(micro // slices for micro in micros)
    equal_cost = defaultdict[object, list[int]](list)
    for micro_batch in sorted(by_micro_batch.keys() - unlike):
        numbers = by_micro_batch[micro_batch]
        costs = frozenset(
            (
                roles[number],
                instance.machines[number],
                instance.durations[number],
                frozenset(
                    zip([roles[other] for other in instance.waits[number]], instance.delays[number], strict=True)
                ),
            )
            for number in numbers
        )
        equal_cost[costs].append(micro_batch)
    classes = defaultdict[object, list[int]](list)
    for group, members in equal_cost.items():
        for micro_batch in members:
            for number in by_micro_batch[micro_batch]:
                classes[group, roles[number]].append(number)
    return tuple(map(tuple, classes.values()))


def _holdings(instance: OrderInstance) -> Iterator[Holding]:
    """Yields what stages keep of micro-batches between two operations."""
    header, store_of = instance.header, {(store.worker, store.quantity): n for n, store in enumerate(instance.stores)}
    place = {number: place for place, number in enumerate(ordered(instance.waits))}
    for quantity in dict.fromkeys(store.quantity for store in instance.stores):
        events = defaultdict[tuple[int, Micro, Stage], list[tuple[int, int]]](list)
        for number in range(len(instance.operations)):
            store = store_of[instance.places[instance.machines[number]].worker, quantity]
            for step in instance.steps[number]:
                kept = changes(header, [step], UNITS[quantity])
                total = sum(amount * header.size(unit, step.stage) for _, unit, amount in kept)
                for micro in step.micros:
                    events[store, micro, step.stage].append((number, total // len(step.micros)))
        for (store, micro, stage), several in events.items():
            several.sort(key=lambda event: place[event[0]])
            size = header.length([micro]) * header.sizes[stage]
            opened = [number for number, amount in several for _ in range(0, amount, size)]
            closed = [number for number, amount in several for _ in range(0, -amount, size)]
            yield from (Holding(store, size, *both) for both in zip(opened, closed, strict=True))


def _in_full_stores(
    instance: OrderInstance, classes: Sequence[Sequence[int]]
) -> tuple[list[tuple[int, int]], tuple[Holding, ...]]:
    """Returns waits, (earlier, later), that replace limits, and the holdings that may exceed limits in spite of them.

    A store with a single class of holdings needs no more than waits.
    """
    by_store = defaultdict[int, list[Holding]](list)
    for holding in _holdings(instance):
        by_store[holding.store].append(holding)
    class_of = {number: place for place, several in enumerate(classes) for number in several}
    implied: list[tuple[int, int]] = []
    left: list[Holding] = []
    for store, several in by_store.items():
        limit = instance.stores[store].limit
        if sum(holding.amount for holding in several) <= limit:
            continue
        kinds = dict.fromkeys(
            (class_of.get(holding.opened), class_of.get(holding.closed), holding.amount) for holding in several
        )
        held = [
            _HoldingClass(classes[opened], classes[closed], amount)
            for opened, closed, amount in kinds
            if opened is not None and closed is not None
        ]
        counts = {len(group.opened) for group in held}
        regular = len(held) == len(kinds) and len(counts) == 1 and len(several) == len(held) * max(counts)
        fits = sum(group.amount for group in held) <= limit
        if regular and fits:
            implied += _implied(instance, held, limit)
        if not (regular and fits and len(held) == 1):
            left += several
    return implied, tuple(left)


class _HoldingClass(NamedTuple):
    """Holdings of one class: the k-th keeps ``amount`` from the start of ``opened[k]`` to the end of ``closed[k]``."""

    opened: Sequence[int]
    closed: Sequence[int]
    amount: int


def _implied(instance: OrderInstance, held: Sequence[_HoldingClass], limit: int) -> Iterator[tuple[int, int]]:
    """Yields waits, (earlier, later), that follow from the limit of a store with room for one holding of each class.

    ``held`` has the classes of holdings, each with one holding per micro-batch. Say a holding begins while others of
    its micro-batch are sure to exist. Then of each of these classes only as many holdings exist as have room beside one
    of every other, so earlier ones must be over. And if a holding of a class must begin before one of an earlier class
    can be over, it begins before there are so many of the earlier class that they leave no room for it, ever.
    """
    firsts = {number for group in held for number in (group.opened[0], group.closed[0])}
    before = {number: {*reached(number, instance.waits.__getitem__)} - {number} for number in firsts}
    for late in held:
        there = [
            group
            for group in held
            if group is not late
            and group.opened[0] in before[late.opened[0]]
            and late.opened[0] in before[group.closed[0]]
        ]
        together = [late, *there]
        room = limit - sum(group.amount for group in together)
        for group in together:
            yield from zip(group.closed, late.opened[room // group.amount + 1 :], strict=False)
        for group in there:
            yield from zip(late.opened, group.opened[(limit - late.amount) // group.amount :], strict=False)


def _roles(instance: OrderInstance) -> Iterator[int]:
    """Yields equal numbers for operations of one pipe with parts of the same kinds, stages and slices."""
    header, numbers = instance.header, dict[object, int]()
    for operation in instance.operations:
        parts = tuple(
            (part.kind, part.stage, len(part.micros), part.micros[0] % header.slices) for part in operation.parts
        )
        yield numbers.setdefault((header.pipe(operation.parts[0].micros[0]).name, parts), len(numbers))


def _ranks(instance: OrderInstance) -> list[int]:
    """The place of each operation's last micro-batch: first are the first ones of all pipes, then the second ones.

    Slices of a micro-batch share its rank.
    """
    header = instance.header
    places = {micro: place // header.slices for pipe in header.pipes for place, micro in enumerate(sorted(pipe.micros))}
    pipes = {pipe.name: number for number, pipe in enumerate(header.pipes)}
    return [
        max(
            places[micro] * len(pipes) + pipes[header.pipe(micro).name]
            for part in operation.parts
            for micro in part.micros
        )
        for operation in instance.operations
    ]
