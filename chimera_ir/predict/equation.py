"""Equation 1 of the paper (section 3.4), term by term.

T = (F_t + Comm_p2p) C_f + (B_t + Comm_p2p) C_b + max over workers i of Comm_unoverlapped(i)

What the paper leaves open is decided here: stages of unequal cost count as the slowest does, messages as the one that
takes longest; the free regions are those of the timeline in which every forward takes F_t + Comm_p2p and every backward
B_t + Comm_p2p; and any number of stages per worker share them in the manner of `_overlap`.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm

from chimera_ir.cost.launches import launch_places
from chimera_ir.cost.model import Costs
from chimera_ir.cost.simulate import Run, Skeleton, earliest, skeleton
from chimera_ir.ir.ids import Stage
from chimera_ir.ir.levels import Header, Program, Schedule
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.costs import Timing


@dataclass(frozen=True, slots=True)
class Region:
    """How long a worker idles, in seconds, from when the sum of a stage's gradients can begin to the iteration's end.

    Without a flush, in an update of the steady state.
    """

    stage: Stage
    seconds: float


@dataclass(frozen=True, slots=True)
class Equation:
    """The terms of equation 1, in seconds; of an asynchronous schedule, for one update of the steady state.

    Attributes
    ----------
    forward, backward
        F_t and B_t of the slowest stage; ``backward`` of stages that recompute if all do.
    recomputing
        B_t of the stages that recompute where only some do, else None.
    forwards, backwards
        C_f and C_b, counted in micro-batches.
    p2p
        Comm_p2p of the message that takes longest.
    compute
        (F_t + Comm_p2p) C_f + (B_t + Comm_p2p) C_b: the length of the critical path.
    all_reduce
        Comm_allreduce of each stage.
    regions
        For each worker, in the order in which the sums can begin, the time that is free for them.
    unoverlapped
        Comm_unoverlapped of each worker.
    """

    forward: float
    backward: float
    recomputing: float | None
    forwards: Fraction
    backwards: Fraction
    p2p: float
    compute: float
    all_reduce: tuple[float, ...]
    regions: tuple[tuple[Region, ...], ...]
    unoverlapped: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """T."""
        return self.compute + max(self.unoverlapped)


def equation(program: Program, setting: Setting) -> Equation:
    """Equation 1 for a verified program."""
    lanes = tuple(tuple(parts.computes.lines) for parts in program.parts)
    schedule = Schedule(program.header, lanes)
    return equation_of(schedule, skeleton(schedule), launch_places(program), setting)


def equation_of(
    schedule: Schedule, bones: Skeleton, launched: Sequence[Sequence[tuple[int, Stage]]], setting: Setting
) -> Equation:
    """Equation 1 for a verified schedule with its skeleton.

    ``launched`` has for each worker the stages of the sums that it launches, each after how many of its operations;
    without a flush it is of no account.
    """
    header = schedule.header
    costs, p2p = _costs(schedule, setting), _p2p(header, setting)
    added = Fraction(p2p)
    run = earliest(header, bones, Costs(F=costs.F + added, B=costs.B + added, recomputing=costs.recomputing + added))
    compute = run.critical_path.length * run.tick
    sums = tuple(
        setting.cluster.sums.all_reduce(costs_of.gradients, setting.copies * len(holders))
        for costs_of, holders in zip(setting.stages, header.holders, strict=True)
    )
    found = _streams(schedule, bones, run, sums) if header.asynchronous else _flushed(bones, run, launched, sums)
    every = all(len(pipe.recompute) == header.stages for pipe in header.pipes)
    some = any(pipe.recompute for pipe in header.pipes) and not every
    return Equation(
        forward=float(costs.F),
        backward=float(costs.recomputing if every else costs.B),
        recomputing=float(costs.recomputing) if some else None,
        forwards=run.critical_path.counts["F"],
        backwards=run.critical_path.counts["B"],
        p2p=p2p,
        compute=float(compute),
        all_reduce=sums,
        regions=tuple(regions for regions, _ in found),
        unoverlapped=tuple(rest for _, rest in found),
    )


def _costs(schedule: Schedule, setting: Setting) -> Costs:
    """F_t and B_t of the slowest stage, exactly, per micro-batch of the usual operation."""
    header = schedule.header
    forwards = _timings(schedule, setting, opening=True)
    backwards = _timings(schedule, setting, opening=False)
    again = {stage for pipe in header.pipes for stage in pipe.recompute}
    kept = {stage for pipe in header.pipes for stage in range(header.stages) if stage not in pipe.recompute}
    backward = max(backwards[stage][0].backward * backwards[stage][1] for stage in kept or again)
    recomputing = max(backwards[stage][0].recomputing * backwards[stage][1] for stage in again or kept)
    return Costs(
        F=Fraction(max(timing.forward * times for timing, times in forwards)),
        B=Fraction(backward),
        recomputing=Fraction(recomputing),
    )


def _timings(schedule: Schedule, setting: Setting, *, opening: bool) -> list[tuple[Timing, float]]:
    """By stage, what forwards, or else backwards, cost per micro-batch: a timing, and how much of it.

    They are of the size that most of them have on the first worker: all workers run the same pipelines.
    """
    header = schedule.header
    lane = next((lane for lane in schedule.lanes if lane), ())
    sizes = Counter(len(each.micros) for each in lane if each.kind.opens is opening)
    usual = max(sizes, key=lambda size: (sizes[size], size), default=header.parts)
    found = (setting.over(stage, usual, header.parts) for stage in range(header.stages))
    return [(timing, float(times * header.parts / usual)) for timing, times in found]


def _p2p(header: Header, setting: Setting) -> float:
    """Comm_p2p: alpha + beta L, of a micro-batch's activations or gradients over any link that they take.

    Where short messages have an alpha and a beta of their own, each of both by its size.
    """
    return max(
        (
            setting.link(header.workers, source, target).message(size)
            for pipe in header.pipes
            for stage, (source, target) in enumerate(zip(pipe.workers, pipe.workers[1:], strict=False))
            for timing in (setting.timing(stage),)
            for size in (timing.output, timing.gradient)
        ),
        default=0.0,
    )


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum of gradients on a worker: from when it can run, and for how long it does, in ticks."""

    stage: Stage
    begin: int
    length: Fraction


_Found = tuple[tuple[Region, ...], float]
"""The regions of a worker, and its Comm_unoverlapped."""


def _flushed(
    bones: Skeleton, run: Run, launched: Sequence[Sequence[tuple[int, Stage]]], sums: Sequence[float]
) -> list[_Found]:
    """The workers of a schedule with a flush. A sum can begin once all workers that hold the stage have launched it."""
    begin: dict[Stage, int] = defaultdict(int)
    for lane, places in zip(bones.net.lanes, launched, strict=True):
        for done, stage in places:
            begin[stage] = max(begin[stage], run.ends[lane[done - 1]] if done else 0)
    lengths = [Fraction(seconds) / run.tick for seconds in sums]
    return [
        _overlap([_Sum(stage, begin[stage], lengths[stage]) for _, stage in places], lane, run)
        for lane, places in zip(bones.net.lanes, launched, strict=True)
    ]


class _Idle:
    """The gaps of a lane up to the end of the iteration: its idle time counts up in them, and stands still between.

    They are in ticks; who asks counts time in ``parts`` of a tick.
    """

    def __init__(self, lane: range, run: Run, parts: int) -> None:
        ends = run.ends[lane.start : lane.stop]
        starts = (end - duration for end, duration in zip(ends, run.durations[lane.start : lane.stop], strict=True))
        gaps = [gap for gap in zip([0, *ends], [*starts, run.span], strict=True) if gap[0] < gap[1]]
        self._starts = [start for start, _ in gaps]
        self._ends = [end for _, end in gaps]
        self._through = list(accumulate(end - start for start, end in gaps))
        self._span, self._parts = run.span * parts, parts

    @property
    def total(self) -> int:
        """All of it."""
        return self._through[-1] * self._parts if self._through else 0

    def before(self, time: int) -> int:
        """How much there has been at a time."""
        gap = bisect_right(self._starts, time // self._parts) - 1
        return self._through[gap] * self._parts - max(0, self._ends[gap] * self._parts - time) if gap >= 0 else 0

    def end(self, begin: int, length: int) -> int:
        """When so much has been found from a time on; behind the span all time is free."""
        found = self.before(begin) + length
        if not length:
            return begin
        if found > self.total:
            return max(begin, self._span) + found - self.total
        gap = bisect_left(self._through, -(-found // self._parts))
        return self._ends[gap] * self._parts - (self._through[gap] * self._parts - found)


def _overlap(sums: Iterable[_Sum], lane: range, run: Run) -> _Found:
    """The sums of a worker one after another, in the order in which they can begin, while it does not compute.

    With two stages on each worker these are the regions of Figure 6. What is left when the last operation of the
    iteration ends is not overlapped.
    """
    ordered = sorted(sums, key=lambda each: each.begin)
    parts = lcm(*(each.length.denominator for each in ordered))
    idle, done, regions = _Idle(lane, run, parts), 0, []
    numerator, denominator = (run.tick / parts).as_integer_ratio()
    for each in ordered:
        begin = each.begin * parts
        regions.append(Region(each.stage, (idle.total - idle.before(begin)) * numerator / denominator))
        length = each.length.numerator * (parts // each.length.denominator)
        done = idle.end(max(begin, done), length)
    return tuple(regions), max(0, done - parts * run.span) * numerator / denominator


def _streams(schedule: Schedule, bones: Skeleton, run: Run, sums: Sequence[float]) -> list[_Found]:
    """The workers of a schedule without a flush: an update's sums take what a worker idles in an update, then more."""
    header = schedule.header
    counted = header.micro_batches - header.micro_batches % header.period
    found = []
    for stages, lane, numbers in zip(header.stages_of, schedule.lanes, bones.net.lanes, strict=True):
        durations = run.durations[numbers.start : numbers.stop]
        busy = sum(taken for operation, taken in zip(lane, durations, strict=True) if operation.micros[0] < counted)
        idle = float((run.critical_path.length - Fraction(busy * header.per_update, counted)) * run.tick)
        regions = tuple(Region(stage, idle) for stage in stages)
        found.append((regions, max(0.0, sum(sums[stage] for stage in stages) - idle)))
    return found
