"""Facts about a worker's part of the program: its stages, buffers, links and turns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from chimera_runtime.program.weight_groups import Group

Route = tuple[int, int, int]
"""A link: the stage that sends, the stage that receives, and the other worker."""


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


def spread(runs: Sequence[tuple[int, int]]) -> Iterator[int]:
    """The numbers in runs, half open."""
    for start, stop in runs:
        yield from range(start, stop)
