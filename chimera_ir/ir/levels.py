"""Plan, Schedule and Program: what each pass takes and returns."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from chimera_ir.ir.ids import Clock, Micro, Stage, Worker
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Drop,
    Instruction,
    Recv,
    Send,
    Stash,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
)

MAX_WORKERS = 1 << 16
MAX_STAGES = 1 << 16
MAX_MICRO_BATCHES = 1 << 20
MAX_PIPES = 1 << 12
"""How many of them a header may have, whatever the limit on operations is."""

T = TypeVar("T", covariant=True)


@dataclass(frozen=True, slots=True)
class Pipe:
    """One pipeline: a model replica in one direction.

    ``workers[s]`` runs stage s; ``micros`` are the global numbers of its micro-batches, in the pipe's own order;
    ``recompute`` the stages, ascending, that keep only their input and run their forward again before the backward.
    """

    name: str
    workers: tuple[Worker, ...]
    micros: tuple[Micro, ...]
    recompute: tuple[Stage, ...] = ()


class Quantity(Enum):
    """What a declared memory bound speaks of."""

    ACTIVATIONS = "activations"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Bound:
    """A declared limit per worker: activations in M_a, weights in M_theta."""

    quantity: Quantity
    limit: int


class Strategy(Enum):
    """When a worker launches the sum of a stage's gradients (section 3.2).

    ``LAZY``: after all its local compute. ``EAGER``: as soon as its gradients of the stage are complete. ``EAGER_OPT``:
    eagerly where the schedule leaves it a bubble between then and the end of its local compute, else lazily.
    """

    LAZY = "lazy"
    EAGER = "eager"
    EAGER_OPT = "eager_opt"


@dataclass(frozen=True)
class Header:
    """What every level of IR says first.

    ``micro_batches`` is the number over all pipes: N, or 2N half ones where ``halves`` says so; every pipe has all
    ``stages`` D. ``strategies`` are those of stages that have another one than eager_opt, by ascending stage.

    A level of an asynchronous scheme shows its first ``updates`` updates, as many micro-batches as they take, warm-up
    and drain included; every ``period`` micro-batches the lanes repeat. A synchronous one shows one, and has period 0.
    """

    scheme: str
    parameters: tuple[tuple[str, int], ...]
    workers: int
    stages: int
    micro_batches: int
    pipes: tuple[Pipe, ...]
    bounds: tuple[Bound, ...] = ()
    halves: bool = False
    strategies: tuple[tuple[Stage, Strategy], ...] = ()
    updates: int = 1
    period: int = 0

    def strategy(self, stage: Stage) -> Strategy:
        """When the sum of a stage's gradients is launched."""
        return dict(self.strategies).get(stage, Strategy.EAGER_OPT)

    @property
    def parts(self) -> int:
        """Into how many parts a micro-batch is cut: what a `Micro` counts is one of them."""
        return 2 if self.halves else 1

    @property
    def asynchronous(self) -> bool:
        """Whether micro-batches stream across updates without a flush."""
        return self.period > 0

    @property
    def per_update(self) -> int:
        """How many of what a `Micro` counts an update takes."""
        return self.micro_batches // self.updates

    @property
    def whole_micro_batches(self) -> int:
        """N: micro-batches per update, whole ones."""
        return self.per_update // self.parts

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

    def recomputes(self, micro: Micro, stage: Stage) -> bool:
        """Whether a stage keeps only its input of a micro-batch."""
        return self.recomputing and stage in self.pipe_of[micro].recompute

    @cached_property
    def recomputing(self) -> bool:
        """Whether any stage of any pipe keeps only its input."""
        return any(pipe.recompute for pipe in self.pipes)

    def worker(self, micro: Micro, stage: Stage) -> Worker:
        """Where a micro-batch meets a stage."""
        return self.pipe_of[micro].workers[stage]


class Planned(NamedTuple):
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
class Lines(Generic[T]):
    """Instructions of a lane and, in the same order, their places in it."""

    places: list[int]
    lines: list[T]

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return zip(self.places, self.lines, strict=True)


@dataclass(frozen=True, slots=True)
class Parts:
    """The instructions of a lane apart: what computes, the four kinds of lines about messages, and the rest."""

    length: int
    computes: Lines[Compute]
    sends: Lines[Send]
    recvs: Lines[Recv]
    wait_sends: Lines[WaitSend]
    wait_recvs: Lines[WaitRecv]
    updates: Lines[AllReduce | WaitAllReduce | Step | Stash | Drop]


@dataclass(frozen=True)
class Program:
    """``lanes[w]``: everything worker w does in the updates that the header speaks of, in order."""

    header: Header
    lanes: tuple[tuple[Instruction, ...], ...]

    @cached_property
    def parts(self) -> tuple[Parts, ...]:
        """Every lane apart; for whoever walks along the lanes more than once."""
        return tuple(map(_apart, self.lanes))


def _apart(lane: tuple[Instruction, ...]) -> Parts:
    apart = Parts(len(lane), *(Lines([], []) for _ in range(6)))
    of_kind: dict[type, Lines[Any]] = {
        Compute: apart.computes,
        Send: apart.sends,
        Recv: apart.recvs,
        WaitSend: apart.wait_sends,
        WaitRecv: apart.wait_recvs,
        **dict.fromkeys((AllReduce, WaitAllReduce, Step, Stash, Drop), apart.updates),
    }
    for place, instruction in enumerate(lane):
        lines = of_kind[type(instruction)]
        lines.places.append(place)
        lines.lines.append(instruction)
    return apart
