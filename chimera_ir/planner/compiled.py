"""Compiles schemes as far as predictions of time and memory need it, once for all micro-batch sizes B."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import accumulate, chain
from math import gcd, lcm
from operator import mul
from typing import TYPE_CHECKING

from chimera_ir.cost.durations import Costs, DurationKey, Durations, duration_key
from chimera_ir.cost.host_plan import LaunchPlaces, offload
from chimera_ir.cost.simulate import Structure, structure_of
from chimera_ir.diagnostics.model import raise_errors
from chimera_ir.elaborate.elaborate import Outline, outline
from chimera_ir.flow.live import highest_by_key, waiting
from chimera_ir.ir.levels import Header, Program, Schedule
from chimera_ir.ir.ops import Compute, Operation, Stage, singles
from chimera_ir.ir.streams import ProgramStream, ScheduleStream, header_of, view_of
from chimera_ir.lower.lower import lower
from chimera_ir.lower.updates import launches
from chimera_ir.orders.ordering import scheduled
from chimera_ir.predict.events import StageLoad
from chimera_ir.predict.setting import Measured, Setting
from chimera_ir.profile.costs import Timing
from chimera_ir.request import Tie, groups
from chimera_ir.syntax.ast import Scheme
from chimera_ir.syntax.formatter import Change
from chimera_ir.verify.holdings import Holdings, holdings

if TYPE_CHECKING:
    from chimera_ir.verify.verify import Checked


UNIT_COSTS = Costs()
"""The costs without a profile."""

Pattern = tuple[int, ...]
"""The relative durations of a scheme's operations, as whole numbers: one for each `DurationKey`.

Settings in which a scheme has the same pattern share one program: nothing else decides when gradient sums are launched.
All numbers are 1 where no worker has several gradient sums to launch.
"""


@dataclass(eq=False)
class Variant:
    """A scheme with its parameters and a `Change` of its clauses, compiled on demand: schedule, program and memory.

    A ``trusted`` text (the library's) is verified only if it has no flush and ``ties`` say that stages share
    parameters; any other text must pass `check` before its lanes are used. ``durations`` decide the order of operations
    without clocks. The lanes of ``order``, another schedule, replace the scheme's. ``lengths`` are the relative lengths
    of slices, none if equal.

    Every method and property raises `Rejected` if the scheme has errors, and `NoSuchTie` if it lacks a stage of a tie.
    """

    scheme: Scheme
    settings: tuple[tuple[str, int], ...]
    change: Change
    max_operations: int
    trusted: bool
    ties: tuple[Tie, ...] = ()
    durations: Durations = UNIT_COSTS
    order: Schedule | ScheduleStream | None = None
    lengths: tuple[int, ...] = ()
    _programs: dict[Pattern, Program | ProgramStream] = field(default_factory=dict, init=False)
    _launched: dict[Pattern, LaunchPlaces] = field(default_factory=dict, init=False)
    _proven: set[Pattern] = field(default_factory=set, init=False)
    _holdings: tuple[Holdings, ...] = field(default=(), init=False)

    @cached_property
    def _outline(self) -> Outline:
        """The header with ties and lengths of slices, and what is needed to make operations."""
        outlined = outline(self.change.of(self.scheme), dict(self.settings), self.max_operations)
        ties, header = groups(self.ties, outlined.header.stages), outlined.header
        return replace(outlined, header=replace(header, ties=ties, lengths=self.lengths))

    @cached_property
    def _ordered(self) -> Schedule | ScheduleStream:
        return self.order or scheduled(self._outline.level(), self.durations)

    @cached_property
    def header(self) -> Header:
        """The header of the plan, the schedule and the program."""
        header = replace(self._outline.header, moves=self._ordered.header.moves)
        return header if self.order is None else replace(header, bounds=self.order.header.bounds)

    @cached_property
    def lanes(self) -> tuple[tuple[Operation, ...], ...]:
        """The lanes of the schedule; of a stream, the lanes of as many updates as the plan shows."""
        level = self._ordered
        return (level if isinstance(level, Schedule) else level.view(self._outline.header.updates)).lanes

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule; a text that is not trusted has to pass `check` before."""
        return Schedule(self.header, self.lanes)

    @property
    def level(self) -> Schedule | ScheduleStream:
        """The schedule or, without a flush, its stream."""
        level = self._ordered
        if isinstance(level, Schedule):
            return self.schedule
        return replace(level, header=header_of(self.header, level.header.updates))

    @cached_property
    def structure(self) -> Structure:
        """Operations, and what each waits for: nothing here depends on costs."""
        return structure_of(self.schedule)

    @cached_property
    def copies(self) -> tuple[dict[Stage, int], ...]:
        """For each worker, the most copies of the weights of each stage that it keeps at once."""
        if isinstance(self.level, Schedule):
            return tuple(dict.fromkeys(stages, 1) for stages in self.level.header.stages_of)
        program = lower(self.level, net=self.structure.net)
        return tuple(dict(of_worker.copies) for of_worker in holdings(program))

    @cached_property
    def waiting(self) -> tuple[tuple[list[Stage], list[int]], ...]:
        """The changes of what waits for a backward: for each worker, stages and amounts by operation of its lane.

        An amount is below 0 where fewer wait; a whole micro-batch counts as `Header.units`.
        """
        change = waiting(self.header)
        lanes = map(singles, self.lanes)
        return tuple(
            (
                [part.stage for part in lane],
                [change[part.kind] * self.header.length(part.micros) for part in lane],
            )
            for lane in lanes
        )

    @cached_property
    def loads(self) -> list[StageLoad]:
        """The most copies of each stage's weights, and the most that waits for its backwards at once, on any worker."""
        peaks = [highest_by_key(zip(stages, counts, strict=True)) for stages, counts in self.waiting]
        loads = []
        for number, workers in enumerate(self.header.holders):
            stage = Stage(number)
            copies = max(self.copies[w][stage] for w in workers)
            loads.append(StageLoad(copies, max((peak[stage].amount for peak in peaks if stage in peak), default=0)))
        return loads

    @cached_property
    def splits(self) -> bool:
        """Whether any backward is split; lanes are searched only if a line of the scheme has an `I` or a `W`."""
        lines = chain.from_iterable(shape.operations for shape in self._outline.shapes)
        if not any(subject.kind.splits for line in lines for subject in line.subjects):
            return False
        return any(operation.kind.splits for lane in self.lanes for operation in singles(lane))

    def reordered(self, order: Schedule) -> "Variant":
        """This variant with the lanes of another schedule of it."""
        return replace(self, order=order, trusted=False)

    def offloaded(self, durations: Durations) -> "Variant":
        """The variant with the moves of `--offload auto`; it has to pass `check` before use.

        This variant must have no errors, but may exceed bounds on memory.
        """
        return replace(self, order=offload(self.level, durations), trusted=self._is_trusted)

    @cached_property
    def digest(self) -> str | None:
        """A key that equal schedules with a flush share, however they number micro-batches; None without a flush.

        Equal schedules hold the same stages, run the same operations in the same order, keep the same values between
        them, and launch sums by the same strategies.
        """
        # Micro-batches are numbered in the order of their first operations, so that their own numbers do not count.
        header, numbers = self.header, dict[int, int]()
        if header.asynchronous:
            return None

        def described(part: Compute) -> tuple[object, ...]:
            whole = (divmod(micro, header.slices) for micro in part.micros)
            return part.kind.letter, part.stage, [(numbers.setdefault(micro, len(numbers)), q) for micro, q in whole]

        lanes = [[list(map(described, operation.parts)) for operation in lane] for lane in self.lanes]
        cut = header.halves, header.slices, header.lengths
        return sha256(repr((cut, header.strategies, header.stages_of, lanes)).encode()).hexdigest()

    def check(self) -> None:
        """Verifies the schedule, unless its text is trusted; raises `Rejected` with its errors."""
        if not self._is_trusted:
            _ = self.checked

    def prove(self, setting: Setting) -> None:
        """Verifies the program of a scheme without a flush, unless its text is trusted; raises `Rejected`.

        Errors in versions, and gradient sums that some workers have no part in, show only in the program. With a flush,
        the program of a schedule that passes `check` has no errors (tests/property/test_random_schemes.py).
        """
        if self._is_trusted or not self.header.steps_inside:
            return
        from chimera_ir.verify.verify import verify_lowered

        pattern = self._pattern(setting)
        if pattern not in self._proven:
            verify_lowered(self._program(pattern), self.checked)
            self._proven.add(pattern)

    @property
    def _is_trusted(self) -> bool:
        return self.trusted and not (self.header.ties and self.header.steps_inside)

    @cached_property
    def checked(self) -> "Checked":
        """The schedule with the findings of `verify_schedule`; raises the errors of `check`."""
        from chimera_ir.verify.verify import verify_schedule  # which imports every rule

        plan = None if self.order is not None else replace(self._outline.plan(), header=self.header)
        checked = verify_schedule(self.level, plan)
        raise_errors(checked.findings.diagnostics)
        return checked

    def lowered(self, setting: Setting) -> Program:
        """The program that a compilation makes; of a stream, a view of enough updates to show all that ever happens."""
        return view_of(self._program(self._pattern(setting)))

    def launched(self, setting: Setting) -> LaunchPlaces:
        """The gradient sums that each worker launches, each after how many operations; none without a flush."""
        if self.header.steps_inside:
            return ((),) * len(self.lanes)
        pattern = self._pattern(setting)
        if pattern not in self._launched:
            ticks = dict(zip(self._representatives, pattern, strict=True))
            launched = launches(self.schedule, self.structure.net, [ticks[key] for key in self.keys])
            self._launched[pattern] = [[(after + 1, group) for after, group in lane] for lane in launched]
        return self._launched[pattern]

    def holdings(self, setting: Setting) -> tuple[Holdings, ...]:
        """The most that each worker holds, in micro-batches and copies of weights; equal in all settings."""
        self._holdings = self._holdings or tuple(holdings(self._program(self._pattern(setting))))
        return self._holdings

    def _program(self, pattern: Pattern) -> Program | ProgramStream:
        if pattern not in self._programs:
            header, ticks = self.header, dict(zip(self._representatives, pattern, strict=True))
            self._programs[pattern] = lower(
                self.level,
                duration=lambda operation: ticks[duration_key(operation, header)],
                net=self.structure.net,
            )
        return self._programs[pattern]

    def _pattern(self, setting: Setting) -> Pattern:
        if all(len(held) < 2 for held in self.header.groups_of):
            return (1,) * len(self._representatives)
        # Integers without a common divisor: settings with proportional durations share one lowering.
        measured = Measured.of(setting)
        times = [measured.duration(operation, self.header) for operation in self._representatives.values()]
        unit = lcm(*(time.denominator for time in times))
        whole = [time.numerator * (unit // time.denominator) for time in times]
        common = gcd(*whole)
        return tuple(ticks // common for ticks in whole)

    @cached_property
    def _representatives(self) -> dict[DurationKey, Operation]:
        """An operation for each key in `keys`."""
        return dict(zip(self.keys, chain.from_iterable(self.lanes), strict=True))

    @cached_property
    def keys(self) -> list[DurationKey]:
        """The keys of all operations, lane by lane; operations with equal keys take equally long."""
        return [duration_key(operation, self.header) for operation in chain.from_iterable(self.lanes)]


# Lower bounds on the bytes that each worker needs, from compute operations alone: of most configurations they show that
# they do not fit, before messages and buffers are known. `least` counts what a worker keeps all the time, the versions
# of its weights, and what waits for a backward.


def standing(variant: Variant, setting: Setting) -> list[int]:
    """Bytes that each worker keeps in any order: a copy of weights and optimizer state, and gradients of its stages."""
    header, first = variant.header, [costs.first_gradients for costs in setting.stages]
    sizes = [
        costs.weights + costs.gradients + setting.optimizer(header, Stage(stage))
        for stage, costs in enumerate(setting.stages)
    ]
    return [sum(sizes[s] for s in stages) + max((first[s] for s in stages), default=0) for stages in header.stages_of]


def least(variant: Variant, setting: Setting) -> list[int]:
    """Lower bound on the bytes that each worker needs; a message counts only while it waits for a backward."""
    header = variant.header
    weights = [costs.weights for costs in setting.stages]
    kept = [_least_kept(header, setting.as_cut(stage, header), stage, variant.splits) for stage in range(header.stages)]
    workers = zip(standing(variant, setting), variant.copies, variant.waiting, strict=True)
    return [
        always
        + sum(weights[stage] * (count - 1) for stage, count in copies.items())
        + -(-max(accumulate(map(mul, counts, map(kept.__getitem__, stages)), initial=0)) // header.units)
        for always, copies, (stages, counts) in workers
    ]


def _least_kept(header: Header, timing: Timing, stage: int, splits: bool) -> int:
    """The fewest bytes that a stage may keep of a micro-batch before its backward, receive buffer included.

    Where backwards are split (``splits``), so are the bytes kept between the two halves.
    """
    waiting = [timing.kept.input if stage in pipe.recompute else timing.kept.activations for pipe in header.pipes]
    return min([*waiting, *([timing.kept.halfway] if splits else [])], default=0)
