"""The constraints of an instance, as heuristics and the solver need them: waits with lags, and holdings of memory.

A lag is the time that must pass between the end of the awaited operation and the start of the one that waits. A holding
is an amount of memory that is kept between two operations.

Micro-batches of a pipe that cost the same are interchangeable. If any order meets the constraints, so does one in which
each stage takes such micro-batches in turn: its k-th operation of a kind is that of the k-th micro-batch. So these
operations, which are called a class, are made to wait for one another, and far fewer orders are left to search:

    F m1 s0     after F m0 s0       in turn
    F m4 s0     after W m0 s0       also in turn, if the worker has this stage alone and keeps at most 4 micro-batches

Of micro-batches with weights 1, 2, 1, 2, those of weight 1 are taken in turn, and those of weight 2.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from chimera_ir.flow.engine import ordered
from chimera_ir.flow.live import changes
from chimera_ir.ir.ids import Micro, Stage
from chimera_ir.orders.instance import UNITS, OrderInstance


class Holding(NamedTuple):
    """An amount that a store keeps from the start of one operation to the end of another."""

    store: int
    amount: int
    opened: int
    closed: int


Lags = tuple[tuple[int, int], ...]
"""The waits of an operation: pairs of another operation, and the ticks that must pass after the end of that one."""


@dataclass(frozen=True)
class Constraints:
    """All that an order of operations must respect; times are in ticks, and operations are those of an instance.

    ``holdings`` has only those of stores that may exceed their ``limits`` although the ``waits`` are kept. ``ranks[n]``
    is the place of operation n's micro-batch in a sequence of micro-batches that can be finished one by one.
    ``roles[n]`` is equal for operations that do the same for different micro-batches. ``classes`` are the groups of
    operations that are taken in turn, each in the order of these turns.
    """

    machines: Sequence[int]
    durations: Sequence[int]
    waits: Sequence[Lags]
    holdings: tuple[Holding, ...]
    limits: tuple[int, ...]
    ranks: Sequence[int]
    roles: Sequence[int]
    classes: tuple[tuple[int, ...], ...]

    @cached_property
    def followers(self) -> Sequence[Lags]:
        """The operations that wait for each operation, as pairs of such a follower and the lag of its wait."""
        followers: list[list[tuple[int, int]]] = [[] for _ in self.waits]
        for number, waits in enumerate(self.waits):
            for other, lag in waits:
                followers[other].append((number, lag))
        return [*map(tuple, followers)]

    @cached_property
    def order(self) -> list[int]:
        """All operations, each after those that it waits for."""
        return ordered([[other for other, _ in waits] for waits in self.waits])

    @cached_property
    def heads(self) -> list[int]:
        """The earliest start of each operation if machines and stores were free."""
        return _longest(self.order, self.waits, self.durations)

    @cached_property
    def tails(self) -> list[int]:
        """The least time from the end of each operation to the end of all."""
        return _longest(self.order[::-1], self.followers, self.durations)

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

    @cached_property
    def backwards(self) -> "Constraints":
        """The constraints with time reversed: an order that meets them, read backwards, meets the ones here."""
        return replace(
            self,
            waits=self.followers,
            holdings=tuple(holding._replace(opened=holding.closed, closed=holding.opened) for holding in self.holdings),
            ranks=[-rank for rank in self.ranks],
            classes=tuple(several[::-1] for several in self.classes),
        )

    @property
    def needed_alone(self) -> dict[int, int]:
        """Maps each store that has holdings to the most that any single micro-batch keeps in it, all holdings added."""
        sums = defaultdict[tuple[int, int], int](int)
        for store, amount, opened, _ in self.holdings:
            sums[store, self.ranks[opened]] += amount
        most: dict[int, int] = {}
        for (store, _), amount in sums.items():
            most[store] = max(most.get(store, 0), amount)
        return most

    def before_in_micro_batch(self, numbers: Iterable[int]) -> dict[int, set[int]]:
        """The operations that must come before each of some operations, of the same micro-batch."""
        before: dict[int, set[int]] = {}
        for number in numbers:
            reached, pending = set[int](), [number]
            for later in pending:
                new = {other for other, _ in self.waits[later] if self.ranks[other] == self.ranks[number]} - reached
                reached |= new
                pending += new
            before[number] = reached
        return before

    def in_turn(self, starts: Sequence[int]) -> list[int]:
        """Exchanges the starts within each class, so that its operations start in turn; returns all starts.

        The first operation of a class gets the earliest start of the class, the second one the next, and so on. The
        order stays feasible if it was.
        """
        turned = [*starts]
        for several in self.classes:
            for number, start in zip(several, sorted(starts[number] for number in several), strict=True):
                turned[number] = start
        return turned

    def makespan(self, starts: Sequence[int]) -> int:
        """The end of the last operation."""
        return max(map(sum, zip(starts, self.durations, strict=True)), default=0)


def constraints_of(instance: OrderInstance) -> Constraints:
    """The constraints of an instance, with the waits that are added where micro-batches are taken in turn."""
    classes = _interchangeable(instance)
    waits = [
        dict(zip(others, delays, strict=True)) for others, delays in zip(instance.waits, instance.delays, strict=True)
    ]
    implied, holdings = _in_full_stores(instance, classes)
    for earlier, later in chain(chain.from_iterable(map(pairwise, classes)), implied):
        waits[later].setdefault(earlier, 0)
    return Constraints(
        machines=instance.machines,
        durations=instance.durations,
        waits=[tuple(several.items()) for several in waits],
        holdings=holdings,
        limits=tuple(store.limit for store in instance.stores),
        ranks=_ranks(instance),
        roles=[*_roles(instance)],
        classes=classes,
    )


def _longest(order: Iterable[int], before: Sequence[Lags], durations: Sequence[int]) -> list[int]:
    starts = [0] * len(durations)
    for number in order:
        starts[number] = max((starts[other] + durations[other] + lag for other, lag in before[number]), default=0)
    return starts


def _interchangeable(instance: OrderInstance) -> tuple[tuple[int, ...], ...]:
    """Returns the classes: groups of operations that differ only in their micro-batch, in the order of micro-batches.

    The operations of a class have one kind, stage and slice, and their micro-batches are of one pipe and cost the same.
    """
    slices, parts = instance.header.slices, [operation.parts for operation in instance.operations]
    keys = [(part.kind, part.stage, part.micros[0] % slices) for part, *_ in parts]
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
                keys[number],
                instance.machines[number],
                instance.durations[number],
                frozenset(zip([keys[other] for other in instance.waits[number]], instance.delays[number], strict=True)),
            )
            for number in numbers
        )
        equal_cost[instance.header.pipe(parts[numbers[0]][0].micros[0]).name, costs].append(micro_batch)
    classes = defaultdict[object, list[int]](list)
    for group, members in equal_cost.items():
        for micro_batch in members:
            for number in by_micro_batch[micro_batch]:
                classes[group, keys[number]].append(number)
    return tuple(map(tuple, classes.values()))


def _holdings(instance: OrderInstance) -> Iterator[Holding]:
    """Yields the holdings of all stores: each is a part of a micro-batch that a stage keeps between two operations."""
    header, store_of = instance.header, {(store.worker, store.quantity): n for n, store in enumerate(instance.stores)}
    place = {number: place for place, number in enumerate(ordered(instance.waits))}
    for quantity in dict.fromkeys(store.quantity for store in instance.stores):
        events = defaultdict[tuple[int, Micro, Stage], list[tuple[int, int]]](list)
        for number in range(len(instance.operations)):
            store = store_of[instance.places[instance.machines[number]].worker, quantity]
            for step in instance.steps[number]:
                total = sum(amount for *_, amount in changes(header, [step], UNITS[quantity]))
                for micro in step.micros:
                    events[store, micro, step.stage].append((number, total // len(step.micros)))
        for (store, micro, _), several in events.items():
            several.sort(key=lambda event: place[event[0]])
            size = header.length([micro])
            opened = [number for number, amount in several for _ in range(0, amount, size)]
            closed = [number for number, amount in several for _ in range(0, -amount, size)]
            yield from (Holding(store, size, *both) for both in zip(opened, closed, strict=True))


def _in_full_stores(
    instance: OrderInstance, classes: Sequence[Sequence[int]]
) -> tuple[list[tuple[int, int]], tuple[Holding, ...]]:
    """Replaces the limits of stores by waits, where this is possible.

    Returns the waits, as pairs of the earlier and the later operation, and the holdings of those stores that could
    exceed their limits in spite of them. A store with a single class of holdings needs no more than waits.
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
    """Yields waits that follow from the limit of a store, in which one holding of each class has room.

    A wait is a pair of the earlier operation and the later one, which waits. ``held`` has the classes of holdings, each
    with one holding per micro-batch. Say a holding begins while others of its micro-batch are sure to exist. Then of
    each of these classes only as many holdings exist as have room beside one of every other, so earlier ones must be
    over. And if a holding of a class must begin before one of an earlier class can be over, it begins before there are
    so many of the earlier class that they leave no room for it, ever.
    """
    before = _before_within(instance, [group.opened[0] for group in held] + [group.closed[0] for group in held])
    for late in held:
        there = [
            group
            for group in held
            if group is not late
            and (group.opened[0], late.opened[0]) in before
            and (late.opened[0], group.closed[0]) in before
        ]
        together = [late, *there]
        room = limit - sum(group.amount for group in together)
        for group in together:
            yield from zip(group.closed, late.opened[room // group.amount + 1 :], strict=False)
        for group in there:
            yield from zip(late.opened, group.opened[(limit - late.amount) // group.amount :], strict=False)


def _before_within(instance: OrderInstance, numbers: Sequence[int]) -> set[tuple[int, int]]:
    """The pairs of the given operations of which the second waits for the first, directly or through others."""
    pairs = set[tuple[int, int]]()
    for late in numbers:
        reached, pending = {late}, [late]
        for number in pending:
            new = [other for other in instance.waits[number] if other not in reached]
            reached.update(new)
            pending += new
        pairs |= {(early, late) for early in numbers if early in reached and early != late}
    return pairs


def _roles(instance: OrderInstance) -> Iterator[int]:
    """Yields the role of each operation: equal numbers for operations that differ only in their micro-batches.

    They have one pipe, and parts of the same kinds, stages and slices.
    """
    header, numbers = instance.header, dict[object, int]()
    for operation in instance.operations:
        parts = tuple(
            (part.kind, part.stage, len(part.micros), part.micros[0] % header.slices) for part in operation.parts
        )
        yield numbers.setdefault((header.pipe(operation.parts[0].micros[0]).name, parts), len(numbers))


def _ranks(instance: OrderInstance) -> list[int]:
    """Returns the rank of each operation: the place of its micro-batch in a sequence of the micro-batches of all pipes.

    The sequence has the first micro-batch of each pipe, then the second of each, and so on. Slices of a micro-batch
    share its rank; an operation on several micro-batches has the rank of the last.
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
