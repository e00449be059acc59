"""What a configuration is predicted to take: compiled as far as time and memory need it, then equation 1.

What cannot fit is found early: by what stands on a worker before anything runs, then by the activations on top of that.
What fits with as many messages on their way as there can be is not weighed to the byte, unless someone wants to know.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from chimera_ir.diagnostics.model import Rejected
from chimera_ir.planner.bounds import least, most, standing
from chimera_ir.planner.compiled import Compiled
from chimera_ir.planner.space import Choice, LeftOut, Reason, Recomputation, refusal
from chimera_ir.plural import counted
from chimera_ir.predict.equation import equation_of
from chimera_ir.predict.memory import memory
from chimera_ir.predict.replay import replay
from chimera_ir.predict.setting import Setting
from chimera_ir.predict.show import size
from chimera_ir.profile.cluster import Cluster
from chimera_ir.profile.costs import ModelProfile
from chimera_ir.source import Source
from chimera_ir.syntax.ast import Scheme

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
        seconds, other_seconds = (self.seconds, other.seconds) if replays else (self.equation, other.equation)
        return _rounded(self.choice.mini_batch / seconds / (other.choice.mini_batch / other_seconds))


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
        bench, verdicts = _Bench(self), list[Verdict]()
        for again in MODES[self.recomputation]:
            for choice in choices:
                verdicts.append(bench.verdict(_recomputing(choice, again)))
                if isinstance(verdicts[-1], Judged):
                    return tuple(verdicts)
        return tuple(verdicts)

    def _with_least(self, bench: "_Bench", choice: Choice) -> Verdict:
        verdict: Verdict | None = None
        for again in MODES[self.recomputation]:
            if verdict is None or (isinstance(verdict, LeftOut) and verdict.reason is Reason.MEMORY):
                verdict = bench.verdict(_recomputing(choice, again))
        assert verdict is not None
        return verdict

    def weighed(self, judged: Iterable[Judged]) -> tuple[Judged, ...]:
        """The same with their bytes."""
        bench = _Bench(self)
        return tuple(map(bench.weighed, judged))

    def replayed(self, judged: Iterable[Judged]) -> tuple[Judged, ...]:
        """The same, with the times of their replays."""
        bench = _Bench(self)
        return tuple(map(bench.replayed, judged))


def _recomputing(choice: Choice, again: bool) -> Choice:
    return replace(choice, change=replace(choice.change, recompute=True)) if again else choice


class _Bench:
    """Compiles one configuration after another, and keeps what the next may have in common with the last."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._last: tuple[object, Compiled] | None = None

    def verdict(self, choice: Choice) -> Verdict:
        """The prediction, or why there is none."""
        try:
            return self._verdict(choice)
        except Rejected as rejected:
            return refusal(rejected, choice.source, choice.settings, choice.micro_batch_size)

    def _verdict(self, choice: Choice) -> Verdict:
        setting, compiled, change = self._judge.setting(choice), self._compiled(choice), choice.change
        header = compiled.header(change)
        if (header.whole_micro_batches, header.stages) != (choice.micro_batches, choice.stages):
            detail = f"it makes {counted(header.whole_micro_batches, 'micro-batch')} of {choice.micro_batches}"
            return LeftOut.of(choice, Reason.REFUSED, detail)
        compiled.check(change)
        over = self._over(choice, standing(header, setting), "at least ")
        if over:
            return over
        over = self._over(choice, least(compiled, change, setting), "at least ")
        if over:
            return over
        enough = most(compiled, change, setting)
        fits = enough is not None and max(enough) <= self._judge.available
        needed = [] if fits else self._needed(choice)
        over = self._over(choice, needed, "")
        if over:
            return over
        compiled.prove(change, setting)
        return Judged(
            choice,
            header.scheme,
            header.asynchronous,
            any(pipe.recompute for pipe in header.pipes),
            equation_of(
                compiled.schedule(change), compiled.skeleton, compiled.launched(change, setting), setting
            ).seconds,
            tuple(needed),
            sum(map(len, compiled.lanes)),
        )

    def weighed(self, judged: Judged) -> Judged:
        """The same with its bytes."""
        return replace(judged, memory=tuple(self._needed(judged.choice)))

    def replayed(self, judged: Judged) -> Judged:
        """The same, with the time of its replay."""
        choice, setting = judged.choice, self._judge.setting(judged.choice)
        program = self._compiled(choice).lowered(choice.change, setting)
        return replace(judged, replayed=replay(program, setting).seconds)

    def _needed(self, choice: Choice) -> list[int]:
        setting = self._judge.setting(choice)
        program, held = self._compiled(choice).sketch(choice.change, setting)
        return [worker.total for worker in memory(program, setting, held)]

    def _compiled(self, choice: Choice) -> Compiled:
        """The scheme of a configuration with its parameters."""
        judge, key = self._judge, (choice.source, choice.settings)
        if self._last is None or self._last[0] != key:
            scheme, trusted = judge.schemes[choice.source], choice.source in judge.trusted
            self._last = key, Compiled(scheme, choice.settings, choice.change, judge.max_operations, trusted)
        return self._last[1]

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


def distinct(choices: Iterable[Choice]) -> Iterator[tuple[Choice, ...]]:
    """Those together that are the same but for B."""
    families: dict[object, list[Choice]] = {}
    for choice in choices:
        families.setdefault((choice.source, choice.settings, choice.change), []).append(choice)
    yield from map(tuple, families.values())
