"""A scheme compiled as far as the planner needs it for time and memory; the same for every micro-batch size B."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain
from math import gcd, lcm
from typing import TYPE_CHECKING

from chimera_ir.cost.critical import Skeleton, skeleton
from chimera_ir.cost.model import Alike, alike
from chimera_ir.diagnostics.model import raise_errors
from chimera_ir.elaborate.elaborate import Outline, outline
from chimera_ir.ir.ids import Stage, WeightGroup
from chimera_ir.ir.kinds import KINDS
from chimera_ir.ir.levels import Header, Plan, Program, Schedule
from chimera_ir.ir.ops import Operation, singles
from chimera_ir.ir.streams import ProgramStream, stream_of, view_of
from chimera_ir.lower.lower import lower
from chimera_ir.lower.order import order
from chimera_ir.lower.streaming import Messages, messages_of
from chimera_ir.lower.sync import Duration, launches
from chimera_ir.lower.updates import copies
from chimera_ir.predict.measured import Measured
from chimera_ir.predict.setting import Setting
from chimera_ir.request import Tie, groups
from chimera_ir.syntax.ast import Scheme
from chimera_ir.syntax.change import Change
from chimera_ir.verify.holdings import Holdings, Receiving, fullest, holdings, sending

if TYPE_CHECKING:
    from chimera_ir.verify.verify import Checked

_Pattern = tuple[int, ...]
"""Relative durations, one for each `Alike`; launches of gradient sums depend on nothing else."""


class CompiledScheme:
    """A scheme with its parameters, at each level on demand and for any change that is asked beyond its text.

    ``change`` is one of those changes; all have the same lanes. A ``trusted`` text is not verified again, unless it is
    without a flush and ``ties`` say that stages share parameters; any other has to pass `check` before its lanes are
    used.

    Raises
    ------
    Rejected
        By any method or property, if the scheme has errors.
    NoSuchTie
        By any method or property, if the scheme lacks a stage of a tie.
    """

    def __init__(
        self,
        scheme: Scheme,
        settings: tuple[tuple[str, int], ...],
        change: Change,
        max_operations: int,
        trusted: bool,
        ties: tuple[Tie, ...] = (),
    ) -> None:
        self._scheme, self._settings, self._change = scheme, dict(settings), change
        self._max_operations, self._trusted, self._ties = max_operations, trusted, ties
        self._outlines: dict[Change, Outline] = {}
        self._alike: dict[Change, list[Alike]] = {}
        self._samples: dict[Change, dict[Alike, Operation]] = {}
        self._checked: dict[Change, Checked] = {}
        self._proven: set[tuple[Change, _Pattern]] = set()
        self._lowered: dict[tuple[Change, _Pattern], Program | ProgramStream] = {}
        self._held: dict[Change, tuple[Holdings, ...]] = {}
        self._launched: dict[tuple[Change, _Pattern], tuple[tuple[tuple[int, WeightGroup], ...], ...]] = {}

    def header(self, change: Change) -> Header:
        """The header of the plan, the schedule and the program."""
        return self._outline(change).header

    def _outline(self, change: Change) -> Outline:
        if change not in self._outlines:
            outlined = outline(change.of(self._scheme), self._settings, self._max_operations)
            header = outlined.header
            self._outlines[change] = replace(outlined, header=replace(header, ties=groups(self._ties, header.stages)))
        return self._outlines[change]

    @cached_property
    def _plan(self) -> Plan:
        return self._outline(self._change).plan()

    @cached_property
    def lanes(self) -> tuple[tuple[Operation, ...], ...]:
        """The lanes of the schedule."""
        return order(self._plan).lanes

    def check(self, change: Change) -> None:
        """Verify the schedule, unless it is trusted.

        Raises
        ------
        Rejected
            With the errors that a compilation finds in the schedule.
        """
        if self._trusts(change) or change in self._checked:
            return
        from chimera_ir.verify.verify import verify_schedule  # with networkx, which takes a while

        checked = verify_schedule(self.schedule(change), replace(self._plan, header=self.header(change)))
        raise_errors(checked.findings.diagnostics)
        self._checked[change] = checked

    def _trusts(self, change: Change) -> bool:
        """Whether nothing is to be verified. Stages of a stream that share parameters must read the same versions."""
        header = self.header(change)
        return self._trusted and not (header.ties and header.asynchronous)

    def prove(self, change: Change, setting: Setting) -> None:
        """Verify the program of a scheme without a flush, unless it is trusted.

        Errors in versions, and gradient sums that some workers have no part in, show only in the program. With a flush,
        the program of a schedule that passes `check` has no errors (tests/property/test_random_schemes.py).

        Raises
        ------
        Rejected
            With the errors that a compilation finds in the program.
        """
        key = change, self._pattern(change, setting)
        if self._trusts(change) or not self.header(change).asynchronous or key in self._proven:
            return
        from chimera_ir.verify.verify import verify_lowered

        self.check(change)
        verify_lowered(self._level(change, setting), self._checked[change])
        self._proven.add(key)

    @cached_property
    def skeleton(self) -> Skeleton:
        """The skeleton of every timeline."""
        return skeleton(self.schedule(self._change))

    @cached_property
    def copies(self) -> tuple[dict[Stage, int], ...]:
        """For each worker and each of its stages, the most copies of the weights that it keeps at once."""
        schedule = self.schedule(self._change)
        if not schedule.header.asynchronous:
            return tuple(dict.fromkeys(stages, 1) for stages in schedule.header.stages_of)
        return tuple(copies(schedule))

    @cached_property
    def growth(self) -> tuple[tuple[list[Stage], list[int]], ...]:
        """For each worker the stages of its operations, and the change in waiting micro-batches by each operation."""
        growth = self.header(self._change).growth
        return tuple(
            (
                [operation.stage for operation in singles(lane)],
                [sum(growth[operation.kind]) * operation.size for operation in singles(lane)],
            )
            for lane in self.lanes
        )

    @cached_property
    def splits(self) -> bool:
        """Whether any backward is split; the lanes are asked only if a line of the scheme says one."""
        halves = {kind for kind in KINDS.values() if kind.keeps and not kind.opens}
        lines = chain.from_iterable(shape.operations for shape in self._outline(self._change).shapes)
        written = {KINDS[subject.letter.value] for line in lines for subject in line.subjects}
        if halves.isdisjoint(written):
            return False
        return any(operation.kind in halves for lane in self.lanes for operation in singles(lane))

    @cached_property
    def streams_in_order(self) -> bool:
        """Whether there is one pipe, with one stage per worker, and each worker takes single micro-batches in order."""
        workers = [pipe.workers for pipe in self.header(self._change).pipes]
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

    @cached_property
    def begun(self) -> list[int]:
        """By stage, the most micro-batches that have run their forward on a worker and not yet their backward."""
        most = [0] * self.header(self._change).stages
        for stages, counts in self.growth:
            alive: dict[Stage, int] = defaultdict(int)
            for stage, more in zip(stages, counts, strict=True):
                alive[stage] += more
                most[stage] = max(most[stage], alive[stage])
        return most

    def schedule(self, change: Change) -> Schedule:
        """The schedule with what a change asks for."""
        return Schedule(self.header(change), self.lanes)

    def lowered(self, change: Change, setting: Setting) -> Program:
        """The program, as a compilation gives it; of a stream as many updates as show all that ever happens."""
        return view_of(self._level(change, setting))

    def _level(self, change: Change, setting: Setting) -> Program | ProgramStream:
        key = change, self._pattern(change, setting)
        if key not in self._lowered:
            schedule = self.schedule(change)
            duration = self._duration(*key)
            self._lowered[key] = (
                lower(stream_of(schedule), duration=duration)
                if schedule.header.asynchronous
                else lower(schedule, duration=duration, net=self.skeleton.net)
            )
        return self._lowered[key]

    def holdings(self, change: Change, setting: Setting) -> tuple[Holdings, ...]:
        """What memory each worker's part of the program needs follows from."""
        if change not in self._held:
            streams = self.header(change).asynchronous
            held = self._held_in_stream(change) if streams else holdings(self.lowered(change, setting))
            self._held[change] = tuple(held)
        return self._held[change]

    def _held_in_stream(self, change: Change) -> Iterator[Holdings]:
        """The holdings of a program without a flush, without the program."""
        header = self.header(change)
        for stages, counts, lane, messages in zip(
            header.stages_of, self.copies, self.lanes, self._messages, strict=True
        ):
            yield Holdings(
                fullest(header, stages, singles(lane[: messages.end])),
                tuple(counts.items()),
                (),
                sending(stages, messages.under_way),
                tuple(Receiving(*way, slots) for way, slots in messages.slots),
            )

    @cached_property
    def _messages(self) -> tuple[Messages, ...]:
        """The messages of a schedule without a flush; they are the same for every change."""
        return tuple(messages_of(self.schedule(self._change)))

    def launched(self, change: Change, setting: Setting) -> tuple[tuple[tuple[int, WeightGroup], ...], ...]:
        """For each worker the gradient sums that it launches: after how many of its operations, and of which group."""
        if self.header(change).asynchronous:
            return ((),) * len(self.lanes)
        key = change, self._pattern(change, setting)
        if key not in self._launched:
            net = self.skeleton.net
            durations = self._durations(*key)
            ends = net.ends(durations)
            launched = launches(
                self.schedule(change),
                [durations[lane.start : lane.stop] for lane in net.lanes],
                [ends[lane.start : lane.stop] for lane in net.lanes],
            )
            self._launched[key] = tuple(tuple((after + 1, group) for after, group in lane) for lane in launched)
        return self._launched[key]

    def _representatives(self, change: Change) -> dict[Alike, Operation]:
        """One operation of each that take equally long."""
        if change not in self._samples:
            operations = chain.from_iterable(self.lanes)
            self._samples[change] = dict(zip(self._all_alike(change), operations, strict=True))
        return self._samples[change]

    def _all_alike(self, change: Change) -> list[Alike]:
        """Of each operation, lane by lane, what those have in common that take equally long."""
        if change not in self._alike:
            header = self.header(change)
            self._alike[change] = [alike(operation, header) for operation in chain.from_iterable(self.lanes)]
        return self._alike[change]

    def _duration(self, change: Change, pattern: _Pattern) -> Duration:
        """The duration of an operation, as a function, by a pattern."""
        if not pattern:
            return lambda _: 1
        header, known = self.header(change), self._patterned(change, pattern)
        return lambda operation: known[alike(operation, header)]

    def _durations(self, change: Change, pattern: _Pattern) -> list[int]:
        """The durations of all operations, lane by lane, by a pattern."""
        keys = self._all_alike(change)
        return list(map(self._patterned(change, pattern).__getitem__, keys)) if pattern else [1] * len(keys)

    def _patterned(self, change: Change, pattern: _Pattern) -> dict[Alike, int]:
        return dict(zip(self._representatives(change), pattern, strict=True))

    def _pattern(self, change: Change, setting: Setting) -> _Pattern:
        """The relative durations in a setting; empty where no worker has several gradient sums to launch."""
        header = self.header(change)
        if all(len(held) < 2 for held in header.groups_of):
            return ()
        measured = Measured.of(setting)
        times = [measured.duration(operation, header) for operation in self._representatives(change).values()]
        unit = lcm(*(time.denominator for time in times))
        whole = [time.numerator * (unit // time.denominator) for time in times]
        common = gcd(*whole)
        return tuple(ticks // common for ticks in whole)
