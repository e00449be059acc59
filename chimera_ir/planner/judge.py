"""Predicts time and memory of configurations: compiles each as far as both need it, then applies equation 1.

Configurations that cannot fit are left out early: first by the bytes that a worker keeps all the time, then by the
lower bound on the whole; of the others the exact bytes are computed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import gt, sub
from sys import maxsize
from typing import NamedTuple

from chimera_ir.cost.durations import rounded
from chimera_ir.cost.simulate import earliest
from chimera_ir.diagnostics.model import Rejected
from chimera_ir.errors import NoSuchTie
from chimera_ir.ir.kinds import RECOMPUTATION
from chimera_ir.ir.levels import Header, Quantity, Schedule
from chimera_ir.ir.text.printer import show
from chimera_ir.orders.search import Improvement
from chimera_ir.planner.compiled import UNIT_COSTS, CompiledScheme, Variant, least, standing
from chimera_ir.planner.space import Configuration, LeftOut, Reason, Recomputation, refusal
from chimera_ir.plural import counted
from chimera_ir.predict.equation import seconds_of
from chimera_ir.predict.events import LayerSplits
from chimera_ir.predict.memory_need import MemoryNeed, memory_of
from chimera_ir.predict.replay import replay
from chimera_ir.predict.screen import size
from chimera_ir.predict.setting import Measured, Setting
from chimera_ir.profile.cluster import FREE, Cluster
from chimera_ir.profile.costs import ModelProfile, stages_of
from chimera_ir.request import EqualTimes, Tie
from chimera_ir.source import Source
from chimera_ir.syntax.ast import Scheme, is_clocked
from chimera_ir.syntax.formatter import Change

# An order that a search found for a configuration.


@dataclass(frozen=True, slots=True)
class FoundOrder:
    """A verified order of a configuration's operations; ``before`` are the replayed seconds of the scheme's order."""

    improvement: Improvement
    before: float

    @property
    def schedule(self) -> Schedule:
        """The schedule in this order."""
        return self.improvement.schedule

    @property
    def text(self) -> str:
        """The schedule as text, below comments that say how it was found."""
        return f"{self.improvement.comments}{show(self.schedule)}"

    def as_json(self) -> dict[str, object]:
        """The result of the search, and ``before``, as plain data for JSON."""
        return {**self.improvement.as_json(), "T_replay_before": rounded(self.before)}


# Divides the time of an update into parts.
#
# The same program is predicted as it is, then without the time of sums, then of messages, and then of steps: the
# differences are their parts.


class TimeParts(NamedTuple):
    """The parts of an update's time, in seconds.

    ``work`` and ``recomputation`` are the times that a worker computes and recomputes, ``bubbles`` is the time that it
    idles where links, sums and steps are free: means over all workers. ``steps``, ``messages`` and ``sums`` are how
    much longer the update takes as each of these, in this order, begins to take time.
    """

    work: float
    recomputation: float
    bubbles: float
    steps: float
    messages: float
    sums: float


def time_parts(variant: Variant, setting: Setting, replays: bool) -> TimeParts:
    """Divides the time of an update: by replays of the program if ``replays``, else by equation 1, without steps."""
    cluster, stages = setting.cluster, setting.stages
    no_sums = replace(setting, cluster=replace(cluster, sums=FREE))
    no_messages = replace(no_sums, cluster=replace(no_sums.cluster, within=FREE, between=FREE))
    no_steps = replace(no_messages, stages=tuple(replace(stage, step=0.0) for stage in stages))

    def seconds(of: Setting) -> float:
        if replays:
            return replay(variant.lowered(of), of).seconds
        return seconds_of(variant.schedule, variant.compiled.structure, variant.launched(of), of)

    header, measured, times = variant.header, Measured.of(setting), [Fraction(), Fraction()]
    for lane in variant.compiled.lanes:
        for operation in lane:
            times[operation.kind is RECOMPUTATION] += measured.duration(operation, header)
    work, recomputation = (float(time) / (header.workers * header.updates) for time in times)
    bare, stepping, talking, whole = map(seconds, (no_steps, no_messages, no_sums, setting))
    return TimeParts(
        work,
        recomputation,
        bubbles=bare - work - recomputation,
        steps=stepping - bare,
        messages=talking - stepping,
        sums=whole - talking,
    )


MODES = {Recomputation.WHERE_NEEDED: (False, True), Recomputation.ALWAYS: (True,), Recomputation.NEVER: (False,)}
"""Whether every stage recomputes, in the order in which this is tried until the configuration fits."""

ALONE = "data parallelism"
"""The name of a configuration that has the whole model on every worker."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A configuration that fits, with its predictions.

    ``equation`` is T of equation 1 in seconds per update, ``least`` a time that no replay undercuts, ``replayed`` the
    time of a replay, if there was one. ``memory`` has the bytes of each worker, ``operations`` is the number of compute
    operations; ``recomputes`` says whether any stage does. ``digest`` is `Variant.digest`; ``equal`` are configurations
    of other names that compile to the same program. ``order`` is the order that a search found.
    """

    choice: Configuration
    scheme: str
    asynchronous: bool
    recomputes: bool
    equation: float
    least: float
    memory: tuple[int, ...]
    operations: int
    digest: str | None = None
    replayed: float | None = None
    equal: tuple[Configuration, ...] = ()
    order: FoundOrder | None = None

    @property
    def is_alone(self) -> bool:
        """Whether every worker has the whole model, and updates it with the gradients of all: no pipeline."""
        return self.choice.workers == 1 and not self.asynchronous

    @property
    def is_plain(self) -> bool:
        """Whether it is plain data parallelism: the model as one stage that recomputes nothing."""
        return self.is_alone and self.choice.stages == 1 and not self.recomputes

    @property
    def name(self) -> str:
        """The name to show: the scheme's or, if every worker has the whole model (`is_alone`), `ALONE`."""
        return ALONE if self.is_alone else self.scheme

    @property
    def identity(self) -> object:
        """Key that is equal for configurations that compile to the same program and run the same micro-batches."""
        choice = self.choice
        return self.digest or choice, choice.copies, choice.micro_batch_size, choice.split

    @property
    def seconds(self) -> float:
        """The best prediction of the time of an update: by the replay, else by equation 1."""
        return self.equation if self.replayed is None else self.replayed

    @property
    def throughput(self) -> float:
        """Items per second, rounded to nine digits: configurations that differ in later digits are equally fast."""
        return _rounded(self.choice.mini_batch / self.seconds)

    @property
    def most_throughput(self) -> float:
        """Items per second that no replay of the configuration exceeds."""
        return _rounded(self.choice.mini_batch / self.least)

    def over(self, other: "Judged") -> float:
        """The throughput divided by that of ``other``: both by replays or, if one lacks a replay, by equation 1."""
        replays = self.replayed is not None and other.replayed is not None
        seconds, other_seconds = (self.seconds, other.seconds) if replays else (self.equation, other.equation)
        return _rounded(self.choice.mini_batch / seconds / (other.choice.mini_batch / other_seconds))


def _rounded(number: float) -> float:
    return float(f"{number:.9g}")


Verdict = Judged | LeftOut


@dataclass(frozen=True, slots=True)
class Judge:
    """Predicts time and memory of configurations on a cluster; ``trusted`` texts are not verified again.

    ``ties`` are stages that share parameters. With a ``sharded_optimizer`` the replicas of a stage share its state,
    where there is a flush.
    """

    schemes: Mapping[Source, Scheme]
    profile: ModelProfile
    cluster: Cluster
    replica_layout: bool
    recomputation: Recomputation
    max_operations: int
    trusted: frozenset[Source]
    ties: tuple[Tie, ...] = ()
    sharded_optimizer: bool = False

    @property
    def available(self) -> int:
        """The bytes that a worker has for the model."""
        return self.cluster.memory - self.cluster.reserved

    def room(self, header: Header) -> tuple[int, ...]:
        """The bytes that each worker has for the model; fewer if the scheme declares a bound."""
        return header.limits(Quantity.BYTES, self.available)

    def setting(self, choice: Configuration) -> Setting:
        """The stages, the cluster and the layout that a configuration runs on."""
        layers, split = self.profile.layers, choice.split
        stages = stages_of(layers, split) if layers and split else self.profile.depths[choice.stages]
        where = self.cluster, choice.copies, choice.micro_batch_size, self.replica_layout
        return Setting(stages, *where, self.sharded_optimizer)

    def all_of(self, choices: Sequence[Configuration]) -> list[Verdict]:
        """Judges each configuration; if it lacks memory, again with moves to the host, then with recomputation."""
        compiler, verdicts = _Compiler(self), list[Verdict]()
        for choice in choices:
            for again in MODES[self.recomputation]:
                verdict = compiler.verdict(choice.recomputing(again))
                if isinstance(verdict, LeftOut):
                    verdict = self._moving(compiler, choice.recomputing(again), verdict) or verdict
                if isinstance(verdict, Judged) or verdict.reason is not Reason.MEMORY:
                    break
            verdicts.append(verdict)
        return verdicts

    def first_of(self, choices: Sequence[Configuration]) -> list[Verdict]:
        """Judges configurations in order until one fits: all as they are, then with moves, then with recomputation."""
        compiler, verdicts = _Compiler(self), list[Verdict]()
        for again in MODES[self.recomputation]:
            left_out: list[tuple[Configuration, LeftOut]] = []
            for choice in choices:
                verdict = compiler.verdict(choice.recomputing(again))
                verdicts.append(verdict)
                if isinstance(verdict, Judged):
                    return verdicts
                left_out.append((choice.recomputing(again), verdict))
            moving = (self._moving(compiler, *refused) for refused in left_out)
            if judged := next(filter(None, moving), None):
                return [*verdicts, judged]
        return verdicts

    def _moving(self, compiler: "_Compiler", choice: Configuration, left_out: LeftOut) -> Judged | None:
        """The verdict on a configuration with moves to the host, if it fits only with them.

        A configuration that recomputes keeps nothing that could move.
        """
        if self.cluster.host is None or left_out.reason is not Reason.MEMORY or choice.change.recompute:
            return None
        verdict = compiler.moving(choice)
        return verdict if isinstance(verdict, Judged) else None

    def replayed(self, judged: Iterable[Judged]) -> tuple[Judged, ...]:
        """The configurations with ``replayed`` computed: the seconds of an update by a replay."""
        compiler = _Compiler(self)
        return tuple(map(compiler.replayed, judged))

    def needed(self, choice: Configuration) -> int:
        """The bytes that the fullest worker of a configuration needs."""
        return max(_Compiler(self).needed(choice))

    def time_parts(self, judged: Judged, replays: bool) -> TimeParts:
        """Divides the time of an update of a configuration: by replays if ``replays``, else by equation 1."""
        return time_parts(self.variant(judged), self.setting(judged.choice), replays)

    def variant(self, judged: Judged) -> Variant:
        """The compiled scheme of a configuration, in the order that a search found if there is one."""
        variant = _Compiler(self).variant(judged.choice)
        return variant if judged.order is None else variant.reordered(judged.order.schedule)

    def in_order(self, judged: Judged, improvement: Improvement) -> Judged | None:
        """Predicts a replayed configuration in an order that a search found; None if it does not fit in this order."""
        assert judged.replayed is not None
        reordered = replace(judged, order=FoundOrder(improvement, judged.replayed), equal=())
        setting, variant = self.setting(judged.choice), self.variant(reordered)
        variant.check()
        needed = tuple(need.total for need in memory_of(variant.header, setting, variant.holdings(setting)))
        if any(map(gt, needed, self.room(variant.header))):
            return None
        structure, launched = variant.compiled.structure, variant.launched(setting)
        return replace(
            reordered,
            equation=seconds_of(variant.schedule, structure, launched, setting),
            memory=needed,
            digest=variant.digest,
            replayed=replay(variant.lowered(setting), setting).seconds,
        )


class _Compiler:
    """Compiles configurations one after the other, and reuses the compiled scheme while scheme and parameters stay."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._last: tuple[object, CompiledScheme] | None = None
        self._variants: dict[Change, Variant] = {}
        self._moving: dict[Configuration, Variant] = {}

    def verdict(self, choice: Configuration) -> Verdict:
        try:
            if self._judge.profile.layers:
                return self._split(choice)
            return self._verdict(replace(choice, split=self._judge.profile.splits.get(choice.stages)))
        except Rejected as rejected:
            return refusal(rejected, choice.source, choice.settings, choice.micro_batch_size)
        except NoSuchTie as error:
            return LeftOut.of(choice, Reason.REFUSED, f"--tied {error.tie}: {error.problem}")

    def moving(self, choice: Configuration) -> Verdict | None:
        """The verdict with moves to the host; None if nothing can move, or weights alone do not fit."""
        judge, header = self._judge, self.variant(choice).header
        if header.moves or header.workers == 1:
            return None
        if not judge.profile.layers and any(
            map(gt, standing(self.variant(choice), judge.setting(choice)), judge.room(header))
        ):
            return None
        return self.verdict(choice.offloading)

    def _split(self, choice: Configuration) -> Verdict:
        """The verdict with a split that fits, and whose slowest stage takes the least time."""
        judge, variant = self._judge, self.variant(choice)
        splits = LayerSplits(
            judge.profile.layers, variant.header, choice.micro_batch_size, choice.copies, judge.sharded_optimizer
        )
        room = judge.room(variant.header)
        verdict: Verdict = LeftOut.of(choice, Reason.MEMORY, "no split of the layers fits the workers")
        for split in splits.candidates(
            room, lambda: variant.compiled.loads, lambda split: self.needed(replace(choice, split=split))
        ):
            verdict = self._verdict(replace(choice, split=split))
            if isinstance(verdict, Judged) or verdict.reason is not Reason.MEMORY:
                return verdict
        return verdict

    def _verdict(self, choice: Configuration) -> Verdict:
        choice = self._cut(choice)
        setting, variant = self._judge.setting(choice), self.variant(choice)
        compiled, header = variant.compiled, variant.header
        # The scheme has to be of the size that its parameters promise, and the profile has to know its operations.
        if (header.whole_micro_batches, header.stages) != (choice.micro_batches, choice.stages):
            size = f"{counted(header.whole_micro_batches, 'micro-batch')} and {counted(header.stages, 'stage')}"
            detail = f"it has {size}, not {choice.micro_batches} and {choice.stages}"
            return LeftOut.of(choice, Reason.REFUSED, detail)
        if not setting.halves_known and compiled.splits:
            detail = "it has no times of split backwards: input_gradient and weight_gradient"
            return LeftOut.of(choice, Reason.PROFILE, detail)
        variant.check()
        # Memory, from cheap to dear: two lower bounds, then the exact bytes.
        room = self._judge.room(header)
        for bound in (standing, least):
            needed = bound(variant, setting)
            if any(map(gt, needed, room)):
                return self._over(choice, needed, room, "at least ")
        needed = self.needed(choice)
        if any(map(gt, needed, room)):
            return self._over(choice, needed, room, "")
        if header.moves or any(bound.quantity is Quantity.HOST_BYTES for bound in header.bounds):
            hosted = [need.host for need in self._needs(choice)]
            room = header.limits(Quantity.HOST_BYTES, setting.host.memory or maxsize)
            if any(map(gt, hosted, room)):
                return self._over(choice, hosted, room, "host memory of ")
        # Only a configuration that fits is lowered for its time; without a flush its program is proven before.
        variant.prove(setting)
        return Judged(
            choice,
            header.scheme,
            header.asynchronous,
            any(pipe.recompute for pipe in header.pipes),
            seconds_of(variant.schedule, compiled.structure, variant.launched(setting), setting),
            self._least(choice),
            tuple(needed),
            sum(map(len, compiled.lanes)),
            variant.digest,
        )

    def replayed(self, judged: Judged) -> Judged:
        """Replays a configuration and sets its time; takes an even split of layers if that is faster and fits."""
        # Equation 1 chose the split; the replay, which sees messages and sums, may find an even one faster.
        choice, layers = judged.choice, len(self._judge.profile.layers)
        first = self._replayed(judged)
        if not layers or first.replayed is None:
            return first
        even = self._evenly_split(choice.unjudged)
        verdict = first if even.split == choice.split else self._verdict(even)
        if isinstance(verdict, LeftOut) or verdict is first:
            return first
        other = self._replayed(replace(verdict, equal=judged.equal))
        return other if other.replayed is not None and other.replayed < first.replayed else first

    def _least(self, choice: Configuration) -> float:
        """The time with free messages and sums, in the better of the splits that `replayed` tries.

        Where operations have no clocks, their order depends on the split, so the mean work of a worker takes its place.
        """
        judge, variant = self._judge, self.variant(choice)
        if not is_clocked(judge.schemes[choice.source]) and judge.profile.layers:
            measured = Measured.of(judge.setting(choice))
            work = sum(
                measured.duration(operation, variant.header) for lane in variant.compiled.lanes for operation in lane
            )
            return float(work / variant.header.workers / (variant.header.updates if variant.header.asynchronous else 1))
        splits = dict.fromkeys((choice.split, self._evenly_split(choice).split))
        runs = (
            earliest(
                variant.header, variant.compiled.structure, Measured.of(judge.setting(replace(choice, split=split)))
            )
            for split in splits
        )
        return float(min(run.length * run.tick for run in runs))

    def _replayed(self, judged: Judged) -> Judged:
        setting = self._judge.setting(judged.choice)
        return replace(judged, replayed=replay(self.variant(judged.choice).lowered(setting), setting).seconds)

    def needed(self, choice: Configuration) -> list[int]:
        return [need.total for need in self._needs(choice)]

    def _cut(self, choice: Configuration) -> Configuration:
        """The configuration with numbers for the lengths of slices that take equally long."""
        if choice.lengths is not EqualTimes.EQUAL_TIMES:
            return choice
        judge = self._judge
        return replace(choice, lengths=judge.setting(choice).equal_times(choice.slices, judge.profile.positions))

    def _needs(self, choice: Configuration) -> tuple[MemoryNeed, ...]:
        choice = self._cut(choice)
        setting, variant = self._judge.setting(choice), self.variant(choice)
        return memory_of(variant.header, setting, variant.holdings(setting))

    def variant(self, choice: Configuration) -> Variant:
        # Configurations come sorted by scheme and parameters: the last compiled scheme is the only one worth keeping.
        judge, change = self._judge, choice.change
        scheme, trusted = judge.schemes[choice.source], choice.source in judge.trusted
        # Where operations have no clocks, their order depends on the costs of the stages, so on what else is chosen;
        # splits are sought with those of an even one.
        split = choice if choice.split is not None else self._evenly_split(choice)
        durations = None if is_clocked(scheme) else Measured.of(judge.setting(split))
        where = () if durations is None else (choice.stages, choice.copies, choice.micro_batch_size, split.split)
        key = choice.source, choice.settings, choice.known_lengths, where
        if self._last is None or self._last[0] != key:
            options = judge.max_operations, trusted, judge.ties, durations or UNIT_COSTS, None, choice.known_lengths
            self._last = key, CompiledScheme(scheme, choice.settings, change, *options)
            self._variants, self._moving = {}, {}
        if change not in self._variants:
            self._variants[change] = Variant(self._last[1], change)
        if not choice.offload:
            return self._variants[change]
        # Moves depend on all durations.
        if choice not in self._moving:
            durations = Measured.of(judge.setting(split))
            self._moving[choice] = self._variants[change].offloaded(durations)
        return self._moving[choice]

    def _evenly_split(self, choice: Configuration) -> Configuration:
        layers = len(self._judge.profile.layers)
        if not layers:
            return choice
        return replace(choice, split=tuple(stage * layers // choice.stages for stage in range(choice.stages)))

    def _over(self, choice: Configuration, needed: Sequence[int], room: Sequence[int], prefix: str) -> LeftOut:
        lacking = list(map(sub, needed, room))
        worker = lacking.index(max(lacking))
        declared = room[worker] not in (self._judge.available, self._judge.setting(choice).host.memory)
        limit = "the scheme declares" if declared else "there is"
        detail = f"worker {worker} needs {prefix}{size(needed[worker])}, {size(lacking[worker])} more than {limit}"
        return LeftOut.of(choice, Reason.MEMORY, detail, 0 if declared else needed[worker])
