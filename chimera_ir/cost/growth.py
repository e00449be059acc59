"""The figures of a schedule with more turns than were simulated.

Once the ends of all operations of a turn have grown by the same time since the turn before, for as many turns as any
operation waits back, they do so for ever: an operation starts as soon as the last of those that it waits for has ended,
so if these all end later by that time, it does as well. What follows the turns ends later by that time for each further
turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from chimera_ir.cost.durations import Durations
from chimera_ir.cost.report import Figures
from chimera_ir.cost.simulate import (
    Launched,
    TimedRun,
    Timeline,
    Transfers,
    counts_on,
    earliest,
    joint_lengths,
    occupying,
    simulate,
    structure_of,
    transfers,
    unit_run,
)
from chimera_ir.flow.net import Net
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Operation

Cuts = Sequence[tuple[int, int]]
"""The places in each list of operations at which a turn begins and ends; further turns come after it."""


@dataclass(frozen=True)
class Turns:
    """The turns of a simulated schedule: ``count`` further ones come at the second of its ``cuts``.

    Each list has ``before`` turns before that cut, and ``after`` turns after it. ``net`` is the net of the schedule;
    ``longer`` returns the schedule with some of the further turns.
    """

    header: Header
    net: Net
    cuts: Cuts
    count: int
    before: int
    after: int
    longer: Callable[[int], Schedule]

    @cached_property
    def settled(self) -> "_Settled":
        """The operations that must have settled."""
        return _Settled.of(self)


class Unsettled(Exception):
    """The times of a schedule do not grow alike in all turns, so those of further turns are not known."""


def grown(figures: Figures, timeline: Timeline, turns: Turns) -> Figures:
    """The figures with all further turns, from those of the simulated schedule; raises `Unsettled`."""
    header, net, cuts, count = timeline.header, turns.net, turns.cuts, turns.count
    structure = structure_of(net.schedule, net)
    run = earliest(header, structure, timeline.costs)
    settled = turns.settled
    rate, clocks = settled.rate(run.ends), settled.rate(unit_run(header, structure).ends)
    if rate is None or clocks is None:
        raise Unsettled
    path = settled.path(run, count)
    tick, added = timeline.tick, rate * count
    longer = _one_more(turns, timeline, rate) if header.moves or not run.follows_at_once else None
    work = [
        total + tick * count * sum(timed.end - timed.start for timed in occupying(header, lane[start:end]))
        for total, lane, (start, end) in zip(figures.work, timeline.lanes, cuts, strict=True)
    ]
    links = figures.host_links
    if longer:
        links = tuple(
            Transfers(*(now + count * (then - now) for now, then in zip(link, later, strict=True)))
            for link, later in zip(links, transfers(longer), strict=True)
        )
    return replace(
        figures,
        header=turns.header,
        path=path,
        makespan=figures.makespan + tick * added,
        work=tuple(work),
        spans=tuple(span + tick * added for span in figures.spans),
        steady_period=figures.steady_period + tick * added,
        counts=counts_on(turns.header, net, path),
        clock_span=figures.clock_span + clocks * count,
        host_links=links,
    )


def settles(durations: Durations, turns: Turns) -> bool:
    """Whether the times of the simulated schedule grow alike in all further turns."""
    header, structure = turns.net.schedule.header, structure_of(turns.net.schedule, turns.net)
    return turns.settled.rate(earliest(header, structure, durations).ends) is not None


def launched_later(launches: Sequence[Launched], timeline: Timeline, turns: Turns) -> tuple[Launched, ...]:
    """The launches of sums with all further turns, which come before them; raises `Unsettled`."""
    rate = turns.settled.rate([timed.end for lane in timeline.lanes for timed in lane])
    if rate is None:
        raise Unsettled
    return tuple(launched._replace(at=launched.at + rate * turns.count * timeline.tick) for launched in launches)


def _one_more(turns: Turns, timeline: Timeline, rate: int) -> Timeline:
    """The timeline with one further turn, if two turns add twice what one adds; raises `Unsettled` if not."""
    one, two = (simulate(turns.longer(more), timeline.costs) for more in (1, 2))
    steady = [each.steady_period * each.tick for each in (timeline, one, two)]
    links = [transfers(each) for each in (timeline, one, two)]
    even = all(
        first.time + third.time == 2 * second.time and first.hidden + third.hidden == 2 * second.hidden
        for first, second, third in zip(*links, strict=True)
    )
    if not even or not steady[1] - steady[0] == steady[2] - steady[1] == rate * timeline.tick:
        raise Unsettled
    return one


@dataclass(frozen=True)
class _Settled:
    """Which operations must have settled: those that what comes after the cuts may wait for, by number in the net.

    With each comes the number of the same operation one turn earlier. ``turn_of`` has the turn of each operation: the
    one before the second cut is turn -1. ``length_of`` has the number of operations in a turn of its lane.
    """

    net: Net
    turn_of: Sequence[int]
    length_of: Sequence[int]
    pairs: Sequence[tuple[int, int]]

    @staticmethod
    def of(turns: Turns) -> "_Settled":
        net, turn_of, lane_of, length_of = turns.net, list[int](), list[int](), list[int]()
        for worker, (lane, (start, end)) in enumerate(zip(net.lanes, turns.cuts, strict=True)):
            turn_of += ((place - end) // (end - start) for place in range(len(lane)))
            lane_of += [worker] * len(lane)
            length_of += [end - start] * len(lane)
        # An operation waits for those before it in its lane anyway, if all of them occupy the lane.
        lanes_only = net.schedule.header.lanes_only
        back, ahead = 1, 0
        for number, before in enumerate(net.predecessors):
            turn = turn_of[number]
            for other in before:
                if turn >= -1 and not (lanes_only and lane_of[other] == lane_of[number]):
                    back = max(back, -turn_of[other] - (turn == -1))
                if turn < 0:
                    ahead = max(ahead, turn_of[other] + 1)
        pairs: list[tuple[int, int]] = []
        for lane, (start, end) in zip(net.lanes, turns.cuts, strict=True):
            length = end - start
            places = range(end - back * length, end + ahead * length)
            if back < turns.before and ahead <= turns.after:
                pairs += ((lane[place], lane[place - length]) for place in places)
        return _Settled(net, turn_of, length_of, pairs)

    def rate(self, ends: Sequence[int]) -> int | None:
        """By how much all ends grow in a turn; None if they do not grow alike."""
        rates = {ends[number] - ends[earlier] for number, earlier in self.pairs}
        return rates.pop() if len(rates) == 1 else None

    def path(self, run: TimedRun, count: int) -> tuple[Operation, ...]:
        """The critical path with ``count`` further turns, each operation as one of the window; raises `Unsettled`.

        In further turns it goes on as from the same operation in turn -1: what ends last of what that one waits for.
        """
        net, turn_of = self.net, self.turn_of
        lengths = joint_lengths(run.durations, run.structure.preferred)
        ends = net.ends(lengths)
        if self.rate(ends) is None:
            raise Unsettled
        number, later, path = max(range(len(ends)), key=ends.__getitem__), count, list[int]()
        while True:
            path.append(number)
            start = ends[number] - lengths[number]
            if not start and not later:
                return tuple([net.operations[each] for each in reversed(path)])
            number = next(before for before in net.predecessors[number] if ends[before] == start)
            if (turn := turn_of[number]) < 0 and later:
                # The operation is in turn ``turn + later``: in one that was put in, or in the window, before those.
                nearest = min(turn + later, -1)
                number += (nearest - turn) * self.length_of[number]
                later += turn - nearest
