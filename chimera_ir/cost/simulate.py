"""The earliest timeline: every operation starts as soon as its data are there and its worker is free.

Communication is free here, as in the paper's analysis (section 2). Time is counted in whole ticks, the largest unit in
which every duration is an integer, so that the result is exact and the arithmetic fast.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from math import lcm
from typing import NamedTuple

from chimera_ir.cost.model import Costs
from chimera_ir.cost.precedence import Precedence, precede
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Backward, Compute, Forward


class Timed(NamedTuple):
    """An operation with its start and its end, in ticks."""

    operation: Compute
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Operations that follow one another without a gap from time 0 to the makespan, each needing the one before.

    ``forwards`` and ``backwards`` are C_f and C_b of section 3.4, counted in micro-batches.
    """

    operations: tuple[Timed, ...]
    forwards: Fraction
    backwards: Fraction


@dataclass(frozen=True, slots=True)
class Timeline:
    """When every operation of one iteration runs: ``lanes[w]`` in the order of worker w.

    ``tick`` is the length of a tick in the unit of the costs; ``span`` the length of the iteration in ticks.
    """

    header: Header
    costs: Costs
    tick: Fraction
    span: int
    lanes: tuple[tuple[Timed, ...], ...]
    critical_path: CriticalPath

    @property
    def makespan(self) -> Fraction:
        """The length of the iteration in the unit of the costs."""
        return self.span * self.tick

    @property
    def bubble_ratio(self) -> Fraction:
        """The share of all workers' time in which they do nothing."""
        if self.span == 0:
            return Fraction(0)
        busy = sum(timed.end - timed.start for lane in self.lanes for timed in lane)
        return 1 - Fraction(busy, self.span * len(self.lanes))


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The earliest timeline of a verified schedule, in time linear in the number of operations.

    Of several critical paths it holds one with the largest number of backward passes (CONTRACT: C_b).
    """
    return run(schedule, precede(schedule), costs)


def run(schedule: Schedule, precedence: Precedence, costs: Costs) -> Timeline:
    """As `simulate`, for a schedule whose precedence is known already."""
    tick, duration = ticks(schedule.header, costs)
    durations = [duration(operation) for operation in precedence.operations]
    ends = earliest_ends(precedence, durations)
    timed = [
        Timed(operation, end - duration, end)
        for operation, end, duration in zip(precedence.operations, ends, durations, strict=True)
    ]
    remaining = iter(timed)
    return Timeline(
        header=schedule.header,
        costs=costs,
        tick=tick,
        span=max(ends, default=0),
        lanes=tuple(tuple(islice(remaining, len(lane))) for lane in schedule.lanes),
        critical_path=_critical_path(precedence, timed, schedule.header.parts),
    )


def ticks(header: Header, costs: Costs) -> tuple[Fraction, Callable[[Compute], int]]:
    """The largest unit in which every duration is whole, and the durations in it."""
    parts = lcm(*(cost.denominator for _, cost in costs.items()), costs.recomputing.denominator) * header.parts
    whole = costs.scaled(Fraction(parts))
    known: dict[tuple[type[Compute], int, bool], int] = {}

    def duration(operation: Compute) -> int:
        alike = type(operation), len(operation.micros), header.recomputes(operation.micros[0], operation.stage)
        if alike not in known:
            known[alike] = int(whole.duration(operation, header))
        return known[alike]

    return Fraction(1, parts), duration


def earliest_ends(precedence: Precedence, durations: Sequence[int]) -> list[int]:
    """When each operation ends if each starts with the end of its last predecessor, the first ones at 0."""
    ends = [0] * len(durations)
    for number in precedence.order:
        start = max((ends[before] for before in precedence.predecessors[number]), default=0)
        ends[number] = start + durations[number]
    return ends


def _critical_path(precedence: Precedence, timed: Sequence[Timed], parts: int) -> CriticalPath:
    """The critical path with the most backward passes: durations are positive, so that also fixes the forward ones.

    A micro-batch of the operations is one of ``parts`` parts of what is counted.
    """
    if not timed:
        return CriticalPath((), Fraction(0), Fraction(0))
    backwards = [len(each.operation.micros) if isinstance(each.operation, Backward) else 0 for each in timed]
    before: dict[int, int] = {}
    for number in precedence.order:
        start = timed[number].start
        tight = [other for other in precedence.predecessors[number] if timed[other].end == start]
        if tight:
            before[number] = max(tight, key=backwards.__getitem__)
            backwards[number] += backwards[before[number]]
    number = max(range(len(timed)), key=lambda other: (timed[other].end, backwards[other]))
    most = backwards[number]
    path = [timed[number]]
    while number in before:
        number = before[number]
        path.append(timed[number])
    forwards = sum(len(each.operation.micros) for each in path if isinstance(each.operation, Forward))
    return CriticalPath(tuple(reversed(path)), Fraction(forwards, parts), Fraction(most, parts))
