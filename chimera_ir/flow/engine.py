"""The engine: plays lanes until each of them ends or waits for ever, and computes when each event ends.

A lane is a sequence of events, by number. ``before[n]`` are the other events that event n waits for; some may be in the
lane of n. No event is ever undone, so how far a lane gets does not depend on the order in which lanes are played.

    lane 0:                            lane 1:                            order: 0 2 3 1
      0  F m0 s0                         2  F m0 s1    waits for 0
      1  B m0 s0    waits for 3          3  B m0 s1
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

Time = TypeVar("Time", int, float)


@dataclass(frozen=True)
class Played:
    """The result of playing lanes.

    ``order`` has every event that happens, each after all events that it waits for. ``places[l]`` is the place at which
    lane l stops: its length or, where the lane waits for ever, the place of the event that waits.
    """

    order: Sequence[int]
    places: Sequence[int]


def play(lanes: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> Played:
    """Plays lanes of events, where event n waits for the events ``before[n]``, in time linear in the number of waits.

    Each lane is played until it must wait, and again when it may go on. In the example event 3 waits for event 4, which
    is in no lane and so never happens: lane 1 stops at place 1.

    Examples
    --------
    >>> play([[0, 1], [2, 3]], [[], [2], [0], [4], []]).places
    [2, 1]
    """
    order = array("q")
    done = bytearray(len(before))
    places = [0] * len(lanes)
    # The rest of each lane, as an iterator: a lane may be woken up for each of its events, and slices would be copies.
    # The event at which a lane sleeps has left the iterator, so it stands in ``blocked``.
    upcoming = [iter(lane) for lane in lanes]
    blocked: list[tuple[int, ...]] = [()] * len(lanes)
    # The lanes that sleep until an event happens: each on one event, and not looked at again before it happens.
    sleepers: dict[int, list[int]] = {}
    awake = list(range(len(lanes)))
    while awake:
        number = awake.pop()
        begun = len(order)
        for event in chain(blocked[number], upcoming[number]):
            for other in before[event]:
                if not done[other]:  # the lane sleeps
                    sleepers.setdefault(other, []).append(number)
                    blocked[number] = (event,)
                    break
            else:  # the event happens, and wakes up the lanes that have slept on it
                done[event] = 1
                order.append(event)
                if event in sleepers:
                    awake += sleepers.pop(event)
                continue
            break
        places[number] += len(order) - begun
    return Played(order, places)


def ordered(before: Sequence[Sequence[int]]) -> list[int]:
    """Returns all events in an order in which event n comes after the events ``before[n]``.

    Events that wait for ever, because they wait for each other, are left out.

    Examples
    --------
    >>> ordered([[1], [], [0, 1]])
    [1, 0, 2]
    """
    # ``missing`` counts the events that each event still waits for; at 0 the event joins the order.
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
    """Returns the time at which each event ends, if each begins as soon as everything that it waits for has ended.

    ``order`` has the events, each after all that it waits for; an event that ``order`` lacks counts as ended at 0.
    ``before[n]`` are the events that event n waits for, the one before it in its lane included; an event that waits for
    none begins at 0. ``earliest`` has for some events a time, 0 or later, before which they do not begin.
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
