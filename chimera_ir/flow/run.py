"""The engine: lanes that are played until each of them ends or waits for ever, and when everything in them ends.

A lane is a sequence of events by number, one after the other; ``before[n]`` are the other events that event n waits
for, and those of its own lane may be among them. Nothing that has happened is undone, so all lanes come equally far
whatever the order in which they are played.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeVar

Time = TypeVar("Time", int, float)


class Run(NamedTuple):
    """A lane's next ``length`` events."""

    lane: int
    length: int


@dataclass(frozen=True)
class Played:
    """How far lanes come.

    ``order`` has every event that happens, after all that it waits for; ``places[l]`` is the place at which lane l ends
    or blocks.
    """

    lanes: Sequence[Sequence[int]]
    order: Sequence[int]
    places: Sequence[int]

    @property
    def runs(self) -> Iterator[Run]:
        """The order by lanes."""
        lane_of = {event: number for number, lane in enumerate(self.lanes) for event in lane}
        for number, events in groupby(self.order, key=lane_of.__getitem__):
            yield Run(number, sum(1 for _ in events))


def play(lanes: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> Played:
    """The lanes, each played until it must wait, and again when it may go on. Linear in the number of waits.

    Examples
    --------
    >>> play([[0, 1], [2, 3]], [[], [2], [0], [4], []]).places
    [2, 1]
    """
    order: list[int] = []
    done = bytearray(len(before))
    places = [0] * len(lanes)
    sleepers: dict[int, list[int]] = {}
    awake = list(range(len(lanes)))
    while awake:
        number = awake.pop()
        begun = len(order)
        for event in lanes[number][places[number] :]:
            for other in before[event]:
                if not done[other]:
                    sleepers.setdefault(other, []).append(number)
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


def ends(order: Sequence[int], before: Sequence[Sequence[int]], durations: Sequence[Time]) -> list[Time]:
    """When each event ends if it begins as soon as all that it waits for is over, the first ones at 0.

    Parameters
    ----------
    order
        Events, each after all that it waits for; any other counts as over at 0.
    before
        What an event waits for, the event before it in its lane included.
    """
    times = [0 * duration for duration in durations]
    for event in order:
        start = 0 * durations[event]
        for other in before[event]:
            if times[other] > start:
                start = times[other]
        times[event] = start + durations[event]
    return times
