"""The steady state in the timeline of a stream: a stretch of time that repeats right after itself."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from chimera_ir.cost.simulate import Timed, Timeline
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Instruction
from chimera_ir.ir.turns import later

MOST = 6
"""The largest number of turns that a repeating stretch may have."""


class Window(NamedTuple):
    """A stretch of the steady state, from ``start`` to ``end`` in ticks, and the number of its updates."""

    start: int
    end: int
    updates: int


def steady_window(timeline: Timeline) -> Window | None:
    """Finds the first of the shortest stretches of a stream's timeline that repeat right after themselves.

    A stretch starts with the first forward of a turn, and has the operations of one turn or several. Each of them
    starts again for the micro-batches of later turns, exactly the length of the stretch later.

    Returns None if no stretch repeats, and for a schedule with a flush.
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
    """The times, in ticks, at which the first micro-batch of each turn enters a stage that no other stage feeds."""
    return [
        start
        for operation, start, _ in timed
        for single in operation.parts
        if single.kind.opens and not header.feeding[single.stage] and single.micros[0] % header.period == 0
    ]


def _index(timed: Sequence[Timed], start: int) -> int:
    return bisect_left(timed, start, key=lambda interval: interval.start)
