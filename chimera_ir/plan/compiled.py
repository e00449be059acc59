"""A scheme compiled as far as a plan needs it: what time and memory follow from, made once for every B."""

from collections import defaultdict
from dataclasses import replace
from functools import cached_property

from chimera_ir.cost.critical import earliest_ends
from chimera_ir.cost.model import Costs
from chimera_ir.cost.simulate import Skeleton, skeleton, ticks
from chimera_ir.diagnostics.model import raise_errors
from chimera_ir.elaborate.elaborate import Outline, outline
from chimera_ir.ir.ids import Stage
from chimera_ir.ir.levels import Header, Program, Schedule
from chimera_ir.ir.ops import Backward, Compute, Forward
from chimera_ir.lower.lower import lower, sketch
from chimera_ir.lower.order import order
from chimera_ir.lower.sync import Duration, launches
from chimera_ir.lower.updates import copies
from chimera_ir.syntax.ast import Scheme
from chimera_ir.syntax.change import Change
from chimera_ir.verify.holdings import Holdings, holdings

_KINDS = (Forward, Backward)


class Compiled:
    """A scheme with its parameters at every level that was asked for, by what is asked of it beyond its text.

    ``change`` is one such change; the lanes are the same with every other. A ``trusted`` text is not verified again.

    Raises
    ------
    Rejected
        From whatever needs it: if the scheme says nothing that can be run.
    """

    def __init__(
        self, scheme: Scheme, settings: tuple[tuple[str, int], ...], change: Change, max_operations: int, trusted: bool
    ) -> None:
        self._scheme, self._settings, self._change = scheme, dict(settings), change
        self._max_operations, self._trusted = max_operations, trusted
        self._outlines: dict[Change, Outline] = {}
        self._lowered: dict[Change, Program] = {}
        self._sketches: dict[Change, tuple[Program, tuple[Holdings, ...]]] = {}
        self._launched: dict[Change, tuple[tuple[tuple[int, Stage], ...], ...]] = {}

    def header(self, change: Change) -> Header:
        """What stands above the lanes."""
        return self._outline(change).header

    def _outline(self, change: Change) -> Outline:
        if change not in self._outlines:
            self._outlines[change] = outline(change.of(self._scheme), self._settings, self._max_operations)
        return self._outlines[change]

    @cached_property
    def lanes(self) -> tuple[tuple[Compute, ...], ...]:
        """The lanes of the schedule."""
        plan = self._outline(self._change).plan()
        ordered = order(plan)
        if not self._trusted:
            from chimera_ir.verify.verify import verify_plan, verify_schedule  # with networkx, which takes a while

            raise_errors((*verify_plan(plan), *verify_schedule(ordered, plan)))
        return ordered.lanes

    @cached_property
    def skeleton(self) -> Skeleton:
        """The skeleton of every timeline."""
        return skeleton(self.schedule(self._change))

    @cached_property
    def copies(self) -> tuple[dict[Stage, int], ...]:
        """For each worker, how many copies of the weights of its stages it keeps at most."""
        schedule = self.schedule(self._change)
        if not schedule.header.asynchronous:
            return tuple(dict.fromkeys(stages, 1) for stages in schedule.header.stages_of)
        return tuple(copies(schedule))

    @cached_property
    def growth(self) -> tuple[tuple[list[Stage], list[int]], ...]:
        """For each worker the stages of its operations, and how many micro-batches more each leaves there."""
        return tuple(
            (
                [each.stage for each in lane],
                [len(each.micros) if isinstance(each, Forward) else -len(each.micros) for each in lane],
            )
            for lane in self.lanes
        )

    @cached_property
    def streams_in_order(self) -> bool:
        """Whether one pipe runs on workers of its own, and each takes one micro-batch after the other."""
        workers = [pipe.workers for pipe in self.header(self._change).pipes]
        micros = ([each.micros for each in lane if isinstance(each, kind)] for lane in self.lanes for kind in _KINDS)
        return (
            len(workers) == 1
            and len({*workers[0]}) == len(workers[0])
            and all(own == sorted(own) and all(len(each) == 1 for each in own) for own in micros)
        )

    @cached_property
    def begun(self) -> list[int]:
        """By stage, of how many micro-batches a worker has run the forward and not the backward at most."""
        most = [0] * self.header(self._change).stages
        for stages, counts in self.growth:
            alive: dict[Stage, int] = defaultdict(int)
            for stage, more in zip(stages, counts, strict=True):
                alive[stage] += more
                most[stage] = max(most[stage], alive[stage])
        return most

    def schedule(self, change: Change) -> Schedule:
        """The schedule."""
        return Schedule(self.header(change), self.lanes)

    def lowered(self, change: Change) -> Program:
        """The program that a compilation gives."""
        if change not in self._lowered:
            self._lowered[change] = lower(self.schedule(change), duration=self._duration(change))
        return self._lowered[change]

    def sketch(self, change: Change) -> tuple[Program, tuple[Holdings, ...]]:
        """The program, as far as memory needs it, and what it holds."""
        if change not in self._sketches:
            program = self._streaming(change) if self.header(change).asynchronous else self.lowered(change)
            held = zip(holdings(program), self.copies, strict=True)
            self._sketches[change] = program, tuple(replace(each, copies=tuple(own.items())) for each, own in held)
        return self._sketches[change]

    def _streaming(self, change: Change) -> Program:
        """The sketch of a schedule without a flush: the same lanes whatever is recomputed."""
        known = next((program.lanes for program, _ in self._sketches.values()), None)
        return Program(self.header(change), known) if known else sketch(self.schedule(change))

    def launched(self, change: Change) -> tuple[tuple[tuple[int, Stage], ...], ...]:
        """For each worker the stages of the sums that it launches, each after how many of its operations."""
        if self.header(change).asynchronous:
            return ((),) * len(self.lanes)
        if change not in self._launched:
            precedence, lanes = self.skeleton.precedence, self.skeleton.lanes
            durations = list(map(self._duration(change), precedence.operations))
            ends = earliest_ends(precedence, durations)
            found = launches(
                self.schedule(change),
                [durations[lane.start : lane.stop] for lane in lanes],
                [ends[lane.start : lane.stop] for lane in lanes],
            )
            self._launched[change] = tuple(tuple((after + 1, stage) for after, stage in lane) for lane in found)
        return self._launched[change]

    def _duration(self, change: Change) -> Duration:
        """The costs that a compilation assumes, which knows no profile."""
        _, duration = ticks(self.header(change), Costs())
        return duration
