"""What was compiled: the facts about the program that starting the ranks needs, and the script of each worker.

It is read without torch: `chimera run` does so before it starts torchrun.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from chimera_runtime.errors import Misuse

INTERFACE = 5
"""The interface between scripts and this package; it grows when scripts written for the one before would not run."""

FILE = "program.json"

_AGAIN = "compile again, or copy the whole directory again"


Group = tuple[int, ...]
"""A weight group: a stage by itself, or stages that share parameters, ascending."""

Route = tuple[int, int, int]
"""A link: the stage that sends, the stage that receives, and the other worker."""


def group_text(group: Group) -> str:
    """A weight group as schedule.sir calls it: ``s1``, or ``s0+s3``."""
    return "+".join(f"s{stage}" for stage in group)


def group_key(group: Group) -> int | Group:
    """A weight group as callers know it: the number of a stage, or the stages that share parameters."""
    return group[0] if len(group) == 1 else group


def group_name(group: Group) -> str:
    """A weight group in messages: ``stage 1``, or ``the tie of stages 0 and 3``."""
    *most, last = map(str, group)
    return f"the tie of stages {', '.join(most)} and {last}" if most else f"stage {last}"


class RankScript(Protocol):
    """A ``rank_<k>.py``: what a worker does, as functions of its `Lane`.

    It has ``update`` if every update ends before the next one begins, else ``turn``; ``evaluate`` is forwards alone.
    ``PROGRAM`` is the digest of the program that it is a part of, ``INTERFACE`` what it was written for.
    """

    INTERFACE: int
    PROGRAM: str
    update: Callable[[Any], None]
    turn: Callable[[Any, int], None]
    evaluate: Callable[[Any], None]


@dataclass(frozen=True)
class StageFacts:
    """What a worker needs to know of a stage that it holds.

    Attributes
    ----------
    inputs, gradients
        Its receive buffers for activations and for gradients: for how many micro-batches each has room.
    copies
        The copies of its weights.
    sending
        Of how many micro-batches, or parts of them, its activations and its gradients are on their way at most.
    recomputed
        The micro-batches, counted within a cycle of the schedule, of which it keeps its input alone: runs, half open.
    initial
        The versions, 0 or less, at whose places its initial weights are stashed and dropped.
    """

    inputs: tuple[int, ...]
    gradients: tuple[int, ...]
    copies: int
    sending: tuple[int, int]
    recomputed: tuple[tuple[int, int], ...]
    initial: tuple[int, int]


@dataclass(frozen=True)
class TieFacts:
    """What a worker needs to know of parameters that ``stages`` share, of which it holds some; see `StageFacts`."""

    stages: Group
    copies: int
    initial: tuple[int, int]


@dataclass(frozen=True)
class Turns:
    """The turns of a worker: from ``first`` to ``behind`` beyond the number of updates, every ``step``-th.

    A turn can be run without waiting for ever once the update is given that is ``ahead`` after it.
    """

    first: int
    behind: int
    step: int
    ahead: int

    def of(self, updates: int) -> range:
        """The turns of a run of so many updates."""
        return range(self.first, updates + self.behind, self.step)

    def given(self, updates: int) -> range:
        """Those of them that can be run while more updates than so many may come."""
        return range(self.first, updates - self.ahead, self.step)


@dataclass(frozen=True)
class EvaluationFacts:
    """What a worker needs to know for forwards alone.

    ``slots`` are the receive buffers of each stage that has any: for how many micro-batches each has room.
    """

    slots: dict[int, tuple[int, ...]]
    incoming: tuple[Route, ...]
    outgoing: tuple[Route, ...]


class KeptMicros(NamedTuple):
    """The micro-batches that a stage keeps at a moment.

    Those that wait for a backward are kept with all their activations, or with their input alone; ``begun`` are between
    the two halves of a backward.
    """

    stage: int
    activations: int
    inputs: int
    begun: int = 0


@dataclass(frozen=True)
class RankFacts:
    """What a worker needs to know beside its script.

    ``kept`` are its fullest moments, each with an entry for every stage. ``turns`` is None where every update ends
    before the next. ``inputs`` and ``targets`` are the micro-batches of a cycle that it loads these of: runs, half
    open.
    """

    stages: dict[int, StageFacts]
    incoming: tuple[Route, ...]
    outgoing: tuple[Route, ...]
    kept: tuple[tuple[KeptMicros, ...], ...]
    turns: Turns | None
    inputs: tuple[tuple[int, int], ...]
    targets: tuple[tuple[int, int], ...]
    evaluation: EvaluationFacts
    ties: tuple[TieFacts, ...] = ()

    @property
    def initial(self) -> dict[Group, tuple[int, int]]:
        """For each weight group the versions at whose places its initial weights are stashed and dropped."""
        stages = {(stage,): facts.initial for stage, facts in self.stages.items()}
        return stages | {tie.stages: tie.initial for tie in self.ties}

    @property
    def peers(self) -> tuple[int, ...]:
        """The workers that this one exchanges messages with, ascending."""
        return tuple(sorted({worker for _, _, worker in (*self.incoming, *self.outgoing)}))


@dataclass(frozen=True)
class Job:
    """``program`` is a digest of all generated files together: two that differ in a byte of any have different ones.

    ``placement[p][s]`` is the worker of stage s in pipe p; ``micro_batches`` N counts all pipes. ``evaluated`` are the
    micro-batches of an evaluation: N, or more of them where there is no flush.

    ``ties`` are the stages that share parameters.

    A micro-batch is cut into ``parts``. ``recomputing`` are the stages that run forwards again, ``grouped`` those with
    operations over several micro-batches, ``split_backward`` those with backwards in two halves. ``kinds`` are the
    letters of all kinds of operations.

    Where updates overlap, the lanes repeat every ``period`` micro-batches, and ``reads[s]`` says which version of its
    weights stage s reads for each of them, relative to the updates in the periods before: runs of (offset, count). When
    ``lag`` further updates have been given, every stage has made its step of an update. Elsewhere both are 0.

    ``communicators`` are the choices of communicators that the program is proven to finish with.
    """

    name: str
    program: str
    workers: int
    stages: int
    micro_batches: int
    evaluated: int
    parts: int
    recomputing: tuple[int, ...]
    grouped: tuple[int, ...]
    placement: tuple[tuple[int, ...], ...]
    links: tuple[tuple[int, int], ...]
    period: int
    reads: tuple[tuple[tuple[int, int], ...], ...]
    lag: int
    ties: tuple[Group, ...] = ()
    kinds: tuple[str, ...] = ("F", "B")
    split_backward: tuple[int, ...] = ()
    communicators: tuple[str, ...] = ("directed",)

    @property
    def passes(self) -> int:
        """How many forwards of each stage an update has, over all pipes."""
        return self.micro_batches * self.parts

    @property
    def cycle(self) -> int:
        """The micro-batches after which the schedule repeats."""
        return self.period or self.passes

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The workers that hold each stage, ascending."""
        return tuple(tuple(sorted({pipe[s] for pipe in self.placement})) for s in range(self.stages))

    @property
    def groups(self) -> tuple[Group, ...]:
        """The weight groups: each stage by itself, then the ties."""
        return (*((stage,) for stage in range(self.stages)), *self.ties)

    def members(self, group: Group) -> tuple[int, ...]:
        """The workers that hold any stage of a weight group, ascending."""
        return tuple(sorted({worker for stage in group for worker in self.holders[stage]}))


@dataclass(frozen=True)
class Place:
    """Where this rank stands: ``copies`` W copies of the group of workers, in one of two layouts."""

    rank: int
    workers: int
    copies: int
    layout: str

    @property
    def worker(self) -> int:
        """The worker whose lane this rank runs."""
        return self.rank % self.workers if self.layout == "pipeline" else self.rank // self.copies

    @property
    def copy(self) -> int:
        """Which of the W copies this rank belongs to."""
        return self.rank // self.workers if self.layout == "pipeline" else self.rank % self.copies

    @property
    def ranks(self) -> range:
        """All ranks of the job."""
        return range(self.workers * self.copies)

    def rank_of(self, copy: int, worker: int) -> int:
        """The rank of a worker of a copy."""
        return copy * self.workers + worker if self.layout == "pipeline" else worker * self.copies + copy


@dataclass(frozen=True)
class Compiled:
    """A directory that chimera compile wrote."""

    directory: Path
    job: Job
    ranks: tuple[RankFacts, ...]

    def script(self, worker: int) -> RankScript:
        """The script of a worker. It is written after all that was read before: if it is of this program, so is that.

        Raises
        ------
        Misuse
            If it is missing, or of another program.
        """
        path = self.directory / f"rank_{worker}.py"
        spec = importlib.util.spec_from_file_location(f"chimera_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        script: Any = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(script)
        except FileNotFoundError as error:
            raise Misuse(f"{self.directory} has no {path.name}: {_AGAIN}") from error
        require_interface(script.INTERFACE, path)
        if self.job.program != script.PROGRAM:
            raise Misuse(f"{path} is of another program than {FILE}: {_AGAIN}")
        return script  # type: ignore[no-any-return]


def require_interface(number: int, path: Path) -> None:
    """Passes if a file was written for the interface of this package.

    Raises
    ------
    Misuse
        If it was not.
    """
    if number != INTERFACE:
        raise Misuse(
            f"{path} was written for interface {number} of chimera_runtime, and this is interface {INTERFACE}: compile "
            "again with the chimera_ir that this chimera_runtime came with"
        )


def load(directory: Path) -> Compiled:
    """What was compiled into a directory.

    Raises
    ------
    Misuse
        If there is no program, or one for another interface.
    """
    path = directory / FILE
    try:
        text = path.read_text(encoding="utf-8")
        require_interface(json.loads(text)["interface"], path)
        return Compiled(directory.resolve(), *parsed(text))
    except (FileNotFoundError, NotADirectoryError):
        raise Misuse(
            f"{directory} is no output directory: `chimera compile SCHEME --out {directory}` writes one"
        ) from None
    except OSError as error:
        raise Misuse(f"{path}: {error.strerror}: {_AGAIN}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Misuse(f"{path} is not as it was written: {_AGAIN}") from error


def parsed(text: str) -> tuple[Job, tuple[RankFacts, ...]]:
    """The content of a program.json.

    Raises
    ------
    ValueError, TypeError, KeyError, AttributeError
        If it is none.
    """
    facts = json.loads(text)
    ranks = tuple(map(_rank, facts.pop("ranks")))
    return Job(**{name: _frozen(value) for name, value in facts.items() if name != "interface"}), ranks


def _rank(facts: dict[str, Any]) -> RankFacts:
    turns = facts["turns"]
    return RankFacts(
        stages={int(stage): StageFacts(**_values(of_stage)) for stage, of_stage in facts["stages"].items()},
        ties=tuple(TieFacts(**_values(of_tie)) for of_tie in facts["ties"]),
        incoming=_frozen(facts["incoming"]),
        outgoing=_frozen(facts["outgoing"]),
        kept=tuple(tuple(KeptMicros(*of_stage) for of_stage in moment) for moment in facts["kept"]),
        turns=None if turns is None else Turns(**turns),
        inputs=_frozen(facts["inputs"]),
        targets=_frozen(facts["targets"]),
        evaluation=_evaluation(**facts["evaluation"]),
    )


def _evaluation(slots: dict[str, Any], incoming: Any, outgoing: Any) -> EvaluationFacts:
    rooms = {int(stage): _frozen(of_stage) for stage, of_stage in slots.items()}
    return EvaluationFacts(rooms, _frozen(incoming), _frozen(outgoing))


def _values(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: _frozen(value) for name, value in facts.items()}


def _frozen(value: Any) -> Any:
    """Lists as tuples, all the way down."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def spread(runs: Sequence[tuple[int, int]]) -> Iterator[int]:
    """The numbers in runs, half open."""
    for start, stop in runs:
        yield from range(start, stop)
