"""Plan, Schedule and Program: what each pass takes and returns."""

from collections.abc import Iterable, Iterator
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
"""The most pipes that a header may have, whatever the limit on operations is."""

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
    """The quantity that a declared memory bound limits."""

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
    eager where the schedule leaves the worker a bubble between these two points, else lazy.
    """

    LAZY = "lazy"
    EAGER = "eager"
    EAGER_OPT = "eager_opt"


@dataclass(frozen=True)
class Header:
    """The header of every level of IR.

    ``micro_batches`` is the number over all pipes: N, or 2N half ones if ``halves`` is set; every pipe has all
    ``stages`` D. ``strategies`` are those of the stages whose strategy is not eager_opt, by ascending stage.

    A level of an asynchronous scheme shows the scheme's first ``updates`` updates with all of their micro-batches,
    warm-up and drain included; its lanes repeat every ``period`` micro-batches. A level of a synchronous scheme shows
    one update and has period 0.
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
        """The strategy of a stage, which says when the sum of its gradients is launched."""
        return dict(self.strategies).get(stage, Strategy.EAGER_OPT)

    @property
    def parts(self) -> int:
        """The number of parts that a micro-batch is cut into; a `Micro` counts one part."""
        return 2 if self.halves else 1

    @property
    def asynchronous(self) -> bool:
        """Whether micro-batches stream across updates without a flush."""
        return self.period > 0

    @property
    def per_update(self) -> int:
        """The number of micro-batches per update, halves counted one by one."""
        return self.micro_batches // self.updates

    def update_of(self, micros: Iterable[Micro]) -> int:
        """The update, counted from 0, that micro-batches belong to; of those of several updates, the last."""
        return max(micros) // self.per_update

    @property
    def whole_micro_batches(self) -> int:
        """N, the number of whole micro-batches per update."""
        return self.per_update // self.parts

    @cached_property
    def pipe_of(self) -> dict[Micro, Pipe]:
        """The pipe that each micro-batch runs through."""
        return {micro: pipe for pipe in self.pipes for micro in pipe.micros}

    @cached_property
    def holders(self) -> tuple[tuple[Worker, ...], ...]:
        """``holders[s]``: the workers that hold stage s, ascending, each once even if it holds s for two pipes."""
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
        """The worker that runs a stage for a micro-batch."""
        return self.pipe_of[micro].workers[stage]


class Planned(NamedTuple):
    """An operation with its worker and its clock."""

    clock: Clock
    worker: Worker
    operation: Compute


@dataclass(frozen=True, slots=True)
class Plan:
    """An evaluated scheme: every operation once, in the order of the text."""

    header: Header
    operations: tuple[Planned, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """``lanes[w]``: the compute operations of worker w in the order in which it runs them."""

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
    """The instructions of a lane by kind: compute operations, the four kinds of lines about messages, and the rest."""

    length: int
    computes: Lines[Compute]
    sends: Lines[Send]
    recvs: Lines[Recv]
    wait_sends: Lines[WaitSend]
    wait_recvs: Lines[WaitRecv]
    updates: Lines[AllReduce | WaitAllReduce | Step | Stash | Drop]


@dataclass(frozen=True)
class Program:
    """``lanes[w]``: all instructions of worker w in the header's updates, in the order in which it runs them."""

    header: Header
    lanes: tuple[tuple[Instruction, ...], ...]

    @cached_property
    def parts(self) -> tuple[Parts, ...]:
        """The instructions of every lane by kind, for passes that walk along the lanes more than once."""
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
