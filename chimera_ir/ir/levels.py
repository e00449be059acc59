"""Plan, Schedule and Program: what each pass takes and returns."""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from chimera_ir.ir.ids import Clock, Micro, Stage, Worker
from chimera_ir.ir.ops import Compute, Instruction


@dataclass(frozen=True, slots=True)
class Pipe:
    """One pipeline: a model replica in one direction.

    ``workers[s]`` runs stage s; ``micros`` are the global numbers of its micro-batches, in the pipe's own order.
    """

    name: str
    workers: tuple[Worker, ...]
    micros: tuple[Micro, ...]


class Quantity(Enum):
    """What a declared memory bound speaks of."""

    ACTIVATIONS = "activations"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Bound:
    """A declared limit per worker: activations in M_a, weights in M_theta."""

    quantity: Quantity
    limit: int


@dataclass(frozen=True)
class Header:
    """What every level of IR says first.

    ``micro_batches`` N is the number per update, over all pipes; every pipe has all ``stages`` D.
    """

    scheme: str
    parameters: tuple[tuple[str, int], ...]
    workers: int
    stages: int
    micro_batches: int
    pipes: tuple[Pipe, ...]
    bounds: tuple[Bound, ...] = ()

    @cached_property
    def pipe_of(self) -> dict[Micro, Pipe]:
        """The pipe that each micro-batch runs through."""
        return {micro: pipe for pipe in self.pipes for micro in pipe.micros}

    @cached_property
    def holders(self) -> tuple[tuple[Worker, ...], ...]:
        """``holders[s]``: the workers that hold stage s, ascending; one that holds it for two pipes counts once."""
        return tuple(tuple(sorted({pipe.workers[s] for pipe in self.pipes})) for s in range(self.stages))

    @cached_property
    def stages_of(self) -> tuple[tuple[Stage, ...], ...]:
        """``stages_of[w]``: the stages that worker w holds, ascending."""
        held: list[list[Stage]] = [[] for _ in range(self.workers)]
        for s, workers in enumerate(self.holders):
            for worker in workers:
                held[worker].append(Stage(s))
        return tuple(tuple(stages) for stages in held)

    def worker(self, micro: Micro, stage: Stage) -> Worker:
        """Where a micro-batch meets a stage."""
        return self.pipe_of[micro].workers[stage]


@dataclass(frozen=True, slots=True)
class Planned:
    """An operation with its place and its clock."""

    clock: Clock
    worker: Worker
    operation: Compute


@dataclass(frozen=True, slots=True)
class Plan:
    """The scheme, evaluated: every operation once, in the order of the text."""

    header: Header
    operations: tuple[Planned, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """``lanes[w]``: the compute operations of worker w in the order it runs them."""

    header: Header
    lanes: tuple[tuple[Compute, ...], ...]


@dataclass(frozen=True, slots=True)
class Program:
    """``lanes[w]``: everything worker w does in one update, in order."""

    header: Header
    lanes: tuple[tuple[Instruction, ...], ...]
