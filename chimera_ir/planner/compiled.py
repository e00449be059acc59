"""Compiles schemes as far as predictions of time and memory need it, once for all micro-batch sizes B."""

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from chimera_ir.ir.kinds import KINDS, RECOMPUTATION
from chimera_ir.ir.levels import Header, Plan, Program, Schedule
from chimera_ir.ir.ops import Compute, Operation, Stage, singles
from chimera_ir.ir.streams import ProgramStream, ScheduleStream, header_of, view_of
from chimera_ir.lower.comm import AHEAD
from chimera_ir.lower.lower import lower
from chimera_ir.lower.updates import launches
from chimera_ir.orders.instance import Costing
from chimera_ir.orders.ordering import scheduled
from chimera_ir.predict.events import StageLoad
from chimera_ir.predict.setting import Measured, Setting
from chimera_ir.profile.costs import Timing
from chimera_ir.request import Tie, groups
from chimera_ir.syntax.ast import Scheme
from chimera_ir.syntax.formatter import Change
from chimera_ir.verify.holdings import Holdings, holdings

if TYPE_CHECKING:
    from chimera_ir.verify.verify import Checked, Verified


UNIT_COSTS = Costs()
"""The costs without a profile."""

Pattern = tuple[int, ...]
"""The relative durations of a scheme's operations, as whole numbers: one for each `DurationKey`.

Settings in which a scheme has the same pattern share one program: nothing else decides when gradient sums are launched.
All numbers are 1 where no worker has several gradient sums to launch.
"""


class CompiledScheme:
    """A scheme with its parameters, compiled on demand; results that all changes of the scheme share are computed once.

    A `Change` replaces clauses of the text: every stage recomputes, or all sums have one strategy. The lanes are those
    of the scheme with ``change``; another change alters lanes only by recomputation. A ``trusted`` text (the library's)
    is not verified again, unless it has no flush and ``ties`` say that stages share parameters. Any other text must
    pass `Variant.check` before its lanes are used. ``durations`` decide the order of operations without clocks. The
    lanes of ``order``, another schedule, replace the scheme's own. ``lengths`` are the relative lengths of the slices,
    none if they are equal.

    Every method and property, also of `Variant`, raises `Rejected` if the scheme has errors, and `NoSuchTie` if the
    scheme lacks a stage of a tie.
    """

    def __init__(
        self,
        scheme: Scheme,
        settings: tuple[tuple[str, int], ...],
        change: Change,
        max_operations: int,
        trusted: bool,
        ties: tuple[Tie, ...] = (),
        durations: Durations = UNIT_COSTS,
        order: Schedule | ScheduleStream | None = None,
        lengths: tuple[int, ...] = (),
    ) -> None:
        self.trusted, self._order, self._lengths = trusted, order, lengths
        self._scheme, self._settings, self._change = scheme, dict(settings), change
        self._max_operations, self._ties, self._durations = max_operations, ties, durations
        self._outlines: dict[Change, Outline] = {}
        self._others: dict[bool, CompiledScheme] = {}

    def outline(self, change: Change) -> Outline:
        """The header of the scheme with a change, and what is needed to make its operations.

        The header has the ties and the lengths of slices.
        """
        if change not in self._outlines:
            outlined = outline(change.of(self._scheme), self._settings, self._max_operations)
            ties, header = groups(self._ties, outlined.header.stages), outlined.header
            self._outlines[change] = replace(outlined, header=replace(header, ties=ties, lengths=self._lengths))
        return self._outlines[change]

    def header(self, change: Change) -> Header:
        """The header of the schedule of a change."""
        header = replace(self.outline(change).header, moves=self.moves)
        return header if self._order is None else replace(header, bounds=self._order.header.bounds)

    def like(self, change: Change) -> "CompiledScheme":
        """Returns the compiled scheme with the lanes of ``change``.

        It is this object if the lanes of both recompute, or of neither.
        """
        if change.recompute == self._change.recompute:
            return self
        if change.recompute not in self._others:
            options = self._max_operations, self.trusted, self._ties, self._durations, None, self._lengths
            self._others[change.recompute] = CompiledScheme(
                self._scheme, tuple(self._settings.items()), change, *options
            )
        return self._others[change.recompute]

    def reordered(self, order: Schedule | ScheduleStream, trusted: bool = False) -> "CompiledScheme":
        """The compiled scheme with the lanes of ``order``, another schedule of it; verified unless ``trusted``."""
        settings = tuple(self._settings.items())
        options = self._max_operations, trusted, self._ties, self._durations, order, self._lengths
        return CompiledScheme(self._scheme, settings, self._change, *options)

    @property
    def is_reordered(self) -> bool:
        """Whether the lanes are those of another schedule (`reordered`), not those that the scheme's text gives."""
        return self._order is not None

    @property
    def _outline(self) -> Outline:
        return self.outline(self._change)

    @cached_property
    def plan(self) -> Plan:
        """The plan of the scheme with the change that the constructor got."""
        return self._outline.plan()

    @cached_property
    def level(self) -> Schedule | ScheduleStream:
        """The schedule or, without a flush, its stream."""
        if self._order is not None:
            return self._order
        return scheduled(self._outline.level(), Costing.of(self._durations, self._outline.header))

    @cached_property
    def lanes(self) -> tuple[tuple[Operation, ...], ...]:
        """The lanes of the schedule; of a stream, the lanes of as many updates as the plan shows."""
        level = self.level
        return (level if isinstance(level, Schedule) else level.view(self._outline.header.updates)).lanes

    @cached_property
    def structure(self) -> Structure:
        """The part of the schedule's timelines that does not depend on costs: operations, and what each waits for."""
        return structure_of(self._schedule)

    @cached_property
    def _schedule(self) -> Schedule:
        return Schedule(self.header(self._change), self.lanes)

    @cached_property
    def copies(self) -> tuple[dict[Stage, int], ...]:
        """A mapping for each worker, from stages to the most copies of their weights that the worker keeps at once."""
        if isinstance(self.level, Schedule):
            return tuple(dict.fromkeys(stages, 1) for stages in self.level.header.stages_of)
        program = lower(self.level, net=self.structure.net)
        return tuple(dict(of_worker.copies) for of_worker in holdings(program))

    @cached_property
    def waiting(self) -> tuple[tuple[list[Stage], list[int]], ...]:
        """The changes of what waits for a backward: two lists for each worker, with an entry per operation of its lane.

        The first list has the operation's stage, the second how many micro-batches more wait on that stage after the
        operation: a number below 0 where fewer wait. A whole micro-batch counts as `Header.units`.
        """
        change = waiting(self.header(self._change))
        lanes = map(singles, self.lanes)
        return tuple(
            (
                [part.stage for part in lane],
                [change[part.kind] * self._outline.header.length(part.micros) for part in lane],
            )
            for lane in lanes
        )

    @cached_property
    def begun(self) -> list[int]:
        """The most that waits for a backward on each stage at one time, on the worker where it is most.

        A whole micro-batch counts as `Header.units`.
        """
        peaks = [highest_by_key(zip(stages, counts, strict=True)) for stages, counts in self.waiting]
        return [
            max((of_worker[stage].amount for of_worker in peaks if stage in of_worker), default=0)
            for stage in map(Stage, range(self._outline.header.stages))
        ]

    @cached_property
    def loads(self) -> list[StageLoad]:
        """The load of each stage: the most copies of its weights on a worker, and its entry in `begun`."""
        holders = self._outline.header.holders
        copies = [max(self.copies[w][Stage(stage)] for w in workers) for stage, workers in enumerate(holders)]
        return list(map(StageLoad, copies, self.begun))

    @cached_property
    def splits(self) -> bool:
        """Whether any backward is split; lanes are searched only if a line of the scheme has an `I` or a `W`."""
        lines = chain.from_iterable(shape.operations for shape in self._outline.shapes)
        if not any(subject.kind.splits for line in lines for subject in line.subjects):
            return False
        return any(operation.kind.splits for lane in self.lanes for operation in singles(lane))

    @cached_property
    def moves(self) -> bool:
        """Whether any operation moves activations to the host."""
        return self.level.header.moves

    @cached_property
    def recomputed(self) -> int:
        """The most micro-batches on which a single recomputation works; 0 if nothing is recomputed."""
        lanes = map(singles, self.lanes) if self._outline.header.recomputing else ()
        return max((part.size for lane in lanes for part in lane if part.kind is RECOMPUTATION), default=0)

    @cached_property
    def streams_in_order(self) -> bool:
        """Whether there is one pipe, with one stage per worker, and each worker takes single micro-batches in order."""
        workers = [pipe.workers for pipe in self._outline.header.pipes]
        micros = (
            [operation.micros for operation in singles(lane) if operation.kind is kind]
            for lane in self.lanes
            for kind in KINDS.values()
        )
        return (
            len(workers) == 1
            and len({*workers[0]}) == len(workers[0])
            and all(groups == sorted(groups) and all(len(group) == 1 for group in groups) for groups in micros)
        )


class Variant:
    """A compiled scheme with a change beyond its text, such as recomputation: schedule, program and memory."""

    def __init__(self, compiled: CompiledScheme, change: Change) -> None:
        self.compiled, self._change = compiled.like(change), change
        self._lowerings: dict[Pattern, _Lowering] = {}
        self._holdings: tuple[Holdings, ...] = ()

    @cached_property
    def header(self) -> Header:
        """The header of the plan, the schedule and the program."""
        return self.compiled.header(self._change)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule; a text that is not trusted has to pass `check` before it is used."""
        return Schedule(self.header, self.compiled.lanes)

    @property
    def level(self) -> Schedule | ScheduleStream:
        """The schedule or, without a flush, its stream."""
        level = self.compiled.level
        if isinstance(level, Schedule):
            return self.schedule
        return replace(level, header=header_of(self.header, level.header.updates))

    def reordered(self, order: Schedule) -> "Variant":
        """This variant with the lanes of another schedule of it."""
        return Variant(self.compiled.reordered(order), self._change)

    def offloaded(self, durations: Durations) -> "Variant":
        """Returns the variant with the moves to the host that `--offload auto` adds with these durations.

        This variant must have no errors, but may exceed bounds on memory. The result has to pass `check` before use.
        """
        level = offload(self.level, durations)
        return Variant(self.compiled.reordered(level, self._is_trusted), self._change)

    @cached_property
    def digest(self) -> str | None:
        """A key that equal schedules with a flush share, however they number micro-batches; None without a flush.

        Schedules are equal if each worker holds the same stages, runs the same operations in the same order, keeps the
        same values between them, and launches its sums by the same strategies.
        """
        # Micro-batches are numbered in the order of their first operations, so that their own numbers do not count.
        header, numbers = self.header, dict[int, int]()
        if header.asynchronous:
            return None

        def described(part: Compute) -> tuple[object, ...]:
            whole = (divmod(micro, header.slices) for micro in part.micros)
            return part.kind.letter, part.stage, [(numbers.setdefault(micro, len(numbers)), q) for micro, q in whole]

        lanes = [[list(map(described, operation.parts)) for operation in lane] for lane in self.compiled.lanes]
        cut = header.halves, header.slices, header.lengths
        return sha256(repr((cut, header.strategies, header.stages_of, lanes)).encode()).hexdigest()

    def check(self) -> None:
        """Verifies the schedule, unless its text is trusted; raises `Rejected` with its errors."""
        if not self._is_trusted:
            _ = self.checked

    def prove(self, setting: Setting) -> None:
        """Verifies the program of a scheme without a flush, unless its text is trusted.

        Errors in versions, and gradient sums that some workers have no part in, show only in the program. With a flush,
        the program of a schedule that passes `check` has no errors (tests/property/test_random_schemes.py).

        Raises `Rejected` with the errors that a compilation finds in the program.
        """
        if not self._is_trusted and self.header.steps_inside:
            _ = self._lowering(setting).proven

    @property
    def _is_trusted(self) -> bool:
        """Whether verification is skipped: the text is trusted, and has a flush or no stages that share parameters."""
        return self.compiled.trusted and not (self.header.ties and self.header.steps_inside)

    @cached_property
    def checked(self) -> "Checked":
        """The schedule with the findings of `verify_schedule`; raises the errors of `check`."""
        from chimera_ir.verify.verify import verify_schedule  # which imports every rule

        plan = None if self.compiled.is_reordered else replace(self.compiled.plan, header=self.header)
        checked = verify_schedule(self.level, plan)
        raise_errors(checked.findings.diagnostics)
        return checked

    def lowered(self, setting: Setting) -> Program:
        """The program that a compilation makes; of a stream, a view of enough updates to show all that ever happens."""
        return view_of(self._lowering(setting).level)

    def launched(self, setting: Setting) -> LaunchPlaces:
        """The gradient sums that each worker launches in a setting, and after how many operations.

        They are empty without a flush.
        """
        if self.header.steps_inside:
            return ((),) * len(self.compiled.lanes)
        return self._lowering(setting).launched

    def holdings(self, setting: Setting) -> tuple[Holdings, ...]:
        """The most that each worker holds, in numbers of micro-batches and copies of weights; equal in all settings."""
        self._holdings = self._holdings or tuple(holdings(self._lowering(setting).level))
        return self._holdings

    def _lowering(self, setting: Setting) -> "_Lowering":
        pattern = self._pattern(setting)
        if pattern not in self._lowerings:
            ticks = dict(zip(self._representatives, pattern, strict=True))
            # Not a reference back, which would leave every variant to the garbage collector.
            self._lowerings[pattern] = _Lowering(weakref.proxy(self), ticks)
        return self._lowerings[pattern]

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
        """Maps each key in `keys` to one of the operations that have it."""
        return dict(zip(self.keys, chain.from_iterable(self.compiled.lanes), strict=True))

    @cached_property
    def keys(self) -> list[DurationKey]:
        """The keys of all operations, lane by lane; operations with equal keys take equally long."""
        return [duration_key(operation, self.header) for operation in chain.from_iterable(self.compiled.lanes)]


@dataclass(frozen=True, eq=False)
class _Lowering:
    """Lowers a schedule to a program.

    ``ticks`` maps keys of operations (`duration_key`) to ticks. Durations decide when gradient sums are launched.
    """

    variant: Variant
    ticks: dict[DurationKey, int]

    @cached_property
    def level(self) -> Program | ProgramStream:
        """The program, or without a flush its stream."""
        variant, ticks = self.variant, self.ticks
        net, header = variant.compiled.structure.net, variant.header
        return lower(variant.level, duration=lambda operation: ticks[duration_key(operation, header)], net=net)

    @cached_property
    def proven(self) -> "Verified":
        """The program with the proof of every rule; raises `Rejected` if it breaks one."""
        from chimera_ir.verify.verify import verify_lowered

        return verify_lowered(self.level, self.variant.checked)

    @cached_property
    def launched(self) -> LaunchPlaces:
        """The gradient sums that each worker launches, and after how many operations, in a schedule with a flush."""
        variant, durations = self.variant, [self.ticks[key] for key in self.variant.keys]
        launched = launches(variant.schedule, variant.compiled.structure.net, durations)
        return [[(after + 1, group) for after, group in lane] for lane in launched]


# Bounds on the bytes that each worker needs, computed from compute operations alone.
#
# The bounds show of most configurations whether they fit, before messages and buffers are known. Both bounds count what
# a worker keeps all the time, the versions of its weights, and what waits for a backward. They differ in the messages
# under way: `least` counts none, `most` as many as there can be.

_EARLY = 2 * (AHEAD + 1)
"""Safety margin of the upper bound, in messages per stage: receives that lowering posts before they are needed.

`lower.comm` posts AHEAD receives early, and slots that are used round and round hold one more; twice as many are safe.
"""


def standing(variant: Variant, setting: Setting) -> list[int]:
    """Bytes that each worker keeps in any order: a copy of weights and optimizer state, and gradients of its stages."""
    header, first = variant.header, [costs.first_gradients for costs in setting.stages]
    sizes = [
        costs.weights + costs.gradients + setting.optimizer(header, Stage(stage))
        for stage, costs in enumerate(setting.stages)
    ]
    return [sum(sizes[s] for s in stages) + max((first[s] for s in stages), default=0) for stages in header.stages_of]


def least(variant: Variant, setting: Setting) -> list[int]:
    """Returns a lower bound on the bytes that each worker needs.

    A message counts only where it has been received and waits for a backward.
    """
    header, splits = variant.header, variant.compiled.splits
    kept = [_least_kept(header, setting.as_cut(stage, header), stage, splits) for stage in range(header.stages)]
    return _peaks(variant, setting, kept)


def _peaks(variant: Variant, setting: Setting, kept: Sequence[int]) -> list[int]:
    """Returns the most bytes that each worker needs at once, apart from messages under way.

    Every micro-batch that waits for a backward on stage s takes ``kept[s]`` bytes.
    """
    weights, compiled = [costs.weights for costs in setting.stages], variant.compiled
    workers = zip(standing(variant, setting), compiled.copies, compiled.waiting, strict=True)
    return [
        always
        + sum(weights[stage] * (count - 1) for stage, count in copies.items())
        + -(-max(accumulate(map(mul, counts, map(kept.__getitem__, stages)), initial=0)) // variant.header.units)
        for always, copies, (stages, counts) in workers
    ]


def most(variant: Variant, setting: Setting) -> list[int] | None:
    """Returns an upper bound on the bytes that each worker needs, with as many messages under way as there can be.

    Of its stages that recompute, a worker holds the recomputed activations of one at a time. The result is None where
    no bound is known: for slices of unequal lengths, and for moves to the host, where the bytes depend on when lanes
    wait for the moves. Without a flush it is also None for micro-batches that do not pass in order, because a receive
    may be posted any time before its use, and for split backwards, because received gradients may stay in their
    buffers.
    """
    compiled, header = variant.compiled, variant.header
    if header.moves or header.lengths:
        return None
    if header.asynchronous and (compiled.splits or not compiled.streams_in_order):
        return None
    timings = [setting.as_cut(stage, header) for stage in range(header.stages)]
    kept = [_most_kept(header, timings, stage, compiled.splits) for stage in range(header.stages)]
    return [
        peak
        + max(timings[stage].activations * compiled.recomputed for stage in passing)
        + max(timings[stage].kept.halving * compiled.splits for stage in passing)
        + sum(_under_way(compiled, header, timings, stage, count) for stage, count in passing.items())
        for peak, passing in zip(_peaks(variant, setting, kept), _passing(header), strict=True)
    ]


def _passing(header: Header) -> list[Counter[int]]:
    """Counts, for each worker and stage, the micro-batches (or parts of them) that the stage works on there."""
    counts: list[Counter[int]] = [Counter() for _ in range(header.workers)]
    for pipe in header.pipes:
        for stage, worker in enumerate(pipe.workers):
            counts[worker][stage] += len(pipe.micros)
    return counts


def _under_way(compiled: CompiledScheme, header: Header, timings: Sequence[Timing], stage: int, passing: int) -> int:
    """Returns an upper bound on the bytes of a stage's messages that are under way or in buffers at any one time.

    ``passing`` is how many micro-batches, or parts of them, the stage works on. With a flush all of their messages
    count.

    In a stream whose micro-batches pass in order, the activations of a micro-batch have arrived when its gradients come
    back, and stay in their buffer until the backward. Gradients leave their buffer at once: they have arrived when the
    first activations come that were sent after the use of these gradients. `_EARLY` more messages allow for receives
    that are posted early.
    """
    this, before = (
        _messages(header, timings[stage]),
        [(s, _messages(header, timings[s])) for s in header.feeding[stage]],
    )
    if header.asynchronous:
        begun = compiled.begun
        onward = begun[stage] * this[0] + _EARLY * this[1]
        back = [
            (begun[stage] + _EARLY) * output + (begun[maker] + _EARLY) * gradient
            for maker, (output, gradient) in before
        ]
    else:
        onward, *back = (passing * sum(messages) for messages in (this, *dict(before).values()))
    return onward * len(header.fed[stage]) + sum(back)


def _messages(header: Header, timing: Timing) -> tuple[int, int]:
    """Returns the bytes of a message with an output of a stage, and of one with the gradient that comes back for it.

    A message has a part of a micro-batch: all of it, a half or a slice.
    """
    return -(-timing.output // header.parts), -(-timing.gradient // header.parts)


def _least_kept(header: Header, timing: Timing, stage: int, splits: bool) -> int:
    """The fewest bytes that a stage may keep of a micro-batch between forward and backward, receive buffer included.

    If ``splits`` (any backward is split), the bytes kept between the two halves are considered, too.
    """
    waiting = [timing.input if stage in pipe.recompute else timing.activations for pipe in header.pipes]
    return min([*waiting, *([timing.kept.halfway] if splits else [])], default=0)


def _most_kept(header: Header, timings: Sequence[Timing], stage: int, splits: bool) -> int:
    """The most bytes that a stage may keep of a micro-batch between forward and backward, without its receive buffer.

    If ``splits`` (any backward is split), a stage that recomputes keeps activations from the first half of a backward
    to the second. The bytes are rounded up to a multiple of the parts of a micro-batch: stages round up the bytes of
    each part.
    """
    again = all(stage in pipe.recompute for pipe in header.pipes) and not splits
    in_buffer = sum(
        timings[maker].output
        for maker in header.feeding[stage]
        if all(pipe.workers[stage] != pipe.workers[maker] for pipe in header.pipes)
    )
    sizes = timings[stage].kept.without_received(in_buffer, 0)
    size = sizes.input if again else max(sizes.input, sizes.activations, sizes.halfway * splits)
    size += sizes.carry + sizes.carry_gradients
    return -(-size // header.units) * header.units
