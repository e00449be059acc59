"""When the last worker launches each sum of an asynchronous schedule, if everything starts as early as it may.

An operation starts when its worker is free, its data are there, and so is every sum that it needs: the one that makes
the version it reads, and for a backward the one of the update before its own, whose gradients are in the memory that it
adds to. Communication is free, and so are steps.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from chimera_ir.ir.ids import Stage
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Backward, Compute
from chimera_ir.lower.sync import Duration

Joins = Mapping[int, Sequence[tuple[Stage, int]]]
"""By place: the sums, by stage and update, that a lane launches right before the operation there."""


class _Event(NamedTuple):
    """An operation or a launch in a lane: the cells that it waits for, that it does, and of the sums it launches."""

    needs: list[int]
    duration: int
    does: list[int]
    launches: tuple[int, ...]


def last_launches(schedule: Schedule, duration: Duration, joins: Iterable[Joins]) -> dict[tuple[Stage, int], int]:
    """By stage and update the time of the last launch; of one that waits in a circle, a time after all others.

    Parameters
    ----------
    schedule
        Asynchronous and complete.
    duration
        How long operations take, in any unit.
    joins
        Of every lane the launches that do not follow a backward.
    """
    cells = _Cells(schedule.header)
    lanes = [list(cells.events(lane, duration, own)) for lane, own in zip(schedule.lanes, joins, strict=True)]
    done = _run(lanes)
    never = max(done.values(), default=0) + 1
    sums = ((Stage(s), u) for s in range(schedule.header.stages) for u in range(schedule.header.updates))
    return {each: done.get(cells.sum(*each), never) for each in sums}


class _Cells:
    """Numbers for what is waited for: of each operation ``2 * (micro * stages + stage)``, plus one for a backward, and
    behind these ``stage * updates + update`` for each sum."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._first_sum = 2 * header.stages * header.micro_batches

    def sum(self, stage: Stage, update: int) -> int:
        """The cell of a sum."""
        return self._first_sum + stage * self._header.updates + update

    def events(self, lane: Sequence[Compute], duration: Duration, joins: Joins) -> Iterator[_Event]:
        """What happens in a lane."""
        for place in range(len(lane) + 1):
            for stage, update in joins.get(place, ()):
                before = [self.sum(stage, update - 1)] if update else []
                yield _Event(before, 0, [], (self.sum(stage, update),))
            if place < len(lane):
                yield self._operation(lane[place], duration(lane[place]))

    def _operation(self, operation: Compute, duration: int) -> _Event:
        stage, version, stages = operation.stage, operation.version or 0, self._header.stages
        does = [2 * (micro * stages + stage) for micro in operation.micros]
        needs = [self.sum(stage, version - 1)] if version else []
        if not isinstance(operation, Backward):
            return _Event(needs + ([cell - 2 for cell in does] if stage else []), duration, does, ())
        update = max(operation.micros) // self._header.per_update
        needs += [self.sum(stage, update - 1)] if update else []
        needs += does + ([cell + 3 for cell in does] if stage < stages - 1 else [])
        return _Event(needs, duration, [cell + 1 for cell in does], (self.sum(stage, update),))


def _run(lanes: Sequence[Sequence[_Event]]) -> dict[int, int]:
    """When each cell is done: lanes run until they must wait, and go on when they may."""
    missing = Counter(cell for lane in lanes for event in lane for cell in event.launches)
    done: dict[int, int] = {}
    latest: dict[int, int] = {}
    sleepers: dict[int, list[int]] = defaultdict(list)
    places, times, awake = [0] * len(lanes), [0] * len(lanes), list(range(len(lanes)))
    while awake:
        worker = awake.pop()
        for event in lanes[worker][places[worker] :]:
            lacking = next((cell for cell in event.needs if cell not in done), None)
            if lacking is not None:
                sleepers[lacking].append(worker)
                break
            now = max([times[worker], *(done[cell] for cell in event.needs)]) + event.duration
            places[worker], times[worker] = places[worker] + 1, now
            done.update(dict.fromkeys(event.does, now))
            for cell in event.launches:
                missing[cell] -= 1
                latest[cell] = max(latest.get(cell, 0), now)
            over = [cell for cell in event.launches if not missing[cell]]
            done.update((cell, latest[cell]) for cell in over)
            for cell in (*event.does, *over):
                awake += sleepers.pop(cell, ())
    return done
