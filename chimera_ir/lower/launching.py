"""The last launch of each sum of a stream, in the earliest run.

An operation starts as soon as its worker is free, its data are there, and the sums that it needs are over: the sum that
makes the version it reads and, if it adds to gradients, the sum of the update before its own, which uses the same
memory. A sum is over as soon as all workers have launched it. Communication and steps take no time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, product

from chimera_ir.flow.engine import ends, play
from chimera_ir.flow.net import newest, reads_of
from chimera_ir.ir.ids import WeightGroup
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.ops import Operation
from chimera_ir.lower.sync import Duration

Sum = tuple[WeightGroup, int]
"""A sum: the group whose gradients are summed, and the update, counted from 0."""

Joins = Mapping[int, Sequence[Sum]]
"""The joins of a lane: by place, the sums that the worker launches right before the operation with nothing to add."""


def last_launches(schedule: Schedule, duration: Duration, joins: Iterable[Joins]) -> dict[Sum, int]:
    """The time at which the last worker launches each sum; sums that wait for each other in a cycle come last.

    ``schedule`` has some updates of a stream, without errors by the rule "complete"; ``duration`` is in any unit.
    ``joins`` are the launches of every lane that do not follow an operation that adds to the gradients.
    """
    # Every sum is a lane of its own, so that it happens whenever its launches have.
    events = _LaunchEvents(schedule, duration, list(joins))
    lanes = [*events.lanes, *([number] for number in events.sums.values())]
    played = play(lanes, events.before)
    times = ends(played.order, events.before, events.durations)
    happened, never = {*played.order}, max(times, default=0) + 1
    return {key: times[number] if number in happened else never for key, number in events.sums.items()}


class _LaunchEvents:
    """The events that the engine plays, by number: the operations, then the joins, then the sums.

    A sum waits for all of its launches: operations that add to gradients, and joins.
    """

    def __init__(self, schedule: Schedule, duration: Duration, joins: Sequence[Joins]) -> None:
        self._header, operations = schedule.header, list(chain.from_iterable(schedule.lanes))
        first_join = len(operations)
        first_sum = first_join + sum(len(several) for lane in joins for several in lane.values())
        keys = product(self._header.groups, range(self._header.updates))
        self.sums = {key: number for number, key in enumerate(keys, start=first_sum)}
        self.before: list[list[int]] = [[] for _ in range(first_sum + len(self.sums))]
        self.durations = [*map(duration, operations), *[0] * (len(self.before) - first_join)]
        self.lanes: list[list[int]] = []
        reads, join_numbers = enumerate(reads_of(schedule)), count(first_join)
        for lane, joined in zip(schedule.lanes, joins, strict=True):
            self.lanes.append([])
            for place in range(len(lane) + 1):
                for group, update in joined.get(place, ()):
                    self._append(next(join_numbers), self._sum(group, update - 1), [(group, update)])
                if place < len(lane):
                    self._operation(*next(reads), lane[place])

    def _operation(self, number: int, reads: Iterable[int], operation: Operation) -> None:
        needs, launches = [*reads], list[Sum]()
        for part in operation.parts:
            groups, needed = self._header.groups_with[part.stage], newest(self._header, part) - 1
            needs += chain.from_iterable(self._sum(group, needed) for group in groups)
            update = self._header.update_of(part.micros)
            launches += [(group, update) for group in groups] if part.kind.sums else []
        self._append(number, needs, launches)

    def _append(self, event: int, needs: Iterable[int], launches: Iterable[Sum]) -> None:
        """Puts an event, which waits for ``needs`` and launches the sums ``launches``, at the end of the last lane."""
        lane = self.lanes[-1]
        self.before[event] += [*lane[-1:], *needs]
        lane.append(event)
        for launch in launches:
            self.before[self.sums[launch]].append(event)

    def _sum(self, group: WeightGroup, update: int) -> Iterator[int]:
        if update >= 0:
            yield self.sums[group, update]
