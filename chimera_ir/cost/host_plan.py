"""Plans moves of a lane to the host and back, with which it keeps the least, while no operation waits for them.

    limit 2:  F m0 s0    F m1 s0    F m2 s0      B m0 s0
              ........   out m0     ..           back m0 during the operation before B m0

The times of the operations are given. A plan for a limit goes along the lane. Before an operation with which the lane
would keep more, it moves activations away, first those that are read last: out at the earliest time that the link to
the host has after they are made, and back at the latest before they are read. Each transfer has the link for itself.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from heapq import heappop, heappush
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from chimera_ir.cost.durations import Durations
from chimera_ir.cost.simulate import Launched, Stepped, Timed, Timeline, occupying, steady_window, ticks
from chimera_ir.errors import WrongOption
from chimera_ir.flow.engine import steady_run
from chimera_ir.flow.live import made_and_freed, most_kept
from chimera_ir.flow.net import Net, net_of, turn_net
from chimera_ir.ir.kinds import KEPT, OFFLOAD, RELOAD
from chimera_ir.ir.levels import Bound, Header, Program, Quantity, Schedule
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    LaneParts,
    Micro,
    Operation,
    Stage,
    Step,
    WaitAllReduce,
    WeightGroup,
    Worker,
    singles,
)
from chimera_ir.ir.streams import ScheduleStream, stream_with
from chimera_ir.ir.turns import moved, turn_number

# The launches of gradient sums and the steps of each worker, and the free time for the sums (sections 3.2, 3.4).

LaunchPlaces = Sequence[Sequence[tuple[int, WeightGroup]]]
"""Launches by worker, in order: the number of operations that run before the launch, and the group that is summed."""


def launches(program: Program, timeline: Timeline) -> tuple[Launched, ...]:
    """The launches of gradient sums, worker by worker in the order of the lanes, with their times in the timeline.

    For a stream these are only those in a stretch of the steady state (`steady_window`), none without such a stretch.
    """
    all_launches = tuple(_launches(program, timeline))
    if not program.header.asynchronous:
        return all_launches
    window = steady_window(timeline)
    if window is None:
        return ()
    start, end = window.start * timeline.tick, window.end * timeline.tick
    return tuple(launched for launched in all_launches if start < launched.at <= end)


def launch_places(program: Program) -> LaunchPlaces:
    """The launches of each worker: the number of compute operations before it in the lane, and its weight group."""
    return [
        [(done, instruction.group) for done, instruction in _after(parts) if isinstance(instruction, AllReduce)]
        for parts in program.parts
    ]


def steps(program: Program, timeline: Timeline) -> tuple[Stepped, ...]:
    """All steps of a stream, worker by worker, each at the end of the operation before the step."""
    return tuple(
        Stepped(Worker(worker), instruction.group, instruction.version, _end(timed, done) * timeline.tick)
        for worker, (parts, timed) in enumerate(zip(program.parts, timeline.lanes, strict=True))
        for done, instruction in _after(parts)
        if isinstance(instruction, Step) and instruction.version is not None
    )


def with_events(timeline: Timeline, program: Program) -> Timeline:
    """Returns the timeline with the events that a picture marks: launches of sums or, without a flush, steps."""
    events = steps if program.header.steps_inside else launches
    return replace(timeline, events=events(program, timeline))


def _launches(program: Program, timeline: Timeline) -> Iterator[Launched]:
    for worker, (parts, timed) in enumerate(zip(program.parts, timeline.lanes, strict=True)):
        lines = list(_after(parts))
        waits = {
            (instruction.group, instruction.version): done
            for done, instruction in lines
            if isinstance(instruction, WaitAllReduce)
        }
        for done, instruction in lines:
            if isinstance(instruction, AllReduce):
                waited = waits[instruction.group, instruction.version]
                yield _launched(Worker(worker), instruction.group, timed, done, waited, timeline)


def _after(parts: LaneParts) -> Iterator[tuple[int, AllReduce | WaitAllReduce | Step]]:
    for place, instruction in parts.updates:
        if isinstance(instruction, AllReduce | WaitAllReduce | Step):
            yield bisect_left(parts.computes.places, place), instruction


def _launched(
    worker: Worker, group: WeightGroup, timed: tuple[Timed, ...], done: int, waited: int, timeline: Timeline
) -> Launched:
    """The sum comes after the first ``done`` operations of the lane ``timed``, the wait for it after ``waited``."""
    header, at, last = timeline.header, _end(timed, done), _end(timed, len(timed))
    until = timed[waited].start if waited < len(timed) else last
    busy = sum(interval.end - interval.start for interval in occupying(header, timed[done:waited]))
    flush = 0 if waited < len(timed) or header.steps_inside else timeline.span - last
    return Launched(
        worker=worker,
        group=group,
        strategy=header.strategy(group),
        at=at * timeline.tick,
        free=(until - at - busy) * timeline.tick,
        flush=flush * timeline.tick,
    )


def _end(timed: tuple[Timed, ...], done: int) -> int:
    return timed[done - 1].end if done else 0


Time = int | Fraction


class TimedStep(NamedTuple):
    """An operation of a lane, from ``start`` to ``end``."""

    operation: Operation
    start: Time
    end: Time


class TimedLane(NamedTuple):
    """The operations of a lane in order, with their times.

    For a stream, ``steps`` has several ``turns``, one after another, each a ``period`` later than the one before. Moves
    are planned for the turn number ``planned``, counted from 0, and repeat in all turns. With a flush there is one
    turn.
    """

    steps: Sequence[TimedStep]
    planned: int = 0
    turns: int = 1
    period: Time = 0

    @property
    def length(self) -> int:
        """The number of operations of a turn."""
        return len(self.steps) // self.turns

    @property
    def places(self) -> range:
        """The places of the operations of the turn that is planned."""
        return range(self.planned * self.length, (self.planned + 1) * self.length)

    @property
    def shifts(self) -> range:
        """The numbers of turns by which one turn can be later than another: 1 - ``turns`` to ``turns`` - 1."""
        return range(1 - self.turns, self.turns)


class MoveLaunch(NamedTuple):
    """The launch of a move at time ``start``, before the operation number ``place`` of the planned turn.

    ``operation`` is the move with the micro-batches of the planned turn that it was found for; launched at ``place``,
    it moves those ``turns`` turns later.
    """

    place: int
    start: Time
    operation: Compute
    turns: int


class _Interval(NamedTuple):
    """Activations that could move: ``made`` by the forward ``part``, first ``read``, at these places in the lane."""

    made: int
    read: int
    micros: tuple[Micro, ...]
    part: Compute


class _TimeOnLink(NamedTuple):
    start: Time
    end: Time


class _TakenTimes:
    """The times at which transfers take a worker's link to its host; each transfer comes again in every turn."""

    def __init__(self, lane: TimedLane) -> None:
        self._transfers: list[_TimeOnLink] = []
        self._after = [turn * lane.period for turn in lane.shifts]
        self._longest = lane.period if lane.turns > 1 else None

    def take(self, transfer: _TimeOnLink) -> None:
        for after in self._after:
            insort(self._transfers, _TimeOnLink(transfer.start + after, transfer.end + after))

    def give_back(self, transfer: _TimeOnLink) -> None:
        for after in self._after:
            self._transfers.remove(_TimeOnLink(transfer.start + after, transfer.end + after))

    def earliest(self, begin: Time, length: Time, latest_end: Time) -> _TimeOnLink | None:
        """The earliest free time of this length from ``begin`` to ``latest_end``; None if there is none."""
        if self._longest is not None and length > self._longest:
            return None
        start, place = begin, bisect_right(self._transfers, begin, key=attrgetter("start"))
        if place:
            start = max(start, self._transfers[place - 1].end)
        while start + length <= latest_end:
            if place == len(self._transfers) or start + length <= self._transfers[place].start:
                return _TimeOnLink(start, start + length)
            start, place = self._transfers[place].end, place + 1
        return None

    def latest(self, earliest_start: Time, length: Time, end: Time) -> _TimeOnLink | None:
        """The latest free time of this length from ``earliest_start`` to ``end``; None if there is none."""
        if self._longest is not None and length > self._longest:
            return None
        place = bisect_left(self._transfers, end, key=attrgetter("start"))
        while end - length >= earliest_start:
            before = self._transfers[place - 1] if place else None
            if before is None or before.end <= end - length:
                return _TimeOnLink(end - length, end)
            end, place = min(end, before.start), place - 1
        return None


class HostPlan:
    """Plans the moves of a lane to the host and back, for any limit on what the lane keeps (`launches`).

    ``ticks`` gives the time of a move, of which ``share`` counts. ``peak`` is the most that the lane keeps if nothing
    moves. Amounts are in units: M_a has `Header.units_of_m_a` of them.
    """

    def __init__(self, header: Header, lane: TimedLane, ticks: Callable[[Compute], Time], share: Fraction) -> None:
        self._header, self._lane, self._ticks, self._share = header, lane, ticks, share
        self._starts = [step.start for step in lane.steps]
        self._ends = [step.end for step in lane.steps]
        self._intervals = list(self._all_intervals())
        self._kept = list(self._kept_unmoved())
        places = lane.places
        self.peak = max((self._kept[place] for place in places), default=0)

    @property
    def least(self) -> int:
        """The most units that a single operation makes: no plan keeps fewer."""
        lanes = (made_and_freed(self._header, self._lane.steps[place].operation)[0] for place in self._lane.places)
        return max(lanes, default=0)

    def launches(self, limit: int) -> list[MoveLaunch] | None:
        """The launches of a plan with which the lane keeps no more than ``limit``, in order; None if none is found."""
        link, away = _TakenTimes(self._lane), [0] * len(self._lane.steps)
        moves: dict[int, list[tuple[_TimeOnLink, Compute]]] = {}
        # The activations made so far that have not moved, those that are read last first.
        waiting: list[tuple[int, int, _Interval]] = []
        following = iter([*self._intervals, None])
        interval = next(following)
        for place in self._lane.places:
            while interval is not None and interval.made < place:
                heappush(waiting, (-interval.read, interval.made, interval))
                interval = next(following)
            unmovable = []
            while self._kept[place] - away[place] > limit:
                if not waiting or -waiting[0][0] <= place:
                    return None
                entry = heappop(waiting)
                of_turn = entry[2].made % self._lane.length
                if of_turn in moves:
                    continue
                if both := self._transfers(link, entry[2], place):
                    moves[of_turn] = both
                    self._move_away(away, entry[2], *(transfer for transfer, _ in both))
                else:
                    unmovable.append(entry)
            for entry in unmovable:
                heappush(waiting, entry)
        launches = self._launched(move for both in moves.values() for move in both)
        return sorted(launches, key=attrgetter("place", "start"))

    def _transfers(self, link: _TakenTimes, interval: _Interval, place: int) -> list[tuple[_TimeOnLink, Compute]]:
        """Takes times on the link for the offload and the reload of activations, so that they are away at ``place``.

        Returns both times, each with its move; nothing, and takes no time, if the link is not free for both.
        """
        out, back = (
            Compute(kind, interval.micros, interval.part.stage, interval.part.origin) for kind in (OFFLOAD, RELOAD)
        )
        leaving = link.earliest(self._ends[interval.made], self._ticks(out) * self._share, self._starts[place])
        if leaving is None:
            return []
        link.take(leaving)
        returning = link.latest(self._ends[place], self._ticks(back) * self._share, self._starts[interval.read])
        if returning is None:
            link.give_back(leaving)
            return []
        link.take(returning)
        return [(leaving, out), (returning, back)]

    def _move_away(self, away: list[int], interval: _Interval, leaving: _TimeOnLink, returning: _TimeOnLink) -> None:
        """Adds activations to ``away``, which has the units that are away while each operation of the lane runs.

        They are away in every turn, from the wait for their offload to the launch of their reload.
        """
        first = bisect_left(self._starts, leaving.end)
        for turn in self._lane.shifts:
            after = turn * self._lane.length
            for place in range(max(0, first + after), min(len(away), self._place(returning) + after)):
                away[place] += self._header.length(interval.micros) * self._header.sizes[interval.part.stage]

    def _place(self, transfer: _TimeOnLink) -> int:
        """The place in the lane of the operation before which a transfer is launched: all before it are over."""
        return bisect_right(self._ends, transfer.start)

    def _launched(self, moves: Iterable[tuple[_TimeOnLink, Compute]]) -> Iterator[MoveLaunch]:
        """Yields a launch for each move, shifted by whole turns into the planned one."""
        places = self._lane.places
        for transfer, operation in moves:
            turn, place = divmod(self._place(transfer) - places.start, self._lane.length)
            if self._lane.turns == 1:
                turn, place = 0, self._place(transfer)
            yield MoveLaunch(place, transfer.start - turn * self._lane.period, operation, -turn)

    def _all_intervals(self) -> Iterator[_Interval]:
        """Yields the activations of the lane that could move, in the order in which they are made."""
        read: dict[tuple[Micro, Stage], int] = {}
        steps = self._lane.steps
        for place in reversed(range(len(steps))):
            for part in steps[place].operation.parts:
                if KEPT in part.kind.reads:
                    read.update(((micro, part.stage), place) for micro in part.micros)
        for place, step in enumerate(steps):
            for part in step.operation.parts:
                if KEPT not in part.kind.makes or not self._header.fed[part.stage]:
                    continue
                readers = [read.get((micro, part.stage)) for micro in part.micros]
                first = min((reader for reader in readers if reader is not None), default=None)
                if first is not None and None not in readers:
                    yield _Interval(place, first, part.micros, part)

    def _kept_unmoved(self) -> Iterator[int]:
        """Yields the units that each operation of the lane keeps while it runs, if nothing moves."""
        amount, begun = 0, set[tuple[Micro, Stage]]()
        for step in self._lane.steps:
            cells = {(micro, part.stage) for part in step.operation.parts for micro in part.micros}
            begun.update(
                (micro, part.stage) for part in step.operation.parts for micro in part.micros if part.kind.opens
            )
            # Of a stream, what a turn before the first one has made does not count.
            made, freed = made_and_freed(self._header, step.operation) if cells <= begun else (0, 0)
            yield amount + made
            amount += made - freed


# The pass that adds moves to the host to a schedule, where they fit beside its operations (`--offload auto`).
#
# memory activations <= 4 (none declared)   memory activations <= 2 ..
#
# worker 0:                                 worker 0:
#   F m0 s0                                   F m0 s0
#   F m1 s0                                   offload m0 s0       (runs beside F m1)
#   ..                                        F m1 s0
#   B m0 s0                                   ..
#                                             reload m0 s0        (runs beside the operation before B m0)
#                                             ..
#                                             B m0 s0
#
# The rule is that of selective offload (Wan et al., "PipeOffload", ICML 2025): activations move only if the time of
# both transfers lies between the operation that makes them and the first that reads them, and a stage that feeds no
# other keeps everything, because its backwards come right after its forwards. `host_plan` chooses among these
# activations. If the schedule declares a bound on activations, as many move as the bound asks for. Else each worker
# keeps as little as it can while no operation waits for a transfer, and this amount becomes a declared bound of the
# schedule: a lane waits for an offload only where it would keep more.

_SHARES = (Fraction(1), Fraction(1, 2), Fraction(1, 4), Fraction(0))
"""Factors on the time of transfers, as if the link were faster.

Moves are planned with one factor after another, until a plan keeps no more than the schedule's declared bound.
"""


class Moved(NamedTuple):
    """A schedule to which moves were added, and the timeline that it had without them (``before``)."""

    schedule: Schedule | ScheduleStream
    before: Timeline


def offload(
    level: Schedule | ScheduleStream, durations: Durations, net: Net | None = None
) -> Schedule | ScheduleStream:
    """Adds offloads and reloads to a schedule, by the rule of this module; returns it as it is if nothing can move.

    ``level`` has no moves yet, and no errors, except that it may exceed its declared bounds. ``net`` is the net of a
    schedule with a flush, if known already.
    """
    header = replace(level.header, moves=True)
    tick, duration = ticks(header, durations)

    def of_move(operation: Compute) -> Time:
        """The duration of a move, which need not be a whole number of ticks."""
        return durations.duration(operation, header) / tick

    if isinstance(level, Schedule):
        net = net or net_of(level)
        lengths = list(map(duration, net.operations))
        ends = net.ends(lengths)
        timed = [
            TimedLane([TimedStep(net.operations[n], ends[n] - lengths[n], ends[n]) for n in numbers])
            for numbers in net.lanes
        ]
    else:
        timed = list(_steady_lanes(level, duration))
    declared = next((bound.limits for bound in header.bounds if bound.quantity is Quantity.ACTIVATIONS), None)
    lanes = [
        moving_lane(header, lane, of_move, int(limit * header.units_of_m_a))
        for lane, limit in zip(timed, declared or (0,) * len(timed), strict=True)
    ]
    if not any(operation.kind.moves for lane in lanes for operation in lane.operations):
        return level
    if declared is None:
        limits = tuple(Fraction(lane.limit, header.units_of_m_a) for lane in lanes)
        header = replace(header, bounds=(*header.bounds, Bound(Quantity.ACTIVATIONS, limits)))
    if isinstance(level, Schedule):
        return Schedule(header, tuple(lane.operations for lane in lanes))
    return stream_with(header, [tuple(singles(lane.operations)) for lane in lanes])


def require_movable(schedule: Schedule | ScheduleStream, *, is_program: bool) -> None:
    """Raises `WrongOption` for a schedule to which no moves can be added: one that has some, or that of a program."""
    name = schedule.header.scheme
    if is_program:
        raise WrongOption("offload", f": the text of the program of {name} says itself what moves; give its schedule")
    if schedule.header.moves:
        raise WrongOption("offload", f": {name} says itself what moves to the host, and when")


class LaneWithMoves(NamedTuple):
    """A lane, or the turn of one, with its moves; it keeps at most ``limit`` of `Header.units_of_m_a`."""

    operations: tuple[Operation, ...]
    limit: int


def _steady_lanes(stream: ScheduleStream, duration: Callable[[Operation], int]) -> Iterator[TimedLane]:
    """Yields each lane of a stream in several turns of the earliest run that repeats; the middle one is planned."""
    header, net = stream.header, turn_net(stream)
    lengths = list(map(duration, net.operations))
    run = steady_run(net.waits, lengths, [turn_number(header, operation) for operation in net.operations])
    for lane in net.lanes:
        # As many turns on both sides of the one that is planned as activations can wait.
        turns = [micro // header.period for operation in lane.operations for micro in operation.micros]
        spread = max(turns, default=0) - min(turns, default=0) + 1
        steps = []
        for number in range(-spread, spread + 1):
            for node, operation in enumerate(lane.operations, lane.first):
                end = run.ends[node] + number * run.ratio
                later = replace(operation, micros=moved(operation.micros, number * header.period))
                steps.append(TimedStep(later, end - lengths[node], end))
        yield TimedLane(steps, spread, 2 * spread + 1, run.ratio)


def moving_lane(header: Header, lane: TimedLane, of_move: Callable[[Compute], Time], declared: int) -> LaneWithMoves:
    """Adds moves to a lane, so that it keeps no more than ``declared`` units or, if that is 0, as few as possible.

    ``of_move`` gives the time of a move. If the link is too slow for the declared bound, moves are planned as for a
    faster link, and the lane then waits for them. If that does not help either, the lane is returned without moves.
    """
    operations = [lane.steps[place].operation for place in lane.places]
    for share in _SHARES if declared else _SHARES[:1]:
        plan = HostPlan(header, lane, of_move, share)
        for limit in [declared] if declared else range(plan.least, plan.peak):
            launches = plan.launches(limit)
            if launches is None:
                continue
            moving = tuple(_offloaded(header, operations, launches))
            if most_kept(header, moving, limit) <= limit:
                return LaneWithMoves(moving, limit)
    return LaneWithMoves(tuple(operations), plan.peak)


def _offloaded(header: Header, lane: Sequence[Operation], launches: Sequence[MoveLaunch]) -> Iterator[Operation]:
    before = {place: list(several) for place, several in groupby(launches, attrgetter("place"))}
    for place in range(len(lane) + 1):
        for launch in before.get(place, ()):
            micros = moved(launch.operation.micros, launch.turns * header.period)
            yield replace(launch.operation, micros=micros)
        yield from lane[place : place + 1]
