"""Predicts time and memory of configurations: compiles each as far as both need it, then applies equation 1.

Configurations that cannot fit are left out early: first by the bytes that a worker keeps all the time, then by the
lower bound on the whole; of the others the exact bytes are computed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from operator import gt, sub
from sys import maxsize
from typing import NamedTuple

from chimera_ir.cost.simulate import earliest
from chimera_ir.diagnostics.model import Rejected
from chimera_ir.errors import NoSuchTie, ProgramsDiffer
from chimera_ir.ir.kinds import RECOMPUTATION
from chimera_ir.ir.levels import Header, Quantity
from chimera_ir.options import Options
from chimera_ir.orders.search import Improvement
from chimera_ir.planner.compiled import UNIT_COSTS, Variant, least, standing
from chimera_ir.planner.space import Configuration, LeftOut, Question, Reason, Recomputation, refusal
from chimera_ir.plural import counted
from chimera_ir.predict.equation import seconds_of
from chimera_ir.predict.events import LayerSplits
from chimera_ir.predict.memory_need import MemoryNeed, memory_of
from chimera_ir.predict.replay import replay
from chimera_ir.predict.screen import size
from chimera_ir.predict.setting import Measured, Setting
from chimera_ir.profile.cluster import FREE, Cluster
from chimera_ir.profile.costs import ModelProfile
from chimera_ir.request import EqualTimes
from chimera_ir.source import Source
from chimera_ir.syntax.ast import Scheme, is_clocked
from chimera_ir.syntax.formatter import Change


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


MODES = {Recomputation.WHERE_NEEDED: (False, True), Recomputation.ALWAYS: (True,), Recomputation.NEVER: (False,)}
"""Whether every stage recomputes, in the order in which this is tried until the configuration fits."""

ALONE = "data parallelism"
"""The name of a configuration that has the whole model on every worker."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A configuration that fits, with its predictions.

    ``equation`` is T of equation 1 in seconds per update, ``least`` a time that no replay undercuts, ``replayed`` the
    time of a replay, if there was one: means, if updates have different numbers of micro-batches. ``memory`` has the
    bytes of each worker, ``operations`` is the number of compute operations; ``recomputes`` says whether any stage
    does. ``digest`` is that of `Variant.digest`; ``equal`` are configurations of other names that compile to the same
    program. ``order`` is the order that a search found, and ``before`` the time of a replay in the scheme's own order.
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
    order: Improvement | None = None
    before: float = 0.0

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
        return _rounded(self.choice.items / self.seconds)

    @property
    def most_throughput(self) -> float:
        """Items per second that no replay of the configuration exceeds."""
        return _rounded(self.choice.items / self.least)

    def over(self, other: "Judged") -> float:
        """The throughput divided by that of ``other``: both by replays or, if one lacks a replay, by equation 1."""
        replays = self.replayed is not None and other.replayed is not None
        seconds, other_seconds = (self.seconds, other.seconds) if replays else (self.equation, other.equation)
        return _rounded(self.choice.items / seconds / (other.choice.items / other_seconds))


def _rounded(number: float) -> float:
    return float(f"{number:.9g}")


Verdict = Judged | LeftOut


@dataclass
class Judge:
    """Predicts time and memory of configurations on a cluster, as ``options`` have them.

    ``trusted`` texts are not verified again. Compiled variants are kept as long as scheme and parameters stay.
    """

    schemes: Mapping[Source, Scheme]
    profile: ModelProfile
    cluster: Cluster
    question: Question
    options: Options
    trusted: frozenset[Source]

    def __post_init__(self) -> None:
        self._key: object = None
        self._variants: dict[Change, Variant] = {}
        self._moved: dict[Configuration, Variant] = {}
        self._profiles: dict[object, ModelProfile] = {}

    @property
    def available(self) -> int:
        """The bytes that a worker has for the model."""
        return self.cluster.memory - self.cluster.reserved

    def room(self, header: Header) -> tuple[int, ...]:
        """The bytes that each worker has for the model; fewer if the scheme declares a bound."""
        return header.limits(Quantity.BYTES, self.available)

    def setting(self, choice: Configuration) -> Setting:
        """The stages, the cluster and the layout that a configuration runs on."""
        stages = self._profile(choice).stages_in(choice.stages, choice.split)
        replica_layout = self.options.layout == "replica"
        where = self.cluster, choice.copies, choice.micro_batch_size, replica_layout
        return Setting(stages, *where, self.options.shard_optimizer)

    def _profile(self, choice: Configuration) -> ModelProfile:
        key = choice.named, choice.sources
        if key not in self._profiles:
            self._profiles[key] = self.profile.joined(*key)
        return self._profiles[key]

    def all_of(self, choices: Sequence[Configuration]) -> list[Verdict]:
        """Judges each configuration; if it lacks memory, again with moves to the host, then with recomputation."""
        verdicts = list[Verdict]()
        for choice in choices:
            for again in MODES[self.question.recomputation]:
                verdict = self._verdict(choice.recomputing(again))
                if isinstance(verdict, LeftOut):
                    verdict = self._moving(choice.recomputing(again), verdict) or verdict
                if isinstance(verdict, Judged) or verdict.reason is not Reason.MEMORY:
                    break
            verdicts.append(verdict)
        return verdicts

    def first_of(self, choices: Sequence[Configuration]) -> list[Verdict]:
        """Judges configurations in order until one fits: all as they are, then with moves, then with recomputation."""
        verdicts = list[Verdict]()
        for again in MODES[self.question.recomputation]:
            left_out: list[tuple[Configuration, LeftOut]] = []
            for choice in choices:
                verdict = self._verdict(choice.recomputing(again))
                verdicts.append(verdict)
                if isinstance(verdict, Judged):
                    return verdicts
                left_out.append((choice.recomputing(again), verdict))
            moving = (self._moving(*refused) for refused in left_out)
            if judged := next(filter(None, moving), None):
                return [*verdicts, judged]
        return verdicts

    def _moving(self, choice: Configuration, left_out: LeftOut) -> Judged | None:
        """The verdict on a configuration with moves to the host, if it fits only with them.

        A configuration that recomputes keeps nothing that could move, and weights do not move.
        """
        if self.cluster.host is None or left_out.reason is not Reason.MEMORY or choice.change.recompute:
            return None
        variant = self.variant(choice)
        if variant.header.moves or variant.header.workers == 1:
            return None
        if not self._profile(choice).layers and _exceeds(
            standing(variant, self.setting(choice)), self.room(variant.header)
        ):
            return None
        verdict = self._verdict(choice.offloading)
        return verdict if isinstance(verdict, Judged) else None

    def _verdict(self, choice: Configuration) -> Verdict:
        try:
            if self._profile(choice).layers:
                return self._best_split(choice)
            return self._as_split(replace(choice, split=self._profile(choice).splits.get(choice.stages)))
        except Rejected as rejected:
            return refusal(rejected, choice.source, choice.settings, choice.micro_batch_size)
        except NoSuchTie as error:
            return LeftOut.of(choice, Reason.REFUSED, f"--tied {error.tie}: {error.problem}")

    def _best_split(self, choice: Configuration) -> Verdict:
        """The verdict with a split that fits, and whose slowest stage takes the least time."""
        variant, options = self.variant(choice), self.options
        splits = LayerSplits(
            self._profile(choice), variant.header, choice.micro_batch_size, choice.copies, options.shard_optimizer
        )
        room = self.room(variant.header)
        verdict: Verdict = LeftOut.of(choice, Reason.MEMORY, "no split of the layers fits the workers")
        for split in splits.candidates(
            room, lambda: variant.loads, lambda split: self.needed(replace(choice, split=split))
        ):
            verdict = self._as_split(replace(choice, split=split))
            if isinstance(verdict, Judged) or verdict.reason is not Reason.MEMORY:
                return verdict
        return verdict

    def _as_split(self, choice: Configuration) -> Verdict:
        """The verdict on a configuration with a split; of several numbers of micro-batches each is judged."""
        (largest, share), *smaller = choice.sizes
        verdict = self._of_size(largest)
        if isinstance(verdict, LeftOut) or not smaller:
            return verdict
        judged, shares = [verdict], [share]
        for sized, share in smaller:
            try:
                verdict = self._of_size(sized)
            except Rejected as rejected:
                verdict = refusal(rejected, sized.source, sized.settings, sized.micro_batch_size)
            if isinstance(verdict, LeftOut):
                number = counted(sized.micro_batches, "micro-batch")
                return replace(verdict, detail=f"with {number}: {verdict.detail}", choice=choice)
            judged.append(verdict)
            shares.append(share)
        try:
            self._require_together([verdict.choice for verdict in judged])
        except ProgramsDiffer as error:
            return LeftOut.of(choice, Reason.REFUSED, str(error))
        digests = [verdict.digest for verdict in judged]
        return replace(
            judged[0],
            choice=replace(judged[0].choice, others=choice.others),
            equation=_mean(shares, [verdict.equation for verdict in judged]),
            least=_mean(shares, [verdict.least for verdict in judged]),
            memory=tuple(map(max, *(verdict.memory for verdict in judged))),
            operations=sum(verdict.operations for verdict in judged),
            digest=None if None in digests else repr((shares, digests)),
        )

    def _require_together(self, sizes: Sequence[Configuration]) -> None:
        """Raises `ProgramsDiffer` if the programs cannot share a directory; the first one is the largest."""
        from chimera_ir.codegen.facts import used_by
        from chimera_ir.several import require_alike, require_prepared

        variants = [self.variant(choice) for choice in sizes]
        largest, *smaller = ((variant.header, used_by([*chain(*variant.lanes)])) for variant in variants)
        for header, uses in smaller:
            require_alike(header, largest[0])
            require_prepared(header, uses, *largest)

    def _of_size(self, choice: Configuration) -> Verdict:
        choice = self._cut(choice)
        setting, variant = self.setting(choice), self.variant(choice)
        header = variant.header
        # The scheme has to be of the size that its parameters promise, and the profile has to know its operations.
        if (header.whole_micro_batches, header.stages) != (choice.micro_batches, choice.stages):
            size = f"{counted(header.whole_micro_batches, 'micro-batch')} and {counted(header.stages, 'stage')}"
            detail = f"it has {size}, not {choice.micro_batches} and {choice.stages}"
            return LeftOut.of(choice, Reason.REFUSED, detail)
        if not setting.halves_known and variant.splits:
            detail = "it has no times of split backwards: input_gradient and weight_gradient"
            return LeftOut.of(choice, Reason.PROFILE, detail)
        variant.check()
        # Memory, from cheap to dear: two lower bounds, then the exact bytes.
        room = self.room(header)
        for bound in (standing, least):
            needed = bound(variant, setting)
            if _exceeds(needed, room):
                return self._over(choice, needed, room, "at least ")
        needed = self.needed(choice)
        if _exceeds(needed, room):
            return self._over(choice, needed, room, "")
        if header.moves or any(bound.quantity is Quantity.HOST_BYTES for bound in header.bounds):
            hosted = [need.host for need in self._needs(choice)]
            room = header.limits(Quantity.HOST_BYTES, setting.host.memory or maxsize)
            if _exceeds(hosted, room):
                return self._over(choice, hosted, room, "host memory of ")
        # Only a configuration that fits is lowered for its time; without a flush its program is proven before.
        variant.prove(setting)
        return Judged(
            choice,
            header.scheme,
            header.asynchronous,
            any(pipe.recompute for pipe in header.pipes),
            _by_equation(variant, setting),
            self._least(choice),
            tuple(needed),
            sum(map(len, variant.lanes)),
            variant.digest,
        )

    def replayed(self, several: Iterable[Judged]) -> list[Judged]:
        """Replays configurations and sets their times; takes an even split of layers if that is faster and fits."""
        return [self._faster_split(judged) for judged in several]

    def _faster_split(self, judged: Judged) -> Judged:
        # Equation 1 chose the split; the replay, which sees messages and sums, may find an even one faster.
        first = self._replayed(judged)
        even = self._evenly_split(judged.choice.unjudged)
        if even.split in (None, judged.choice.split):
            return first
        verdict = self._as_split(even)
        if isinstance(verdict, LeftOut):
            return first
        other = self._replayed(replace(verdict, equal=judged.equal))
        return other if other.seconds < first.seconds else first

    def _replayed(self, judged: Judged) -> Judged:
        setting, (sizes, shares) = self.setting(judged.choice), zip(*judged.choice.sizes, strict=True)
        return replace(judged, replayed=_mean(shares, [_by_replay(self.variant(sized), setting) for sized in sizes]))

    def _least(self, choice: Configuration) -> float:
        """The time with free messages and sums, in the better of the splits that `replayed` tries.

        Where operations have no clocks, their order depends on the split, so the mean work of a worker takes its place.
        """
        variant = self.variant(choice)
        if not is_clocked(self.schemes[choice.source]) and self._profile(choice).layers:
            measured = Measured.of(self.setting(choice))
            work = sum(measured.duration(operation, variant.header) for lane in variant.lanes for operation in lane)
            return float(work / variant.header.workers / (variant.header.updates if variant.header.asynchronous else 1))
        splits = dict.fromkeys((choice.split, self._evenly_split(choice).split))
        settings = (self.setting(replace(choice, split=split)) for split in splits)
        runs = (earliest(variant.header, variant.structure, Measured.of(setting)) for setting in settings)
        return float(min(run.length * run.tick for run in runs))

    def needed(self, choice: Configuration) -> list[int]:
        """The bytes that each worker of a configuration needs."""
        return [need.total for need in self._needs(choice)]

    def _needs(self, choice: Configuration) -> tuple[MemoryNeed, ...]:
        choice = self._cut(choice)
        setting, variant = self.setting(choice), self.variant(choice)
        return memory_of(variant.header, setting, variant.holdings(setting))

    def _cut(self, choice: Configuration) -> Configuration:
        """The configuration with numbers for the lengths of slices that take equally long."""
        if choice.lengths is not EqualTimes.EQUAL_TIMES:
            return choice
        return replace(choice, lengths=self.setting(choice).equal_times(choice.slices, self.profile.positions))

    def _evenly_split(self, choice: Configuration) -> Configuration:
        profile = self._profile(choice)
        return replace(choice, split=profile.even(choice.stages)) if profile.layers else choice

    def variant(self, choice: Configuration) -> Variant:
        """The compiled scheme of a configuration, in the scheme's own order."""
        # Configurations come sorted by scheme and parameters: only the last ones are worth keeping.
        change, scheme = choice.change, self.schemes[choice.source]
        # Where operations have no clocks, their order depends on the costs of the stages, so on what else is chosen;
        # splits are sought with those of an even one.
        split = choice if choice.split is not None else self._evenly_split(choice)
        durations = None if is_clocked(scheme) else Measured.of(self.setting(split))
        where = () if durations is None else (choice.stages, choice.copies, choice.micro_batch_size, split.split)
        key = choice.source, choice.settings, choice.known_lengths, where
        if self._key != key:
            self._key, self._variants, self._moved = key, {}, {}
        if change not in self._variants:
            trusted, ties = choice.source in self.trusted, self.options.ties()
            options = self.options.max_operations, trusted, ties, durations or UNIT_COSTS, None, choice.known_lengths
            self._variants[change] = Variant(scheme, choice.settings, change, *options)
        if not choice.offload:
            return self._variants[change]
        # Moves depend on all durations.
        if choice not in self._moved:
            self._moved[choice] = self._variants[change].offloaded(Measured.of(self.setting(split)))
        return self._moved[choice]

    def in_order_found(self, judged: Judged) -> Variant:
        """The compiled scheme of a configuration, in the order that a search found if there is one."""
        variant = self.variant(judged.choice)
        return variant if judged.order is None else variant.reordered(judged.order.schedule)

    def reordered(self, judged: Judged, improvement: Improvement) -> Judged | None:
        """Predicts a replayed configuration in an order that a search found; None if it does not fit in this order."""
        assert judged.replayed is not None
        reordered = replace(judged, order=improvement, before=judged.replayed, equal=())
        setting, variant = self.setting(judged.choice), self.in_order_found(reordered)
        variant.check()
        needed = tuple(need.total for need in memory_of(variant.header, setting, variant.holdings(setting)))
        if _exceeds(needed, self.room(variant.header)):
            return None
        return replace(
            reordered,
            equation=_by_equation(variant, setting),
            memory=needed,
            digest=variant.digest,
            replayed=_by_replay(variant, setting),
        )

    def time_parts(self, judged: Judged, replays: bool) -> TimeParts:
        """Divides the time of an update: by replays of the program if ``replays``, else by equation 1, without steps.

        The same program is predicted as it is, then without the time of sums, then of messages, and then of steps: the
        differences are their parts. With several numbers of micro-batches all are means.
        """
        sizes, shares = zip(*judged.choice.sizes, strict=True)
        parts = [self._time_parts(replace(judged, choice=sized), replays) for sized in sizes]
        return TimeParts(*(_mean(shares, seconds) for seconds in zip(*parts, strict=True)))

    def _time_parts(self, judged: Judged, replays: bool) -> TimeParts:
        variant, setting = self.in_order_found(judged), self.setting(judged.choice)
        no_sums = replace(setting, cluster=replace(setting.cluster, sums=FREE))
        no_messages = replace(no_sums, cluster=replace(no_sums.cluster, within=FREE, between=FREE))
        no_steps = replace(no_messages, stages=tuple(replace(stage, step=0.0) for stage in setting.stages))
        predicted = _by_replay if replays else _by_equation
        bare, stepping, talking, whole = (predicted(variant, of) for of in (no_steps, no_messages, no_sums, setting))
        header, measured, times = variant.header, Measured.of(setting), [Fraction(), Fraction()]
        for lane in variant.lanes:
            for operation in lane:
                times[operation.kind is RECOMPUTATION] += measured.duration(operation, header)
        work, recomputation = (float(time) / (header.workers * header.updates) for time in times)
        return TimeParts(
            work,
            recomputation,
            bubbles=bare - work - recomputation,
            steps=stepping - bare,
            messages=talking - stepping,
            sums=whole - talking,
        )

    def _over(self, choice: Configuration, needed: Sequence[int], room: Sequence[int], prefix: str) -> LeftOut:
        lacking = list(map(sub, needed, room))
        worker = lacking.index(max(lacking))
        declared = room[worker] not in (self.available, self.setting(choice).host.memory)
        limit = "the scheme declares" if declared else "there is"
        detail = f"worker {worker} needs {prefix}{size(needed[worker])}, {size(lacking[worker])} more than {limit}"
        return LeftOut.of(choice, Reason.MEMORY, detail, 0 if declared else needed[worker])


def _exceeds(needed: Sequence[int], room: Sequence[int]) -> bool:
    return any(map(gt, needed, room))


def _mean(shares: Sequence[Fraction], seconds: Sequence[float]) -> float:
    """The mean of times, of which each has a share of all updates; a single one is as it is."""
    return sum(float(share) * time for share, time in zip(shares, seconds, strict=True))


def _by_equation(variant: Variant, setting: Setting) -> float:
    """T of equation 1, in seconds per update."""
    return seconds_of(variant.schedule, variant.structure, variant.launched(setting), setting)


def _by_replay(variant: Variant, setting: Setting) -> float:
    """The seconds of an update by a replay of the program, event by event."""
    return replay(variant.lowered(setting), setting).seconds
