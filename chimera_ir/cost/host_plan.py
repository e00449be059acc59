"""Plans moves of a lane to the host and back, with which it keeps the least, while no operation waits for them.

    limit 2:  F m0 s0    F m1 s0    F m2 s0      B m0 s0
              ........   out m0     ..           back m0 during the operation before B m0

The times of the operations are given. A plan for a limit goes along the lane. Before an operation with which the lane
would keep more, it moves activations away, first those that are read last: out at the earliest time that the link to
the host has after they are made, and back at the latest before they are read. Each transfer has the link for itself.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from chimera_ir.flow.host_moves import made_and_freed
from chimera_ir.ir.ids import Micro, Stage
from chimera_ir.ir.kinds import KEPT, OFFLOAD, RELOAD
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute, Operation

Time = int | Fraction


class TimedStep(NamedTuple):
    """An operation of a lane, from ``start`` to ``end``."""

    operation: Operation
    start: Time
    end: Time


@dataclass(frozen=True, slots=True)
class TimedLane:
    """The operations of a lane in order, with their times.

    For a stream, ``steps`` has several ``turns``, one after another: each has `length` operations, which run a
    ``period`` later than those of the turn before. Moves are planned for the turn number ``planned``, counted from 0,
    and repeat in all turns. With a flush there is one turn.
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
    """The launch of a move in the planned turn, before the operation that has the number ``place`` in that turn.

    The transfer begins at the time ``start``. ``operation`` is the move with the micro-batches of the planned turn that
    it was found for. Launched at ``place`` of that turn, it moves the micro-batches ``turns`` turns later than these,
    or earlier if ``turns`` is negative.
    """

    place: int
    start: Time
    operation: Compute
    turns: int


class _Interval(NamedTuple):
    """Activations that could move, from the operation of the lane that makes them to the first that reads them.

    ``made`` and ``read`` are the places of these two operations in the lane. ``part`` is the forward that makes the
    activations, ``micros`` are the micro-batches that it runs.
    """

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

    ``ticks`` gives the time that a move takes on the link. ``peak`` is the most that the lane keeps if nothing moves.
    Amounts are in units: a micro-batch has `Header.units` of them.
    """

    def __init__(self, header: Header, lane: TimedLane, ticks: Callable[[Compute], Time]) -> None:
        self._header, self._lane, self._ticks = header, lane, ticks
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

        Returns both times, each with its move. Returns nothing, and takes no time, if the link is not free for both.
        """
        out, back = (
            Compute(kind, interval.micros, interval.part.stage, interval.part.origin) for kind in (OFFLOAD, RELOAD)
        )
        leaving = link.earliest(self._ends[interval.made], self._ticks(out), self._starts[place])
        if leaving is None:
            return []
        link.take(leaving)
        returning = link.latest(self._ends[place], self._ticks(back), self._starts[interval.read])
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
                away[place] += self._header.length(interval.micros)

    def _place(self, transfer: _TimeOnLink) -> int:
        """The place in the lane of the operation before which a transfer is launched.

        All operations before this place are over when the transfer begins.
        """
        return bisect_right(self._ends, transfer.start)

    def _launched(self, moves: Iterable[tuple[_TimeOnLink, Compute]]) -> Iterator[MoveLaunch]:
        """Yields a launch for each move and its time on the link, as it comes in the planned turn.

        A move that was found for another turn than the planned one is shifted by whole turns.
        """
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
        """Yields for each operation of the lane the units that it keeps while the operation runs, if nothing moves."""
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
