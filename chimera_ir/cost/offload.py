"""The pass that adds moves to the host to a schedule, where they fit beside its operations (`--offload auto`).

worker 0:               worker 0:
  F m0 s0                 F m0 s0
  F m1 s0                 offload m0 s0       (runs beside F m1)
  ..                      F m1 s0
  B m0 s0                 ..
                          reload m0 s0        (runs beside the operation before B m0)
                          ..
                          B m0 s0

The rule is that of selective offload (Wan et al., "PipeOffload", ICML 2025): activations move if the time of both
transfers lies between the operation that makes them and the first that reads them. What waits longest comes first. A
transfer gets a time of its worker's link to the host that no other has: an offload the earliest after its activations
are made, in which it ends with the operation beside which it begins; a reload the latest before they are read. So no
operation waits for a transfer. A stage that feeds no other keeps everything: its backwards come right after its
forwards.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from chimera_ir.cost.simulate import Timed, Timeline
from chimera_ir.errors import WrongOption
from chimera_ir.ir.ids import Micro, Stage
from chimera_ir.ir.kinds import KEPT, OFFLOAD, RELOAD
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Compute, Operation
from chimera_ir.ir.streams import ScheduleStream

Time = int | Fraction


def offload(schedule: Schedule, timeline: Timeline) -> Schedule:
    """The schedule with an offload and a reload of all activations that the rule of this module moves.

    ``timeline`` is that of the schedule, which has no moves of its own.
    """
    header = replace(schedule.header, moves=True)

    def ticks(operation: Compute) -> Time:
        """The duration of a move, which need not be a whole number of ticks."""
        return timeline.costs.duration(operation, header) / timeline.tick

    lanes = tuple(
        _with_moves(lane, timed, list(_moved(header, timed, ticks)))
        for lane, timed in zip(schedule.lanes, timeline.lanes, strict=True)
    )
    return Schedule(header, lanes) if lanes != schedule.lanes else schedule


class Moved(NamedTuple):
    """A schedule to which moves were added, and its timeline ``before`` that."""

    schedule: Schedule
    before: Timeline


def require_movable(schedule: Schedule | ScheduleStream, *, is_program: bool) -> Schedule:
    """The schedule, to which moves can be added; raises `WrongOption` if it has moves, has no flush, or is a program's.

    The text of a program says everything that each worker does.
    """
    name = schedule.header.scheme
    if is_program:
        raise WrongOption("offload", f": the text of the program of {name} says itself what moves; give its schedule")
    if schedule.header.moves:
        raise WrongOption("offload", f": {name} says itself what moves to the host, and when")
    if isinstance(schedule, ScheduleStream) or schedule.header.asynchronous:
        raise WrongOption("offload", f": {name} has no flush: write `offload` and `reload` with their clocks")
    return schedule


class _Interval(NamedTuple):
    """Activations between the operation that makes them and the first that reads them, both by their place in a lane.

    ``length`` is the time between both operations; ``out`` and ``back`` are the operations that would move them.
    """

    length: Time
    made: int
    read: int
    out: Compute
    back: Compute


class _PlannedMove(NamedTuple):
    """A transfer, from ``start`` to ``end``."""

    start: Time
    end: Time
    operation: Compute


class _LinkPlan:
    """The times of a worker's link to the host that transfers have taken."""

    def __init__(self) -> None:
        self.planned: list[_PlannedMove] = []

    def earliest(self, begin: Time, length: Time, latest_end: Time) -> Time | None:
        """The earliest start of a transfer of this length from ``begin`` on that ends by ``latest_end``."""
        start, place = begin, bisect_right(self.planned, begin, key=attrgetter("start"))
        if place:
            start = max(start, self.planned[place - 1].end)
        while start + length <= latest_end:
            if place == len(self.planned) or start + length <= self.planned[place].start:
                return start
            start, place = self.planned[place].end, place + 1
        return None

    def latest(self, earliest_start: Time, length: Time, end: Time) -> Time | None:
        """The latest start of a transfer of this length from ``earliest_start`` on that ends by ``end``."""
        place = bisect_right(self.planned, end, key=attrgetter("start"))
        while end - length >= earliest_start:
            before = self.planned[place - 1] if place else None
            if before is None or before.end <= end - length:
                return end - length
            end, place = min(end, before.start), place - 1
        return None


def _moved(header: Header, lane: Sequence[Timed], ticks: Callable[[Compute], Time]) -> Iterator[_PlannedMove]:
    """Yields the transfers of a lane, those of one offload and its reload at a time."""
    link = _LinkPlan()
    for interval in sorted(_intervals(header, lane), key=lambda interval: (-interval.length, interval.made)):
        lengths = ticks(interval.out), ticks(interval.back)
        if sum(lengths) > interval.length:
            continue
        place = _beside(link, lane[interval.made + 1 : interval.read], lane[interval.made].end, lengths[0])
        if place is None:
            continue
        back = link.latest(place.over, lengths[1], lane[interval.read].start)
        if back is not None:
            both = (
                _PlannedMove(place.start, place.start + lengths[0], interval.out),
                _PlannedMove(back, back + lengths[1], interval.back),
            )
            for transfer in both:
                insort(link.planned, transfer, key=attrgetter("start"))
            yield from both


class _Beside(NamedTuple):
    """The start of an offload, and the time at which the operation beside which it runs is ``over``."""

    start: Time
    over: Time


def _beside(link: _LinkPlan, following: Sequence[Timed], begin: Time, length: Time) -> _Beside | None:
    """The earliest start of an offload beside an operation of ``following``, all of which come after ``begin``.

    The lane waits for an offload behind that operation.
    """
    for operation in following:
        start = link.earliest(begin, length, operation.end)
        if start is not None:
            return _Beside(start, operation.end)
        begin = operation.end
    return None


def _intervals(header: Header, lane: Sequence[Timed]) -> Iterator[_Interval]:
    """Yields the activations of a lane that could move."""
    read: dict[tuple[Micro, Stage], int] = {}
    for place in reversed(range(len(lane))):
        for part in lane[place].operation.parts:
            if KEPT in part.kind.reads:
                read.update(((micro, part.stage), place) for micro in part.micros)
    for place, timed in enumerate(lane):
        for part in timed.operation.parts:
            if KEPT not in part.kind.makes or not header.fed[part.stage]:
                continue
            first = min(read[micro, part.stage] for micro in part.micros)
            moves = (Compute(kind, part.micros, part.stage, part.origin) for kind in (OFFLOAD, RELOAD))
            yield _Interval(lane[first].start - timed.end, place, first, *moves)


def _with_moves(
    lane: Sequence[Operation], timed: Sequence[Timed], transfers: Sequence[_PlannedMove]
) -> tuple[Operation, ...]:
    """The lane with its moves: each is launched after the last operation that ends before its transfer begins."""
    ends = [operation.end for operation in timed]
    launches: list[list[Compute]] = [[] for _ in range(len(lane) + 1)]
    for transfer in sorted(transfers, key=attrgetter("start")):
        launches[bisect_right(ends, transfer.start)].append(transfer.operation)
    return tuple(
        chain.from_iterable(
            (*launched, *following) for launched, following in zip(launches, [*zip(lane), ()], strict=True)
        )
    )
