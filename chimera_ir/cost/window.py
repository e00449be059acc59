"""Where a timeline of an asynchronous schedule shows its steady state: a stretch that repeats right after itself."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from chimera_ir.cost.simulate import Timed, Timeline
from chimera_ir.ir.ids import Micro, Stage
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute, Forward

MOST = 6
"""After how many turns at most the timeline is seen to repeat."""


class Window(NamedTuple):
    """From when to when, in ticks, the timeline runs so many updates of the steady state."""

    start: int
    end: int
    updates: int


_Key = tuple[bool, Stage, tuple[Micro, ...]]


def steady_window(timeline: Timeline) -> Window | None:
    """The first stretch of the fewest turns that comes again; none if the timeline is too short for it, or has a flush.

    All operations that start in it start again so many turns and makespans later, and each of the turn's is among them
    as often as it takes turns.
    """
    header = timeline.header
    if not header.asynchronous:
        return None
    timed = sorted(chain.from_iterable(timeline.lanes), key=lambda each: each.start)
    starts = {_key(each.operation, 0): each.start for each in timed}
    whole = header.micro_batches // header.period * header.period
    in_turn = sum(each.operation.micros[0] < whole for each in timed) * header.period // whole
    for turns in range(1, MOST + 1):
        updates = turns * header.period // header.per_update
        length = updates * timeline.critical_path.length
        for start in _starts(next(filter(None, timeline.lanes)), header) if length.denominator == 1 else ():
            window = Window(start, start + int(length), updates)
            inside = timed[_index(timed, window.start) : _index(timed, window.end)]
            if len(inside) == turns * in_turn and _repeats(inside, starts, turns * header.period, int(length)):
                return window
    return None


def _starts(lane: Sequence[Timed], header: Header) -> list[int]:
    """When the operations of a lane that are like its first start, turn by turn."""
    first = lane[0].operation
    ahead = first.micros[0] // header.period * header.period

    def alike(operation: Compute) -> bool:
        turn = operation.micros[0] // header.period * header.period
        return _key(operation, -turn) == _key(first, -ahead)

    return [each.start for each in lane if alike(each.operation)]


def _index(timed: Sequence[Timed], start: int) -> int:
    return bisect_left(timed, start, key=lambda each: each.start)


def _repeats(inside: Sequence[Timed], starts: dict[_Key, int], micros: int, length: int) -> bool:
    return all(starts.get(_key(each.operation, micros)) == each.start + length for each in inside)


def _key(operation: Compute, later: int) -> _Key:
    """An operation so many micro-batches later."""
    micros = tuple(Micro(micro + later) for micro in operation.micros)
    return isinstance(operation, Forward), operation.stage, micros
