"""Equation 1 of the paper (section 3.4), term by term.

    T = (F_t + Comm_p2p) C_f + (B_t + Comm_p2p) C_b + max over workers i of Comm_unoverlapped(i)

The paper leaves some points open. Here every stage counts as the slowest stage, and every message as the message that
takes longest. Free regions are idle times in the timeline in which every forward takes F_t + Comm_p2p and every
backward B_t + Comm_p2p. The sums of all stages of a worker share the worker's free regions, as `_overlap` says.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm
from operator import itemgetter
from typing import NamedTuple

from chimera_ir.cost.durations import Costs
from chimera_ir.cost.host_plan import LaunchPlaces, launch_places
from chimera_ir.cost.simulate import Structure, TimedRun, earliest, structure_of
from chimera_ir.ir.kinds import COSTED, KINDS, PAIR, RECOMPUTATION, Kind
from chimera_ir.ir.levels import Header, Program, Schedule
from chimera_ir.ir.ops import WeightGroup, singles
from chimera_ir.predict.setting import Setting
from chimera_ir.profile.costs import Timing


class FreeRegion(NamedTuple):
    """Seconds in which a worker is idle and can sum the gradients of a group.

    With a flush, they lie between the earliest start of the sum and the iteration's end; without one, they are all its
    idle seconds in an update of the steady state.
    """

    group: WeightGroup
    seconds: float


@dataclass(frozen=True, slots=True)
class Term:
    """A further term of equation 1: the time of one operation of a kind, and their number on the critical path."""

    kind: str
    seconds: float
    count: Fraction


@dataclass(frozen=True, slots=True)
class Equation:
    """Terms of equation 1 in seconds; those of a stream are for one update of the steady state.

    Attributes
    ----------
    forward, backward
        F_t and B_t of the slowest stage.
    forwards, backwards
        C_f and C_b, counted in micro-batches.
    further
        Input gradients, weight gradients, recomputations and pairs, if there are any: (I_t + Comm_p2p) C_i + W_t
        C_w + recompute_t C_recompute + (pair_t + Comm_p2p) C_pair. A pair takes F_t + B_t unless the profile has it.
    p2p
        Comm_p2p of the message that takes longest.
    compute
        (F_t + Comm_p2p) C_f + (B_t + Comm_p2p) C_b: the length of the critical path.
    all_reduce
        Comm_allreduce of each stage, then of each tie.
    regions
        The free regions of each worker, in the order in which its sums can begin.
    unoverlapped
        Comm_unoverlapped of each worker.
    """

    forward: float
    backward: float
    forwards: Fraction
    backwards: Fraction
    further: tuple[Term, ...]
    p2p: float
    compute: float
    all_reduce: tuple[float, ...]
    regions: tuple[tuple[FreeRegion, ...], ...]
    unoverlapped: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """T: the seconds of an iteration or, without a flush, of an update."""
        return self.compute + max(self.unoverlapped)


def equation(program: Program, setting: Setting) -> Equation:
    """All terms of equation 1 for a verified program."""
    lanes = tuple(tuple(parts.computes.lines) for parts in program.parts)
    schedule = Schedule(program.header, lanes)
    terms = _terms(schedule, structure_of(schedule), launch_places(program), setting)
    costs, counts = terms.costs, terms.run.critical_path.counts
    return Equation(
        forward=float(costs["F"]),
        backward=float(costs["B"]),
        forwards=counts.get("F", Fraction(0)),
        backwards=counts.get("B", Fraction(0)),
        further=tuple(
            Term(kind, float(cost), counts[kind]) for kind, cost in costs.items() if kind in {*counts} - {"F", "B"}
        ),
        p2p=terms.p2p,
        compute=terms.compute,
        all_reduce=tuple(terms.sums.values()),
        regions=tuple(regions for regions, _ in terms.overlaps),
        unoverlapped=tuple(unoverlapped for _, unoverlapped in terms.overlaps),
    )


def seconds_of(schedule: Schedule, structure: Structure, launched: LaunchPlaces, setting: Setting) -> float:
    """T of equation 1 for a verified schedule: seconds of an iteration or, without a flush, of an update.

    ``launched`` has for each worker the sums that it launches with a flush: after how many operations, and the group.
    """
    terms = _terms(schedule, structure, launched, setting)
    return terms.compute + max(unoverlapped for _, unoverlapped in terms.overlaps)


_Overlap = tuple[tuple[FreeRegion, ...], float]
"""Free regions of a worker, and its Comm_unoverlapped."""


class _Terms(NamedTuple):
    """Terms of equation 1 for a verified schedule; C_f and C_b take another walk along it.

    In ``run`` every operation starts as early as possible. It takes its F_t or B_t, and Comm_p2p if it sends a message.
    """

    costs: Costs
    p2p: float
    run: TimedRun
    sums: Mapping[WeightGroup, float]
    overlaps: Sequence[_Overlap]

    @property
    def compute(self) -> float:
        return float(self.run.length * self.run.tick)


def _terms(schedule: Schedule, structure: Structure, launched: LaunchPlaces, setting: Setting) -> _Terms:
    header = schedule.header
    costs, p2p = _costs(schedule, setting), _p2p(header, setting)
    senders = [letter for letter, kind in COSTED.items() if any(part.hands_on for part in kind.kinds)]
    run = earliest(header, structure, costs.changed({letter: costs[letter] + Fraction(p2p) for letter in senders}))
    sums = {group: setting.all_reduce(header, group) for group in header.groups}
    overlaps = _streams(schedule, structure, run, sums) if structure.waits else _flushed(structure, run, launched, sums)
    return _Terms(costs, p2p, run, sums, overlaps)


def _costs(schedule: Schedule, setting: Setting) -> Costs:
    """Exact F_t, B_t, I_t and W_t of the slowest stage, in seconds per micro-batch, of operations of the usual size.

    I_t and W_t are both of the stage with the largest sum of the two. The largest of each would be too much together:
    the first stage, for instance, computes no gradient of its input, so its whole backward may be W.
    """
    header = schedule.header
    forwards = _timings(schedule, setting, opening=True)
    backwards = _timings(schedule, setting, opening=False)
    stages, again = range(header.stages), {stage for pipe in header.pipes for stage in pipe.recompute}

    def slowest(kind: Kind) -> Fraction:
        chosen = (again or stages) if kind is RECOMPUTATION else stages
        timings = ((forwards if kind.opens else backwards)[stage] for stage in chosen)
        return Fraction(max(timing.seconds(kind.letter) * times for timing, times in timings))

    def halves(stage: int) -> tuple[float, float]:
        timing, times = backwards[stage]
        first, second = (timing.seconds(kind) * times for kind in ("I", "W"))
        return first, second

    first, second = max(map(halves, stages), key=lambda both: (sum(both), both))
    costs = {letter: slowest(kind) for letter, kind in KINDS.items()} | {"I": Fraction(first), "W": Fraction(second)}
    if all(PAIR.letter in setting.timing(stage).times for stage in stages):
        costs[PAIR.letter] = Fraction(max(setting.timing(stage).times[PAIR.letter] for stage in stages))
    return Costs(user_set=(), shares={}, factors={}, groups={}, stages=None, **costs)


def _timings(schedule: Schedule, setting: Setting, *, opening: bool) -> list[tuple[Timing, float]]:
    """Each stage's timing of forwards if ``opening``, else of backwards, and a factor to seconds per micro-batch.

    Operations may run over several micro-batches: the costs are those of operations of the most frequent size, which is
    looked up on the first worker that has operations; all workers run the same pipes.
    """
    header = schedule.header
    lane = next((lane for lane in schedule.lanes if lane), ())
    sizes = Counter(operation.size for operation in singles(lane) if operation.kind.opens is opening)
    usual = max(sizes, key=lambda size: (sizes[size], size), default=header.parts)
    if header.slices > 1 and setting.slices_known:
        return [(setting.as_cut(stage, header), 1.0) for stage in range(header.stages)]
    timings = [setting.over(stage, usual, header.parts) for stage in range(header.stages)]
    return [
        (
            timing.plus(costs.overhead, float((1 - times) / times)) if times < 1 else timing,
            float(times * header.parts / usual),
        )
        for costs, (timing, times) in zip(setting.stages, timings, strict=True)
    ]


def _p2p(header: Header, setting: Setting) -> float:
    """Comm_p2p, the largest alpha + beta L of a micro-batch's activations or gradients over their links."""
    return max(
        (
            setting.link(header.workers, pipe.workers[edge[0]], pipe.workers[edge[1]]).message(setting.message(edge))
            for pipe in header.pipes
            for edge in header.edges
        ),
        default=0.0,
    )


def _flushed(
    structure: Structure, run: TimedRun, launched: LaunchPlaces, sums: Mapping[WeightGroup, float]
) -> list[_Overlap]:
    """The overlaps of a schedule with a flush; a sum can begin once all workers that hold its group launched it."""
    begin: dict[WeightGroup, int] = defaultdict(int)
    for lane, places in zip(structure.net.lanes, launched, strict=True):
        for done, group in places:
            begin[group] = max(begin[group], run.ends[lane[done - 1]] if done else 0)
    lengths = {group: Fraction(seconds) / run.tick for group, seconds in sums.items()}
    return [
        _overlap([(group, begin[group], lengths[group]) for _, group in places], lane, run)
        for lane, places in zip(structure.net.lanes, launched, strict=True)
    ]


class _Gaps:
    """The gaps of a lane, in which its worker idles, up to the end of the iteration.

    Methods count time in parts of a tick, ``parts`` to the tick; lists in ticks. ``_through[n]`` is the idle time up to
    the end of gap n.
    """

    def __init__(self, lane: range, run: TimedRun, parts: int) -> None:
        ends = run.ends[lane.start : lane.stop]
        starts = (end - duration for end, duration in zip(ends, run.durations[lane.start : lane.stop], strict=True))
        gaps = [gap for gap in zip([0, *ends], [*starts, run.span], strict=True) if gap[0] < gap[1]]
        self._starts = [start for start, _ in gaps]
        self._ends = [end for _, end in gaps]
        self._through = list(accumulate(end - start for start, end in gaps))
        self._span, self._parts = run.span * parts, parts

    @property
    def total(self) -> int:
        return self._through[-1] * self._parts if self._through else 0

    def before(self, time: int) -> int:
        gap = bisect_right(self._starts, time // self._parts) - 1
        return self._through[gap] * self._parts - max(0, self._ends[gap] * self._parts - time) if gap >= 0 else 0

    def end(self, begin: int, length: int) -> int:
        """End of a sum of this length that begins at ``begin`` and runs only in gaps and after the iteration."""
        target = self.before(begin) + length
        if not length:
            return begin
        if target > self.total:
            return max(begin, self._span) + target - self.total
        gap = bisect_left(self._through, -(-target // self._parts))
        return self._ends[gap] * self._parts - (self._through[gap] * self._parts - target)


def _overlap(sums: Iterable[tuple[WeightGroup, int, Fraction]], lane: range, run: TimedRun) -> _Overlap:
    """The overlap of a worker whose ``sums`` (group, earliest start, length in ticks) run one by one in its gaps.

    Regions are in the order in which sums can begin; with two stages on each worker they are those of Figure 6.
    Comm_unoverlapped is the part of the sums that remains when the iteration's last operation ends.
    """
    ordered = sorted(sums, key=itemgetter(1))
    # Integers instead of fractions: a tick has as many parts as all lengths need.
    parts = lcm(*(length.denominator for _, _, length in ordered))
    idle, done, regions = _Gaps(lane, run, parts), 0, []
    numerator, denominator = (run.tick / parts).as_integer_ratio()
    for group, start, length in ordered:
        begin = start * parts
        regions.append(FreeRegion(group, (idle.total - idle.before(begin)) * numerator / denominator))
        done = idle.end(max(begin, done), length.numerator * (parts // length.denominator))
    return tuple(regions), max(0, done - parts * run.span) * numerator / denominator


def _streams(
    schedule: Schedule, structure: Structure, run: TimedRun, sums: Mapping[WeightGroup, float]
) -> list[_Overlap]:
    """The overlaps of a stream: a free region is all idle time of an update; what its sums take beyond is exposed."""
    header = schedule.header
    counted = header.micro_batches - header.micro_batches % header.period
    overlaps = []
    for groups, lane, numbers in zip(header.groups_of, schedule.lanes, structure.net.lanes, strict=True):
        # Only whole turns count, as in `cost.simulate`.
        durations = run.durations[numbers.start : numbers.stop]
        busy = sum(
            duration
            for operation, duration in zip(lane, durations, strict=True)
            if operation.parts[0].micros[0] < counted
        )
        idle = float((run.length - Fraction(busy * header.per_update, counted)) * run.tick)
        regions = tuple(FreeRegion(group, idle) for group in groups)
        overlaps.append((regions, max(0.0, sum(sums[group] for group in groups) - idle)))
    return overlaps
