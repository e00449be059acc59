"""What a configuration is predicted to take: compiled as far as time and memory need it, then equation 1.

What cannot fit is found early: by what stands on a worker before anything runs, then by the activations on top of that.
What fits with room for many more messages than there are is not weighed to the byte, unless someone wants to know.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from chimera_ir.cost.model import Costs
from chimera_ir.cost.simulate import ticks
from chimera_ir.diagnostics.model import Rejected, raise_errors
from chimera_ir.elaborate.elaborate import elaborate, outline
from chimera_ir.ir.levels import Header, Program, Schedule
from chimera_ir.ir.ops import Compute, Forward
from chimera_ir.lower.lower import lower, sketch, summed
from chimera_ir.lower.order import order
from chimera_ir.plan.space import Choice, LeftOut, Reason, Recomputation, refusal
from chimera_ir.predict.equation import equation
from chimera_ir.predict.memory import memory
from chimera_ir.predict.replay import replay
from chimera_ir.predict.setting import Setting
from chimera_ir.predict.show import size
from chimera_ir.profile.cluster import Cluster
from chimera_ir.profile.costs import ModelProfile, Timing
from chimera_ir.source import Source
from chimera_ir.syntax.ast import Scheme
from chimera_ir.syntax.change import Change
from chimera_ir.verify.holdings import Holdings, holdings
from chimera_ir.verify.verify import verify_plan, verify_schedule

_AT_ONCE = 8
"""More messages than are on their way at once from or to a stage; there are two or three."""

MODES = {
    Recomputation.WHERE_NEEDED: (False, True),
    Recomputation.ALWAYS: (True,),
    Recomputation.NEVER: (False,),
}
"""What is tried until something fits: no more recomputation than the scheme says, or all."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A configuration that fits: T of equation 1 in seconds, of an update; bytes by worker; its compute operations.

    ``recomputes`` says whether any stage does; ``replayed`` is the time of the replay, where there was one; ``memory``
    is empty where it was enough to know that there is room.
    """

    choice: Choice
    scheme: str
    asynchronous: bool
    recomputes: bool
    equation: float
    memory: tuple[int, ...]
    operations: int
    replayed: float | None = None

    @property
    def seconds(self) -> float:
        """The best that is known of the time of an update: that of the replay, else that of equation 1."""
        return self.equation if self.replayed is None else self.replayed

    @property
    def throughput(self) -> float:
        """Items per second, without the last digits: what differs there only is equally fast."""
        return _rounded(self.choice.mini_batch / self.seconds)

    def over(self, other: "Judged") -> float:
        """How many times as many items per second as another: by the replays if both were, else by equation 1."""
        replays = self.replayed is not None and other.replayed is not None
        mine, its = (self.seconds, other.seconds) if replays else (self.equation, other.equation)
        return _rounded(self.choice.mini_batch / mine / (other.choice.mini_batch / its))


def _rounded(number: float) -> float:
    return float(f"{number:.9g}")


Verdict = Judged | LeftOut


@dataclass(frozen=True, slots=True)
class Judge:
    """Judges configurations of these schemes on a cluster; texts that are ``trusted`` are not verified again."""

    schemes: Mapping[Source, Scheme]
    profile: ModelProfile
    cluster: Cluster
    replica_layout: bool
    recomputation: Recomputation
    max_operations: int
    trusted: frozenset[Source]

    @property
    def available(self) -> int:
        """Bytes that a worker has for the model."""
        return self.cluster.memory - self.cluster.reserved

    def setting(self, choice: Choice) -> Setting:
        """What a configuration runs on."""
        stages = self.profile.depths[choice.stages]
        return Setting(stages, self.cluster, choice.copies, choice.micro_batch_size, self.replica_layout)

    def all_of(self, choices: Sequence[Choice]) -> tuple[Verdict, ...]:
        """Every configuration; where it does not fit without recomputation and that is allowed, with it."""
        bench = _Bench(self)
        return tuple(self._with_least(bench, choice) for choice in choices)

    def first_of(self, choices: Sequence[Choice]) -> tuple[Verdict, ...]:
        """Configurations in the order given until one fits: first all without recomputation, then all with it."""
        bench, found = _Bench(self), list[Verdict]()
        for again in MODES[self.recomputation]:
            for choice in choices:
                found.append(bench.verdict(_recomputing(choice, again)))
                if isinstance(found[-1], Judged):
                    return tuple(found)
        return tuple(found)

    def _with_least(self, bench: "_Bench", choice: Choice) -> Verdict:
        found: Verdict | None = None
        for again in MODES[self.recomputation]:
            if found is None or (isinstance(found, LeftOut) and found.reason is Reason.MEMORY):
                found = bench.verdict(_recomputing(choice, again))
        assert found is not None
        return found

    def weighed(self, judged: Judged) -> Verdict:
        """The same with its bytes, or why it does not fit after all."""
        return _Bench(self).weighed(judged)

    def replayed(self, judged: Judged) -> Judged:
        """The same, with the time of its replay."""
        schedule = _Bench(self).schedule(judged.choice)
        return replace(judged, replayed=replay(_lowered(schedule), self.setting(judged.choice)).seconds)


def _recomputing(choice: Choice, again: bool) -> Choice:
    return replace(choice, change=replace(choice.change, recompute=True)) if again else choice


def _lowered(schedule: Schedule) -> Program:
    """The program that a compilation gives, which knows no profile."""
    _, duration = ticks(schedule.header, Costs())
    return lower(schedule, duration=duration)


class _Bench:
    """Compiles one configuration after another, and keeps what the next may have in common with the last."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._last: tuple[object, tuple[tuple[Compute, ...], ...]] | None = None
        self._programs: dict[Change, tuple[Program, tuple[Holdings, ...]]] = {}
        self._timed: dict[Change, Program] = {}

    def verdict(self, choice: Choice) -> Verdict:
        """The prediction, or why there is none."""
        try:
            return self._verdict(choice)
        except Rejected as rejected:
            return refusal(rejected, choice.source, choice.settings, choice.micro_batch_size)

    def _verdict(self, choice: Choice) -> Verdict:
        setting = self._judge.setting(choice)
        header = outline(self._scheme(choice), dict(choice.settings), self._judge.max_operations)
        if (header.whole_micro_batches, header.stages) != (choice.micro_batches, choice.stages):
            detail = f"it makes {header.whole_micro_batches} micro-batches of {choice.micro_batches}"
            return LeftOut.of(choice, Reason.REFUSED, detail)
        over = self._over(choice, _standing(header, setting), "at least ")
        if over:
            return over
        schedule = self._schedule(choice, header)
        over = self._over(choice, _least(schedule, setting), "at least ")
        if over:
            return over
        needed: list[int] = []
        if max(_most(schedule, setting)) > self._judge.available:
            needed = self._needed(choice, schedule, setting)
        return self._over(choice, needed, "") or Judged(
            choice,
            header.scheme,
            header.asynchronous,
            any(pipe.recompute for pipe in header.pipes),
            equation(self._summed(choice, schedule), setting).seconds,
            tuple(needed),
            sum(map(len, schedule.lanes)),
        )

    def weighed(self, judged: Judged) -> Verdict:
        """The same with its bytes, or why it does not fit after all."""
        choice = judged.choice
        if judged.memory:
            return judged
        needed = self._needed(choice, self.schedule(choice), self._judge.setting(choice))
        return self._over(choice, needed, "") or replace(judged, memory=tuple(needed))

    def _needed(self, choice: Choice, schedule: Schedule, setting: Setting) -> list[int]:
        program, held = self._sketch(choice, schedule)
        return [each.total for each in memory(program, setting, held)]

    def schedule(self, choice: Choice) -> Schedule:
        """The schedule of a configuration."""
        return self._schedule(choice, outline(self._scheme(choice), dict(choice.settings), self._judge.max_operations))

    def _schedule(self, choice: Choice, header: Header) -> Schedule:
        """The lanes are the same whatever is recomputed or summed when."""
        key = choice.source, choice.settings
        if self._last is None or self._last[0] != key:
            plan, _ = elaborate(self._scheme(choice), dict(choice.settings), self._judge.max_operations)
            ordered = order(plan)
            if choice.source not in self._judge.trusted:
                raise_errors((*verify_plan(plan), *verify_schedule(ordered, plan)))
            self._last = key, ordered.lanes
            self._programs.clear()
            self._timed.clear()
        return Schedule(header, self._last[1])

    def _sketch(self, choice: Choice, schedule: Schedule) -> tuple[Program, tuple[Holdings, ...]]:
        """The program of a configuration and what it holds, for the scheme and parameters of the last schedule."""
        header = schedule.header
        if choice.change not in self._programs:
            lanes = next((known.lanes for known, _ in self._programs.values()), None) if header.asynchronous else None
            _, duration = ticks(header, Costs())
            program = Program(header, lanes) if lanes else sketch(schedule, duration)
            self._programs[choice.change] = program, tuple(holdings(program))
        return self._programs[choice.change]

    def _summed(self, choice: Choice, schedule: Schedule) -> Program:
        """The program of a configuration as far as time needs it; again for that of the last schedule."""
        if choice.change not in self._timed:
            _, duration = ticks(schedule.header, Costs())
            self._timed[choice.change] = summed(schedule, duration)
        return self._timed[choice.change]

    def _scheme(self, choice: Choice) -> Scheme:
        return choice.change.of(self._judge.schemes[choice.source])

    def _over(self, choice: Choice, needed: Sequence[int], prefix: str) -> LeftOut | None:
        """Why it does not fit, if it does not: the worker that needs most."""
        if not needed:
            return None
        worker, available = max(range(len(needed)), key=needed.__getitem__), self._judge.available
        if needed[worker] <= available:
            return None
        more = size(needed[worker] - available)
        detail = f"worker {worker} needs {prefix}{size(needed[worker])}, {more} more than there is"
        return LeftOut.of(choice, Reason.MEMORY, detail)


def _standing(header: Header, setting: Setting) -> list[int]:
    """What each worker keeps all the time: a copy of the weights, gradients and optimizer state of its stages."""
    each = [costs.weights + costs.gradients + costs.optimizer for costs in setting.stages]
    return [sum(each[stage] for stage in stages) for stages in header.stages_of]


def _least(schedule: Schedule, setting: Setting) -> list[int]:
    """What each worker needs if messages, and the inputs that came as such, take no room."""
    header = schedule.header
    return _peaks(schedule, setting, [_kept(header, setting, stage) for stage in range(header.stages)])


def _peaks(schedule: Schedule, setting: Setting, kept: Sequence[int]) -> list[int]:
    """What each worker needs if so much is kept of a micro-batch on a stage, and nothing else."""
    header, found = schedule.header, []
    for standing, lane in zip(_standing(header, setting), schedule.lanes, strict=True):
        now = most = 0
        for operation in lane:
            size = len(operation.micros) * kept[operation.stage]
            now += size if isinstance(operation, Forward) else -size
            most = max(most, now)
        found.append(standing + most // header.parts)
    return found


def _most(schedule: Schedule, setting: Setting) -> list[int]:
    """More than each worker needs: nothing is kept where it was received, and far more is on its way than ever is."""
    header = schedule.header
    timings = [setting.timing(stage) for stage in range(header.stages)]
    ends = [each.output + each.gradient for each in timings]
    again = [all(stage in pipe.recompute for pipe in header.pipes) for stage in range(header.stages)]
    extra = [
        timing.activations + _AT_ONCE * (ends[stage] + (ends[stage - 1] if stage else 0))
        for stage, timing in enumerate(timings)
    ]
    kept = [each.input if alike else each.activations for each, alike in zip(timings, again, strict=True)]
    peaks = zip(_peaks(schedule, setting, kept), header.stages_of, strict=True)
    return [peak + sum(extra[stage] for stage in stages) for peak, stages in peaks]


def _kept(header: Header, setting: Setting, stage: int) -> int:
    """What a stage keeps of a micro-batch at least, its input not counted where it was received."""
    timing: Timing = setting.timing(stage)
    size = min((timing.input if stage in pipe.recompute else timing.activations for pipe in header.pipes), default=0)
    return max(0, size - (setting.timing(stage - 1).output if stage else 0))


def distinct(choices: Iterable[Choice]) -> Iterator[tuple[Choice, ...]]:
    """Those together that are the same but for B."""
    alike: dict[object, list[Choice]] = {}
    for each in choices:
        alike.setdefault((each.source, each.settings, each.change), []).append(each)
    yield from map(tuple, alike.values())
