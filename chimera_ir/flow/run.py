"""The engine: plays lanes until each of them ends or waits for ever, and computes when each event ends.

A lane is a sequence of events, by number. ``before[n]`` are the other events that event n waits for, which may be in
its own lane. No event is ever undone, so each lane comes equally far whatever the order in which lanes are played.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

Time = TypeVar("Time", int, float)


class LaneRun(NamedTuple):
    """The next ``length`` events of a lane."""

    lane: int
    length: int


@dataclass(frozen=True, slots=True)
class Played:
    """The result of playing lanes.

    ``order`` has every event that happens, after all events that it waits for; ``runs`` is the same order in runs of
    one lane each; ``places[l]`` is the place at which lane l ends or blocks.
    """

    order: tuple[int, ...]
    runs: tuple[LaneRun, ...]
    places: tuple[int, ...]


def play(lanes: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> Played:
    """Plays each lane until it must wait, and again when it may go on, in time linear in the number of waits.

    Examples
    --------
    >>> play([[0, 1], [2, 3]], [[], [2], [0], [4], []]).places
    (2, 1)
    """
    order: list[int] = []
    runs: list[LaneRun] = []
    done = bytearray(len(before))
    places = [0] * len(lanes)
    sleepers: dict[int, list[int]] = {}
    awake = list(range(len(lanes)))
    append = order.append
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
                append(event)
                if event in sleepers:
                    awake += sleepers.pop(event)
                continue
            break
        if len(order) > begun:
            runs.append(LaneRun(number, len(order) - begun))
            places[number] += len(order) - begun
    return Played(tuple(order), tuple(runs), tuple(places))


def ends(order: Sequence[int], before: Sequence[Sequence[int]], durations: Sequence[Time]) -> list[Time]:
    """The end of each event if it begins as soon as all events that it waits for are over, the first ones at 0.

    Parameters
    ----------
    order
        Events, each after all that it waits for; events that are not in it count as over at 0.
    before
        The events that each event waits for, the event before it in its lane included.
    """
    times = [0 * duration for duration in durations]
    for event in order:
        start = 0 * durations[event]
        for other in before[event]:
            if times[other] > start:
                start = times[other]
        times[event] = start + durations[event]
    return times
