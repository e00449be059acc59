"""What was compiled: the facts about the schedule that starting the ranks needs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from runtime import Lane


class RankScript(Protocol):
    """A ``rank_<k>.py``: a worker's lane, and for how many micro-batches each receive slot of its stages has room.

    It has ``update`` if every update ends before the next one begins, else ``stream`` for a number of them. ``PROGRAM``
    is the digest of the program that it is a part of.

    ``COPIES`` are those of each stage's weights. ``SENDING`` says of how many micro-batches, or parts of them, a
    stage's activations and its gradients are on their way to others at most. ``KEPT`` are the fullest moments: entries
    (stage, forwards kept with all their activations, forwards kept with their input alone).
    """

    SLOTS: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
    PEERS: tuple[int, ...]
    PROGRAM: str
    COPIES: dict[int, int]
    SENDING: dict[int, tuple[int, int]]
    KEPT: tuple[tuple[tuple[int, int, int], ...], ...]
    update: Callable[[Lane], None]
    stream: Callable[[Lane, int], None]


@dataclass(frozen=True)
class Job:
    """``program`` is a digest of all generated files together: two that differ in a byte of any have different ones.

    ``placement[p][s]`` is the worker of stage s in pipe p; ``micro_batches`` N counts all pipes.

    A micro-batch is cut into ``parts``. ``recomputing`` are the stages that run forwards again, ``grouped`` those with
    operations over several micro-batches.

    Where updates overlap, the lanes repeat every ``period`` micro-batches, and ``reads[s]`` says which version of its
    weights stage s reads for each of them, relative to the updates in the periods before: runs of (offset, count).
    Elsewhere ``period`` is 0.
    """

    name: str
    program: str
    workers: int
    stages: int
    micro_batches: int
    parts: int
    recomputing: tuple[int, ...]
    grouped: tuple[int, ...]
    placement: tuple[tuple[int, ...], ...]
    links: tuple[tuple[int, int], ...]
    period: int
    reads: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def passes(self) -> int:
        """How many forwards of each stage an update has, over all pipes."""
        return self.micro_batches * self.parts

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The workers that hold each stage, ascending."""
        return tuple(tuple(sorted({pipe[s] for pipe in self.placement})) for s in range(self.stages))


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

    def rank_of(self, copy: int, worker: int) -> int:
        """The rank of a worker of a copy."""
        return copy * self.workers + worker if self.layout == "pipeline" else worker * self.copies + copy
