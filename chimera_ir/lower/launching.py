"""The last launch of each sum of an asynchronous schedule, in the earliest run.

An operation starts as soon as its worker is free, its data are there, and the sums that it needs are over. It needs the
sum that makes the version it reads. If it adds to gradients, it also needs the sum of the update before its own, which
uses the same memory. Communication and steps take no time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, product

from chimera_ir.flow.net import newest, reads_of
from chimera_ir.flow.run import ends, play
from chimera_ir.ir.ids import Stage
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.ops import Compute
from chimera_ir.lower.sync import Duration

Joins = Mapping[int, Sequence[tuple[Stage, int]]]
"""The sums, as stage and update, that a lane launches right before the operation at a place."""


def last_launches(schedule: Schedule, duration: Duration, joins: Iterable[Joins]) -> dict[tuple[Stage, int], int]:
    """The time of the last launch of each sum, by stage and update; a sum that waits in a circle is after all others.

    Parameters
    ----------
    schedule
        Asynchronous and complete.
    duration
        How long operations take, in any unit.
    joins
        For every lane the launches that do not follow an operation that adds to the gradients.
    """
    events = _Events(schedule, duration, list(joins))
    lanes = [*events.lanes, *([number] for number in events.sums.values())]
    played = play(lanes, events.before)
    times = ends(played.order, events.before, events.durations)
    happened, never = {*played.order}, max(times, default=0) + 1
    return {key: times[number] if number in happened else never for key, number in events.sums.items()}


class _Events:
    """The events by number: the operations, then the joins, then the sums. A sum waits for all of its launches."""

    def __init__(self, schedule: Schedule, duration: Duration, joins: Sequence[Joins]) -> None:
        self._header, operations = schedule.header, list(chain.from_iterable(schedule.lanes))
        first_join = len(operations)
        first_sum = first_join + sum(len(several) for lane in joins for several in lane.values())
        keys = product(map(Stage, range(self._header.stages)), range(self._header.updates))
        self.sums = {key: number for number, key in enumerate(keys, start=first_sum)}
        self.before: list[list[int]] = [[] for _ in range(first_sum + len(self.sums))]
        self.durations = [*map(duration, operations), *[0] * (len(self.before) - first_join)]
        self.lanes: list[list[int]] = []
        reads, join_numbers = enumerate(reads_of(schedule)), count(first_join)
        for lane, joined in zip(schedule.lanes, joins, strict=True):
            self.lanes.append([])
            for place in range(len(lane) + 1):
                for stage, update in joined.get(place, ()):
                    self._append(next(join_numbers), self._sum(stage, update - 1), (stage, update))
                if place < len(lane):
                    self._operation(*next(reads), lane[place])

    def _operation(self, number: int, reads: Iterable[int], operation: Compute) -> None:
        stage = operation.stage
        sums = self._sum(stage, newest(self._header, operation) - 1)
        launch = (stage, self._header.update_of(operation.micros)) if operation.kind.sums else None
        self._append(number, [*reads, *sums], launch)

    def _append(self, event: int, needs: Iterable[int], launch: tuple[Stage, int] | None) -> None:
        """Puts an event at the end of the last lane; ``launch`` is the sum that it launches, if any."""
        lane = self.lanes[-1]
        self.before[event] += [*lane[-1:], *needs]
        lane.append(event)
        if launch is not None:
            self.before[self.sums[launch]].append(event)

    def _sum(self, stage: Stage, update: int) -> Iterator[int]:
        if update >= 0:
            yield self.sums[stage, update]
