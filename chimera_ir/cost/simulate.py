"""The earliest timeline: every operation starts as soon as its data have arrived and its worker is free.

Communication is free here, as in the paper's analysis (section 2). Time is counted in whole ticks, a unit of which
every duration is a multiple, so that the result is exact and the arithmetic fast.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from chimera_ir.cost.critical import CriticalPath, Structure, critical_path, structure_of, update_length
from chimera_ir.cost.durations import DurationKey, Durations, duration_key
from chimera_ir.cost.overlap import steady_period
from chimera_ir.flow.net import Net
from chimera_ir.ir.ids import Version, WeightGroup, Worker
from chimera_ir.ir.kinds import RECOMPUTATION, Resource
from chimera_ir.ir.levels import Header, Schedule, Strategy
from chimera_ir.ir.one_line import OneLine
from chimera_ir.ir.ops import Operation

if TYPE_CHECKING:
    from chimera_ir.cost.curves import Row


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


@dataclass(frozen=True, slots=True)
class Launched:
    """The launch of the sum of a group's gradients on one worker; times are in the unit of the costs.

    ``free`` is how long the worker idles from the launch to the wait for the sum, or to the worker's last operation if
    that comes first: regions (a) and (b) of Figure 6. ``flush`` is the time from the last operation to the end of the
    makespan if the wait comes after all operations, region (c); without a flush it is 0.
    """

    worker: Worker
    group: WeightGroup
    strategy: Strategy
    at: Fraction
    free: Fraction
    flush: Fraction


@dataclass(frozen=True, slots=True)
class Stepped:
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
    the updates that a stream shows (`window.beginning` cuts this short). ``clock_span`` is the length of an update if
    every operation but a recomputation takes 1. ``work`` has for each worker the time per update in which it computes,
    in ticks. ``steady_period`` is the time in ticks of each of many updates that follow one another without a barrier.
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
        """A row for each operation, as plain values for pandas or polars: what it is, its worker, its start and end."""
        from chimera_ir.cost.curves import operations

        return operations(self)

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


@dataclass(frozen=True)
class TimedRun:
    """The run in which each operation starts as early as it can; all times are in ticks.

    ``tick`` is the length of a tick in the unit of the costs. ``durations`` has the ticks of each operation, in the
    order of ``structure.net``; `ends` has the same order.
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
        """The time of an update."""
        if self.structure.waits:
            return update_length(self.header, self.structure, self.durations)
        return Fraction(self.span)

    @property
    def critical_path(self) -> CriticalPath:
        """A critical path with the largest number of backwards (C_b)."""
        return critical_path(self.header, self.structure, self.durations)[0]


def earliest(header: Header, structure: Structure, costs: Durations) -> TimedRun:
    """The run of a schedule with these costs in which each operation starts as early as it can.

    ``structure`` is the schedule's structure. Nothing is computed before a property of the run is read.
    """
    tick, duration = ticks(header, costs)
    return TimedRun(header, structure, tick, [duration(operation) for operation in structure.net.operations])


def simulate(schedule: Schedule, costs: Durations, net: Net | None = None) -> Timeline:
    """The timeline of a verified schedule in which each operation starts as early as it can.

    ``net`` is the schedule's graph of operations and waits, if the caller has it.
    """
    header, structure = schedule.header, structure_of(schedule, net)
    operations = structure.net.operations
    run = earliest(header, structure, costs)
    path, ends = critical_path(header, structure, run.durations)
    timed = [
        Timed(operation, end - duration, end)
        for operation, end, duration in zip(operations, ends, run.durations, strict=True)
    ]
    lanes = tuple(tuple(timed[lane.start : lane.stop]) for lane in structure.net.lanes)
    return Timeline(
        header=header,
        costs=costs,
        tick=run.tick,
        span=max(ends, default=0),
        lanes=lanes,
        critical_path=path,
        clock_span=update_length(
            header, structure, [int(operation.kind is not RECOMPUTATION) for operation in operations]
        ),
        work=tuple(_work(header, lane) for lane in lanes),
        steady_period=path.length if structure.waits else steady_period(header, structure.net, run.durations, path),
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
    """The time per update in which a worker computes, in ticks; of a stream only whole turns count."""
    counted = header.micro_batches - header.micro_batches % (header.period or 1)
    timeds = occupying(header, lane)
    work = sum(timed.end - timed.start for timed in timeds if timed.operation.parts[0].micros[0] < counted)
    return Fraction(work * header.per_update, counted) if work else Fraction(0)


def ticks(header: Header, costs: Durations) -> tuple[Fraction, Callable[[Operation], int]]:
    """Returns a tick, of which every operation's duration is a multiple, and the function from operations to ticks."""
    tick = costs.tick(header)
    lengths: dict[DurationKey, int] = {}

    def duration(operation: Operation) -> int:
        key = duration_key(operation, header)
        length = lengths.get(key)
        if length is None:
            length = lengths[key] = int(costs.duration(operation, header) / tick)
        return length

    return tick, duration
