"""The engine: plays lanes until each of them ends or waits for ever, and computes when each event ends.

A lane is a sequence of events, by number. ``before[n]`` are the other events that event n waits for, which may be in
its own lane. No event is ever undone, so each lane comes equally far whatever the order in which lanes are played.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import NamedTuple, TypeVar

Time = TypeVar("Time", int, float)


class LaneRun(NamedTuple):
    """The next ``length`` events of a lane."""

    lane: int
    length: int


@dataclass(frozen=True)
class Played:
    """The result of playing lanes.

    ``order`` has every event that happens, after all that it waits for; ``places[l]`` is the place at which lane l ends
    or blocks.
    """

    lanes: Sequence[Sequence[int]]
    order: Sequence[int]
    places: Sequence[int]

    @property
    def runs(self) -> Iterator[LaneRun]:
        """The order by lanes."""
        lane_of = {event: number for number, lane in enumerate(self.lanes) for event in lane}
        for number, events in groupby(self.order, key=lane_of.__getitem__):
            yield LaneRun(number, sum(1 for _ in events))


def play(lanes: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> Played:
    """Plays each lane until it must wait, and again when it may go on, in time linear in the number of waits.

    Examples
    --------
    >>> play([[0, 1], [2, 3]], [[], [2], [0], [4], []]).places
    [2, 1]
    """
    order = array("q")
    done = bytearray(len(before))
    places = [0] * len(lanes)
    upcoming = [iter(lane) for lane in lanes]  # iterators, not slices: a lane may be woken up for each of its events
    blocked: list[tuple[int, ...]] = [()] * len(lanes)
    sleepers: dict[int, list[int]] = {}
    awake = list(range(len(lanes)))
    while awake:
        number = awake.pop()
        begun = len(order)
        for event in chain(blocked[number], upcoming[number]):
            for other in before[event]:
                if not done[other]:
                    sleepers.setdefault(other, []).append(number)
                    blocked[number] = (event,)
                    break
            else:
                done[event] = 1
                order.append(event)
                if event in sleepers:
                    awake += sleepers.pop(event)
                continue
            break
        places[number] += len(order) - begun
    return Played(lanes, order, places)


def ordered(before: Sequence[Sequence[int]]) -> list[int]:
    """Events that no lanes are known of, each after all that it waits for; those that wait for ever are not there.

    Examples
    --------
    >>> ordered([[1], [], [0, 1]])
    [1, 0, 2]
    """
    missing = [len(needs) for needs in before]
    after: list[list[int]] = [[] for _ in before]
    for event, needs in enumerate(before):
        for other in needs:
            after[other].append(event)
    order = [event for event, count in enumerate(missing) if not count]
    for event in order:
        for other in after[event]:
            missing[other] -= 1
            if not missing[other]:
                order.append(other)
    return order


def ends(
    order: Sequence[int],
    before: Sequence[Sequence[int]],
    durations: Sequence[Time],
    earliest: Mapping[int, Time] | None = None,
) -> list[Time]:
    """The end of each event if it begins as soon as all events that it waits for are over, the first ones at 0.

    Parameters
    ----------
    order
        Events, each after all that it waits for; events that are not in it count as over at 0.
    before
        The events that each event waits for, the event before it in its lane included.
    earliest
        Times before which events do not begin, none of them negative.
    """
    times = [0 * duration for duration in durations]
    for event, time in (earliest or {}).items():
        times[event] = time
    for event in order:
        start = times[event]
        for other in before[event]:
            if times[other] > start:
                start = times[other]
        times[event] = start + durations[event]
    return times
