"""The earliest timeline: every operation starts as soon as its data have arrived and its worker is free.

Communication is free here, as in the paper's analysis (section 2). Time is counted in whole ticks, a unit of which
every duration is a multiple, so that the result is exact and the arithmetic fast.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain, groupby
from math import lcm
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from chimera_ir.cost.durations import DurationKey, Durations, duration_key, number
from chimera_ir.flow import live
from chimera_ir.flow.engine import NO_CYCLE, Critical, Waits, critical
from chimera_ir.flow.net import Net, net_of, turn_net
from chimera_ir.ir.kinds import COSTED, KEPT, RECOMPUTATION, Counted, Kind, Pairing, Resource
from chimera_ir.ir.levels import Header, OneLine, Schedule, Strategy
from chimera_ir.ir.ops import Instruction, Micro, Operation, Version, WaitMove, WeightGroup, Worker, singles
from chimera_ir.ir.streams import stream_of
from chimera_ir.ir.text.printer import line
from chimera_ir.ir.turns import in_turn, later, turn_number
from chimera_ir.plural import counted

if TYPE_CHECKING:
    from chimera_ir.flow.engine import IntGraph

# The staleness of a schedule: how old the weights are with which its gradients are computed.


class Staleness(NamedTuple):
    """The age of the weights with which an update's gradients are computed.

    ``updates`` has for each stage the most updates by which the weights that a micro-batch reads are older than those
    that it changes, ``micro_batches`` how many of an update read old weights on any stage.
    """

    updates: tuple[int, ...]
    micro_batches: int


def staleness(schedule: Schedule) -> Staleness:
    """The largest staleness on each stage, and the most micro-batches of one update that read old weights.

    Update k turns version k into version k+1; without a flush, its micro-batches may have read an older version.
    """
    oldest = [0] * schedule.header.stages
    late: dict[int, set[Micro]] = defaultdict(set)
    for lane in schedule.lanes:
        for operation in singles(lane):
            if operation.version is not None:
                update = schedule.header.update_of(operation.micros)
                oldest[operation.stage] = max(oldest[operation.stage], update - operation.version)
                if operation.version < update:
                    late[update].update(operation.micros)
    return Staleness(tuple(oldest), max(map(len, late.values()), default=0))


def warning(stale: Staleness, of: int) -> Iterator[str]:
    """Yields a warning for the user if any stage reads old weights; ``of`` are the micro-batches of an update."""
    most, least = max(stale.updates), min(stale.updates)
    if most > 0:
        old = f"{counted(most, 'update')} old"
        first, last = stale.updates.index(most), stale.updates.index(least)
        where = "" if most == least else f" on stage {first}, {least} on stage {last}"
        late = (
            "all micro-batches"
            if stale.micro_batches == of
            else f"{stale.micro_batches} of {counted(of, 'micro-batch')}"
        )
        yield f"without a flush, gradients of {late} come from old weights: {old}{where}"


# The operations that decide how long an update takes: a critical path or, without a flush, a critical cycle.


class CriticalPath(NamedTuple):
    """Operations that follow one another without a gap, each waiting for the operation before it.

    With a flush they go from time 0 to the end. In a stream they are a cycle: from a turn of the steady state to the
    same place in a later turn. ``length`` is the time of one update, in ticks. ``counts`` has C_f and C_b of section
    3.4: by kind, the micro-batches, per update, on which operations of this kind on the path work. A slice or a half
    counts as its part of a micro-batch, and a micro-batch of weight 2 counts twice.
    """

    operations: tuple[Operation, ...]
    length: Fraction
    counts: Mapping[str, Fraction]


@dataclass(frozen=True)
class Structure:
    """The part of a timeline that costs and recomputation do not change.

    ``net`` has the schedule's operations, numbered, and what each waits for. ``numbers`` are those that can be on a
    critical path: all or, without a flush, those of one turn. Without a flush, ``waits[i]`` lists what the operation
    ``numbers[i]`` waits for, as pairs: the place of another operation in ``numbers``, and how many turns earlier that
    one runs. With a flush, ``waits`` is empty.
    """

    net: Net
    numbers: Sequence[int]
    waits: Waits

    @cached_property
    def preferred(self) -> Sequence[int]:
        """A number for each operation in ``numbers``, which decides between critical paths of equal length.

        The path with the largest sum has the most backwards; of those with as many, the most pairs; of these, the most
        input gradients; and of these, if memory moves, the most operations other than moves.
        """
        operations = [self.net.operations[number] for number in self.numbers]
        # Each preference counts more than all operations together can sum up of the next one.
        header = self.net.schedule.header
        sizes = [int(header.weight(operation) * header.weight_unit) for operation in operations]
        unit = 1 + sum(sizes)

        def weight(kind: Kind | Pairing) -> int:
            if isinstance(kind, Pairing):
                return unit
            return (unit**2 if kind.sums else 1) * (KEPT in kind.reads)

        weights = {kind: weight(kind) for kind in {operation.kind for operation in operations}}
        if header.moves:
            weights = {kind: 0 if kind.moves else unit * number + 1 for kind, number in weights.items()}
        return [weights[operation.kind] * size for operation, size in zip(operations, sizes, strict=True)]


def structure_of(schedule: Schedule, net: Net | None = None) -> Structure:
    """Builds the structure of a verified schedule; ``net`` is its net, if known already.

    Raises `ValueError` for a cycle, and for a stream that shows no turn of its steady state.
    """
    header, net = schedule.header, net or net_of(schedule)
    if len(net.order) < len(net.operations):
        raise ValueError("the schedule closes a cycle; only a verified schedule has a timeline")
    return Structure(net, *_turn_in(net)) if header.asynchronous else Structure(net, range(len(net.operations)), ())


def _turn_in(net: Net) -> tuple[Sequence[int], Waits]:
    """``numbers``, in an order in which the stream can run them, and ``waits`` for the `Structure` of a stream."""
    turn, header = turn_net(stream_of(net.schedule)), net.schedule.header
    nodes = {in_turn(header, operation)[0]: node for node, operation in enumerate(turn.operations)}
    in_turns = ((number, *in_turn(header, net.operations[number])) for number in net.order)
    first = {nodes[operation]: number for number, operation, in_which in in_turns if in_which == 0}
    # Nodes count turns from that of their lane, these waits from that of the micro-batch.
    place, turns = {node: place for place, node in enumerate(first)}, [turn_number(header, o) for o in turn.operations]
    waits = [[(place[other], ago + turns[node] - turns[other]) for other, ago in turn.waits[node]] for node in first]
    return [*first.values()], [sorted(several, key=lambda wait: wait[1] > 0) for several in waits]


# The steady period: the time of an iteration where many follow one another without a barrier.
#
# iteration k      worker 0:  F m0 s0 .. B m1 s0      worker 1:  F m0 s1 .. B m1 s1
# iteration k+1               F m0 s0 ..                         F m0 s1 ..
#
# The first operation of worker 0 in iteration k+1 waits for the last one of worker 0 in iteration k, B m1 s0, and for
# the last ones that add to gradients of a weight that worker 0 holds, on every worker that holds it. It does not wait
# for workers with which it shares no weight: there is no barrier.


@dataclass(frozen=True)
class TimedRun:
    """The run in which each operation starts as early as it can; times are in ticks of length ``tick``.

    ``durations`` and `ends` are in the order of ``structure.net``. Everything is computed when it is first read.
    """

    header: Header
    structure: Structure
    tick: Fraction
    durations: Sequence[int]

    @cached_property
    def ends(self) -> Sequence[int]:
        """The end of each operation."""
        return self.structure.net.ends(self.durations)

    @cached_property
    def span(self) -> int:
        """The end of the last operation."""
        return max(self.ends, default=0)

    @cached_property
    def length(self) -> Fraction:
        """The time of an update: that of the `critical_path`, without building the path."""
        return self._longest.cycle.ratio / self.header.per_turn if self.structure.waits else Fraction(self.span)

    @cached_property
    def _longest(self) -> Critical:
        return critical(self.structure.waits, [self.durations[number] for number in self.structure.numbers])

    @cached_property
    def critical_path(self) -> CriticalPath:
        """A critical path with the most backwards (`Structure.preferred`).

        Without split backwards and pairs the number of backwards on a critical path fixes that of forwards, because
        durations are positive. So C_f and C_b are well defined.
        """
        header, net, updates = self.header, self.structure.net, 1
        if self.structure.waits:
            # First the cycles that take longest, then among their waits the cycle that is preferred.
            most = critical(self._longest.tight, self.structure.preferred).cycle
            cycle = self._longest.cycle if most == NO_CYCLE else most
            path, updates = [self.structure.numbers[node] for node in cycle.nodes], cycle.turns * header.per_turn
        else:
            lengths = joint_lengths(self.durations, self.structure.preferred)
            path = path_to(net, net.ends(lengths), lengths) if net.operations else []
        operations = tuple(net.operations[number] for number in path)
        counts = counts_on(header, net, operations, updates)
        return CriticalPath(operations, self.length, counts)

    @cached_property
    def _awaited(self) -> Mapping[int, set[int]]:
        """The operations of an iteration for which the first operation of each lane waits in the next one."""
        header, net = self.header, self.structure.net
        last = _last_additions(header, net)
        return {
            lane.start: {lane[-1], *(number for group in header.groups_of[worker] for number in last.get(group, ()))}
            for worker, lane in enumerate(net.lanes)
            if lane
        }

    @property
    def follows_at_once(self) -> bool:
        """Whether the first operation of the critical path waits for the last one in the iteration before."""
        operations, path = self.structure.net.operations, self.critical_path.operations
        return any(
            operations[first] == path[0] and path[-1] in [operations[number] for number in numbers]
            for first, numbers in self._awaited.items()
        )

    @property
    def steady_period(self) -> Fraction:
        """The makespan of many iterations by their number.

        It is never longer than the makespan, and equal to it if the first operation of the critical path waits for the
        last operation of the path in the iteration before.
        """
        net, awaited = self.structure.net, self._awaited
        if self.structure.waits or self.follows_at_once:
            return self.critical_path.length
        place = {number: place for place, number in enumerate(net.order)}
        before = [(net.predecessors[number], awaited.get(number, ())) for number in net.order]
        waits = [[(place[other], ago) for ago, others in enumerate(both) for other in others] for both in before]
        return critical(waits, [self.durations[number] for number in net.order]).cycle.ratio


def counts_on(header: Header, net: Net, path: Iterable[Operation], updates: int = 1) -> Mapping[str, Fraction]:
    """The micro-batches on which the operations of a path work, by kind, per update (`CriticalPath.counts`)."""
    micros: dict[str, int | Fraction] = defaultdict(int)
    for operation in path:
        micros[operation.kind.letter] += header.weight(operation)
    present = {kind.letter for kind in {operation.kind for operation in net.operations}}
    return {letter: Fraction(micros[letter], header.parts * updates) for letter in COSTED if letter in present}


def earliest(header: Header, structure: Structure, costs: Durations) -> TimedRun:
    """The run of a schedule in which each operation starts as early as it can."""
    tick, duration = ticks(header, costs)
    return TimedRun(header, structure, tick, [duration(operation) for operation in structure.net.operations])


def unit_run(header: Header, structure: Structure) -> TimedRun:
    """The run in which every operation but a recomputation takes 1."""
    clocks = [int(operation.kind is not RECOMPUTATION) for operation in structure.net.operations]
    return TimedRun(header, structure, Fraction(1), clocks)


def joint_lengths(durations: Sequence[int], preferred: Sequence[int]) -> list[int]:
    """The durations joined with ``preferred`` numbers: the duration in the high digits, the other one in the low ones.

    So the longest path in joined numbers is, of all paths that take longest, the one with the largest sum of
    ``preferred``.
    """
    unit = 1 + sum(preferred)
    return [duration * unit + more for duration, more in zip(durations, preferred, strict=True)]


def path_to(net: Net, ends: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The longest path to the operation that ends last, from the ``ends`` that operations of these ``lengths`` have."""
    number = max(range(len(ends)), key=ends.__getitem__)
    # Back from the operation that ends last, always to an operation that ends where this one starts.
    path = [number]
    while (start := ends[number] - lengths[number]) > 0:
        number = next(before for before in net.predecessors[number] if ends[before] == start)
        path.append(number)
    return path[::-1]


def _last_additions(header: Header, net: Net) -> Mapping[WeightGroup, Iterable[int]]:
    """Maps each weight group to the last operation of each worker that adds to its gradients, by number in the net."""
    last: dict[WeightGroup, dict[int, int]] = {}
    for worker, lane in enumerate(net.lanes):
        missing = {*header.groups_of[worker]}
        for operation in reversed(lane):
            if not missing:
                break
            for part in net.operations[operation].parts:
                if part.kind.sums:
                    for group in missing.intersection(header.groups_with[part.stage]):
                        last.setdefault(group, {})[worker] = operation
                        missing.remove(group)
    return {group: by_worker.values() for group, by_worker in last.items()}


class Timed(NamedTuple):
    """An operation with its start and its end, in ticks."""

    operation: Operation
    start: int
    end: int

    @property
    def in_lane(self) -> bool:
        """Whether the operation occupies the worker's lane, unlike a move, which occupies the link to the host."""
        return self.operation.kind.occupies is Resource.LANE


class Track(NamedTuple):
    """The operations of a worker that occupy one of its resources (its lane, or a link to its host), in order."""

    worker: Worker
    resource: Resource
    timed: Sequence[Timed]


class Launched(NamedTuple):
    """The launch of the sum of a group's gradients on one worker; times are in the unit of the costs.

    ``free`` is how long the worker idles from the launch to the wait for the sum, or to its last operation if that
    comes first: regions (a) and (b) of Figure 6. ``flush`` is the time from the last operation to the end of the
    makespan if the wait comes after all operations, region (c); without a flush it is 0.
    """

    worker: Worker
    group: WeightGroup
    strategy: Strategy
    at: Fraction
    free: Fraction
    flush: Fraction


class Stepped(NamedTuple):
    """A step of a stream, which makes ``version`` of a group's weights."""

    worker: Worker
    group: WeightGroup
    version: Version
    at: Fraction


Event = Launched | Stepped


@dataclass(frozen=True, repr=False)
class Timeline(OneLine):
    """The start and end of every operation, ``lanes[w]`` in the order of worker w, and events that `launches` adds.

    ``tick`` is the length of a tick in the unit of the costs. ``span`` is the time shown, in ticks: an iteration, or
    the updates that a stream shows. ``clock_span`` is the length of an update if every operation but a recomputation
    takes 1. ``work`` has for each worker the time per update in which it computes, in ticks. ``steady_period`` is the
    time in ticks of each of many updates that follow one another without a barrier. ``left_out`` says in words what the
    lanes leave out, if anything: all other figures are those of the whole.
    """

    header: Header
    costs: Durations
    tick: Fraction
    span: int
    lanes: tuple[tuple[Timed, ...], ...]
    critical_path: CriticalPath
    clock_span: Fraction
    work: tuple[Fraction, ...]
    steady_period: Fraction
    events: tuple[Event, ...] = ()
    left_out: str = ""

    @property
    def shown(self) -> Fraction:
        """The time shown, in the unit of the costs."""
        return self.span * self.tick

    @property
    def makespan(self) -> Fraction:
        """The time of one update, in the unit of the costs; of a stream in its steady state."""
        return self.critical_path.length * self.tick

    @property
    def bubble_ratio(self) -> Fraction:
        """The share of the makespan, over all workers, in which they idle."""
        return idle(mean(self.work), self.critical_path.length)

    @property
    def rows(self) -> "list[Row]":
        """A row for each operation as plain values, for pandas or polars: what it is, its worker, its start and end.

        Rows go worker by worker; a pair is two rows with the same times.
        """
        return [
            {
                "worker": worker,
                "operation": line(part, self.header),
                "kind": part.kind.letter,
                "micro_batches": [*part.micros],
                "stage": part.stage,
                "pipe": self.header.pipe_of[part.micros[0]].name,
                "start": float(timed.start * self.tick),
                "end": float(timed.end * self.tick),
            }
            for worker, lane in enumerate(self.lanes)
            for timed in lane
            for part in timed.operation.parts
        ]

    @property
    def visible(self) -> "Timeline":
        """The timeline without the operations that take no time, which a picture cannot show."""
        lanes = ((timed for timed in lane if timed.end > timed.start) for lane in self.lanes)
        return replace(self, lanes=tuple(map(tuple, lanes)))

    @property
    def spans(self) -> tuple[int, ...]:
        """Each worker's own span, in ticks: from the start of its first operation to the end of its last."""
        lanes = [track.timed for track in self.tracks if track.resource is Resource.LANE]
        return tuple(lane[-1].end - lane[0].start if lane else 0 for lane in lanes)

    @cached_property
    def tracks(self) -> tuple[Track, ...]:
        """A track for the lane of each worker; then one for each other resource of a worker that operations occupy."""
        if self.header.lanes_only:
            return tuple(Track(Worker(worker), Resource.LANE, lane) for worker, lane in enumerate(self.lanes))
        tracks = {(Resource.LANE, worker): list[Timed]() for worker in range(len(self.lanes))}
        for worker, lane in enumerate(self.lanes):
            for timed in lane:
                tracks.setdefault((timed.operation.kind.occupies, worker), []).append(timed)
        return tuple(Track(Worker(worker), resource, timed) for (resource, worker), timed in tracks.items())


def simulate(schedule: Schedule, costs: Durations, net: Net | None = None) -> Timeline:
    """The timeline of a verified schedule (``net`` is its net) in which each operation starts as early as it can."""
    header, structure = schedule.header, structure_of(schedule, net)
    operations = structure.net.operations
    run = earliest(header, structure, costs)
    timed = [
        Timed(operation, end - duration, end)
        for operation, end, duration in zip(operations, run.ends, run.durations, strict=True)
    ]
    lanes = tuple(tuple(timed[lane.start : lane.stop]) for lane in structure.net.lanes)
    return Timeline(
        header=header,
        costs=costs,
        tick=run.tick,
        span=run.span,
        lanes=lanes,
        critical_path=run.critical_path,
        clock_span=unit_run(header, structure).length,
        work=tuple(_work(header, lane) for lane in lanes),
        steady_period=run.steady_period,
    )


def idle(busy: Fraction, length: Fraction) -> Fraction:
    """The idle share of a length of time of which ``busy`` is spent on work; 0 if the length is 0."""
    return 1 - busy / length if length else Fraction(0)


def mean(times: Sequence[Fraction]) -> Fraction:
    """The mean of times; 0 if there are none."""
    return sum(times, Fraction(0)) / len(times) if times else Fraction(0)


def occupying(header: Header, lane: Sequence[Timed]) -> Sequence[Timed]:
    """The operations that occupy the worker's lane itself; moves, which occupy the link to the host, are left out."""
    return lane if header.lanes_only else [timed for timed in lane if timed.in_lane]


def _work(header: Header, lane: Sequence[Timed]) -> Fraction:
    counted = header.micro_batches - header.micro_batches % (header.period or 1)
    timeds = occupying(header, lane)
    work = sum(timed.end - timed.start for timed in timeds if timed.operation.parts[0].micros[0] < counted)
    return Fraction(work * header.per_update, counted) if work else Fraction(0)


def ticks(header: Header, costs: Durations, finest: int = 0) -> tuple[Fraction, Callable[[Operation], int]]:
    """Returns a tick, of which every operation's duration is a multiple, and the function from operations to ticks.

    With ``finest``, 1 is a multiple of ``finest`` ticks.
    """
    tick = costs.tick(header)
    if finest:
        tick = Fraction(1, lcm(tick.denominator, finest))
    lengths: dict[DurationKey, int] = {}

    def duration(operation: Operation) -> int:
        key = duration_key(operation, header)
        length = lengths.get(key)
        if length is None:
            length = lengths[key] = int(costs.duration(operation, header) / tick)
        return length

    return tick, duration


# What a worker keeps over time, as rows of plain values for a table of pandas or polars.

Row = dict[str, int | float | str | list[int]]
"""A row of a table, by column."""

SizesByUnit = Callable[[int], Mapping[Counted, int]]
"""A function from a stage to the bytes that a micro-batch takes there, by unit: activations, inputs and so on."""

COLUMN_OF: Mapping[Counted, str] = {
    Counted.ACTIVATIONS: "activations",
    Counted.OPERANDS: "activations",
    Counted.INPUT: "stashed_inputs",
    Counted.CARRIES: "carries",
    Counted.CARRY_GRADIENTS: "carry_gradients",
    Counted.HOST: "on_host",
    Counted.HOST_OPERANDS: "on_host",
}
"""The column of `kept` in which each unit is counted: activations, inputs and so on."""


def dag(net: Net, costs: Durations) -> "IntGraph":
    """The graph of a ``net`` as networkx has it, with plain values, for questions that are not asked here.

    A node is the number of an operation, lane by lane, with its ``operation`` as the text has it, ``kind``,
    ``micro_batches``, ``stage``, ``worker`` and ``cost``, the time that it takes in the unit of the costs. The kind of
    a pair is as ``F+B``, its stage that of its first part. An edge says ``why`` (`Net.graph`), the graph which
    ``schedule`` it is of.
    """
    header = net.schedule.header
    tick, duration = ticks(header, costs)
    nodes = (
        {
            "operation": line(operation, header),
            "kind": "+".join(part.kind.letter for part in operation.parts),
            "micro_batches": [int(micro) for part in operation.parts for micro in part.micros],
            "stage": int(operation.parts[0].stage),
            "worker": worker,
            "cost": number(duration(operation) * tick),
        }
        for worker, lane in enumerate(net.schedule.lanes)
        for operation in lane
    )
    graph = net.graph(nodes)
    graph.graph["schedule"] = header.title
    return graph


class WorkerBytes(NamedTuple):
    """Bytes that a worker needs before its first operation, and that its stages keep of a micro-batch, by unit."""

    at_first: int
    sizes: SizesByUnit


def kept(timeline: Timeline, worker: int, bytes_of: Callable[[int], WorkerBytes] | None = None) -> list[Row]:
    """Lists the changes of what a worker keeps, a row for each: the time, the operation, what is kept from then on.

    Activations are in M_a, of which a stage keeps its share; other values are in micro-batches on a stage, and have
    columns of their own, if there are any. What an operation makes counts from its start, what it frees until its end.
    With ``bytes_of``, the bytes of a worker, each row has a number of bytes as well. Raises `IndexError` if there is no
    such worker.
    """
    if worker not in range(workers := len(timeline.lanes)):
        raise IndexError(f"worker {worker!r:.60}: there are the workers 0 to {workers - 1}")
    header, lane = timeline.header, timeline.lanes[worker]
    words_of = {_cell(part): line(timed.operation, header) for timed in lane for part in timed.operation.parts}
    changes = sorted(live.timed_changes(header, _steps(header, lane), COLUMN_OF), key=itemgetter(0))
    amounts = dict.fromkeys(["activations", *(COLUMN_OF[unit] for _, _, unit, _ in changes)], 0)
    in_bytes = bytes_of(worker) if bytes_of else None
    size = in_bytes.at_first * header.units if in_bytes else None
    rows = [_row(0.0, "", amounts, header, size)]
    for (tick, words), together in groupby(changes, lambda change: (change[0], words_of[_cell(change[1])])):
        for _, step, unit, amount in together:
            amounts[COLUMN_OF[unit]] += amount * header.size(unit, step.stage)
            if in_bytes and size is not None:
                size += amount * in_bytes.sizes(step.stage).get(unit, 0)
        rows.append(_row(float(tick * timeline.tick), words, amounts, header, size))
    return rows


def _row(time: float, words: str, amounts: Mapping[str, int], header: Header, size: int | None) -> Row:
    """Amounts are in `Header.units_of_m_a`, the ``size`` in bytes, if any, in `Header.units`; ``words`` name a step."""
    whole = {column: amount / header.units_of_m_a for column, amount in amounts.items()}
    return {"time": time, "operation": words, **whole, **({} if size is None else {"bytes": size / header.units})}


def _cell(step: live.MoveStep) -> tuple[Kind, tuple[Micro, ...], int]:
    return step.kind, step.micros, step.stage


def _steps(header: Header, lane: Sequence[Timed]) -> Iterator[tuple[live.MoveStep, int, int]]:
    """Yields what a lane does with its times: operations, launches of moves, and where it has waited for them."""
    timed_of = {_cell(part): timed for timed in lane for part in timed.operation.parts}
    now = 0
    for step in live.with_waits(header, [timed.operation for timed in lane]):
        _, start, end = timed_of[_cell(step)]
        if step.kind.moves:
            start = end = now = max(now, end) if isinstance(step, WaitMove) else now
        else:
            now = end
        yield step, start, end


# The time that each worker's link to its host is in use, and how much of it the worker computes meanwhile.


class Transfers(NamedTuple):
    """The ``time`` per update in which a worker's link to its host is in use, in the unit of the costs.

    ``hidden`` is the part of this time in which the worker computes as well.
    """

    time: Fraction
    hidden: Fraction


class Unmoved(NamedTuple):
    """The figures that a schedule had before ``--offload auto`` added moves to it, and how many moves there are.

    The activations that ``offloads`` of the ``forwards`` (of a stream, those of a turn) make move to the host.
    """

    makespan: Fraction
    activations: tuple[Fraction, ...]
    offloads: int
    forwards: int

    def as_json(self) -> dict[str, object]:
        """The figures as an object of report.json."""
        peaks = [number(peak) for peak in self.activations]
        counts = {"moved": self.offloads, "forwards": self.forwards}
        return {"makespan": number(self.makespan), "activations": peaks, **counts}


def transfers(timeline: Timeline) -> tuple[Transfers, ...]:
    """The time of each worker's transfers per update, and how much of it is hidden."""
    header = timeline.header
    if not header.moves:
        return (Transfers(Fraction(0), Fraction(0)),) * len(timeline.lanes)
    counted = header.micro_batches - header.micro_batches % (header.period or 1)
    share = timeline.tick * header.per_update / counted
    return tuple(_of_lane(header, lane, counted, share) for lane in timeline.lanes)


def _of_lane(header: Header, lane: Sequence[Timed], counted: int, share: Fraction) -> Transfers:
    moves = [timed for timed in lane if not timed.in_lane and timed.operation.parts[0].micros[0] < counted]
    computing, place, hidden = occupying(header, lane), 0, 0
    for move in moves:
        while place < len(computing) and computing[place].end <= move.start:
            place += 1
        beside = place
        while beside < len(computing) and computing[beside].start < move.end:
            hidden += min(move.end, computing[beside].end) - max(move.start, computing[beside].start)
            beside += 1
    return Transfers(sum(move.end - move.start for move in moves) * share, hidden * share)


def unmoved(schedule: Schedule, before: Timeline) -> Unmoved:
    """The figures of a schedule without its moves; ``before`` is the timeline that it had without them."""
    first = range(schedule.header.period or schedule.header.micro_batches)
    operations = [part for lane in schedule.lanes for part in singles(lane) if part.micros[0] in first]
    offloads = sum(part.kind.moves for part in operations) // 2
    forwards = sum(KEPT in part.kind.makes and not part.kind.moves for part in operations)
    lanes = tuple(tuple(timed.operation for timed in lane) for lane in before.lanes)
    peaks = live.whole(before.header, live.activations(Schedule(before.header, lanes)))
    return Unmoved(before.makespan, peaks, offloads, forwards)


# The steady state in the timeline of a stream: a stretch of time that repeats right after itself.

MOST = 6
"""The largest number of turns that a repeating stretch may have."""


class Window(NamedTuple):
    """A stretch of the steady state, from ``start`` to ``end`` in ticks, and the number of its updates."""

    start: int
    end: int
    updates: int


def steady_window(timeline: Timeline) -> Window | None:
    """The first of the shortest stretches of a stream's timeline that repeat right after themselves.

    A stretch starts with the first forward of a turn, and has the operations of one turn or several, each of which
    starts again for later micro-batches exactly the length of the stretch later. None if no stretch repeats, or with a
    flush.
    """
    header = timeline.header
    if not header.period:
        return None
    timed = sorted(chain.from_iterable(timeline.lanes), key=lambda interval: interval.start)
    starts: dict[Instruction, int] = {interval.operation: interval.start for interval in timed}
    # Try one turn, then two, and so on, from every place where a turn begins.
    counted = header.micro_batches // header.period
    in_turn = sum(interval.operation.parts[0].micros[0] < counted * header.period for interval in timed) // counted
    for turns in range(1, MOST + 1):
        updates = turns * header.per_turn
        length = updates * timeline.critical_path.length
        for start in _openings(timed, header) if length.denominator == 1 else ():
            end = start + int(length)
            inside = timed[_index(timed, start) : _index(timed, end)]
            again = ((starts.get(later(header, interval.operation, turns)), interval.start) for interval in inside)
            if len(inside) == turns * in_turn and all(after == before + end - start for after, before in again):
                return Window(start, end, updates)
    return None


def beginning(timeline: Timeline, window: Window) -> Timeline:
    """The timeline from its start to the end of a window; operations that go on longer are cut off there."""
    return replace(
        timeline,
        span=window.end,
        lanes=tuple(
            tuple(
                interval._replace(end=min(interval.end, window.end)) for interval in lane if interval.start < window.end
            )
            for lane in timeline.lanes
        ),
        events=tuple(event for event in timeline.events if event.at <= window.end * timeline.tick),
    )


def _openings(timed: Sequence[Timed], header: Header) -> list[int]:
    """The ticks at which the first micro-batch of each turn enters a stage that no other stage feeds."""
    return [
        start
        for operation, start, _ in timed
        for single in operation.parts
        if single.kind.opens and not header.feeding[single.stage] and single.micros[0] % header.period == 0
    ]


def _index(timed: Sequence[Timed], start: int) -> int:
    return bisect_left(timed, start, key=lambda interval: interval.start)
