"""Plan, Schedule and Program: what each pass takes and returns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cached_property
from math import lcm
from typing import TYPE_CHECKING, cast

from chimera_ir.ir import ops
from chimera_ir.ir.ids import Micro, Stage, Version, WeightGroup, Worker
from chimera_ir.ir.kinds import Kind, Readers, Resource, Value, all_kinds, values
from chimera_ir.ir.lane_parts import LaneParts, parts_of
from chimera_ir.ir.memory_bounds import Bound, Quantity
from chimera_ir.ir.one_line import OneLine
from chimera_ir.ir.planned import Planned, Unclocked
from chimera_ir.ir.slice_lengths import loads, weighed

if TYPE_CHECKING:
    from chimera_ir.ir.given_lanes import Given

MAX_WORKERS = MAX_STAGES = 1 << 16
MAX_MICRO_BATCHES = 1 << 20

MAX_AGE = 1_000
"""The most updates from the weights that a micro-batch reads to the newest; a worker keeps about a copy for each."""

MAX_PIPES = 1 << 12
"""The most pipes that a header may have, whatever the limit on operations."""


@dataclass(frozen=True, slots=True)
class Pipe:
    """One pipeline: a model replica in one direction.

    ``workers[s]`` runs stage s; ``micros`` are the global numbers of its micro-batches, in the pipe's own order;
    ``recompute`` the stages, ascending, that keep only their input and run their forward again before the backward.
    ``recomputed`` lists the stages of ``recompute`` that do so for only some micro-batches, each with those
    micro-batches.
    """

    name: str
    workers: tuple[Worker, ...]
    micros: tuple[Micro, ...]
    recompute: tuple[Stage, ...] = ()
    recomputed: tuple[tuple[Stage, tuple[Micro, ...]], ...] = ()


class Strategy(Enum):
    """The choice of when a worker launches the sum of a stage's gradients (section 3.2).

    ``LAZY``: after all its local compute. ``EAGER``: as soon as its gradients of the stage are complete. ``EAGER_OPT``:
    eager where the schedule leaves the worker a bubble between these two points, else lazy.
    """

    LAZY = "lazy"
    EAGER = "eager"
    EAGER_OPT = "eager_opt"


@dataclass(frozen=True)
class Header:
    """The header of every level of IR.

    ``micro_batches`` is the number over all pipes: N, or 2N half ones if ``halves`` is set, or kN slices if ``slices``
    is k: slice q of micro-batch m has number ``k*m + q``. Every pipe has all D ``stages``. ``strategies`` has the
    stages whose strategy is not eager_opt, ascending.

    A level of a scheme without a flush shows the scheme's first ``updates`` updates with all of their micro-batches,
    warm-up and drain included; its lanes repeat every ``period`` micro-batches. The header of a stream is that of one
    turn (`ir.streams`). With a flush, a level shows one update and has period 0.

    ``only`` lists the kinds of its operations, in the order of the table, if these are not all kinds: forwards alone
    make no update. Kinds of recomputation are not listed: they follow from the pipes. ``ties`` are the groups of stages
    that share parameters. ``moves`` says whether any operation moves activations between a worker and its host.
    Micro-batch m weighs ``weights[m % len(weights)]``, or 1 if there are no weights. ``lengths`` are the relative
    lengths of the slices; if there are none, all are equally long.
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
    only: tuple[Kind, ...] = ()
    ties: tuple[WeightGroup, ...] = ()
    slices: int = 1
    moves: bool = False
    weights: tuple[int | Fraction, ...] = ()
    lengths: tuple[int, ...] = ()

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that operations of the level may have."""
        further = (row for row in all_kinds() if (row.recomputes and self.recomputing) or (row.moves and self.moves))
        plain = (row for row in all_kinds() if not (row.recomputes or row.moves))
        return (*(self.only or plain), *further)

    @cached_property
    def trains(self) -> bool:
        """Whether operations add to the gradients of the weights, so that there are sums and steps."""
        return any(kind.sums for kind in self.kinds)

    @cached_property
    def lanes_only(self) -> bool:
        """Whether no operation occupies another resource of a worker than its lane."""
        return all(kind.occupies is Resource.LANE for kind in self.kinds)

    @property
    def answers(self) -> bool:
        """Whether values go both ways between stages: then a message back shows that an earlier message has arrived."""
        return len({value.readers for kind in self.kinds for value in kind.hands_on}) > 1

    @cached_property
    def fed(self) -> tuple[tuple[Stage, ...], ...]:
        """The stages that stage s feeds, as ``fed[s]``, ascending. The stages are a chain: each feeds the next one."""
        return (*((Stage(s),) for s in range(1, self.stages)), ())

    @cached_property
    def feeding(self) -> tuple[tuple[Stage, ...], ...]:
        """The stages that feed stage s, as ``feeding[s]``, ascending: the inverse of ``fed``."""
        feeding: list[list[Stage]] = [[] for _ in range(self.stages)]
        for s, fed in enumerate(self.fed):
            for stage in fed:
                feeding[stage].append(Stage(s))
        return tuple(map(tuple, feeding))

    def readers(self, value: Value, stage: Stage) -> tuple[Stage, ...]:
        """The stages that read a value which ``stage`` makes."""
        return self._stages[value][0][stage]

    def makers(self, value: Value, stage: Stage) -> tuple[Stage, ...]:
        """The stages that make a value which ``stage`` reads."""
        return self._stages[value][1][stage]

    @cached_property
    def _stages(self) -> dict[Value, tuple[tuple[tuple[Stage, ...], ...], ...]]:
        """Maps a value to two lists: at s, its readers if stage s makes it, and its makers if s reads it."""
        themselves = tuple((Stage(s),) for s in range(self.stages))
        fed, feeding = self.fed, self.feeding
        both = {Readers.FED: (fed, feeding), Readers.FEEDING: (feeding, fed), Readers.OWN: (themselves,) * 2}
        return {value: both[value.readers] for value in values()}

    @cached_property
    def edges(self) -> dict[ops.Crossing, int]:
        """Maps each edge to the number of its first message. Numbers go edge by edge, one for each micro-batch."""
        made = ((Stage(s), value) for value in values() if value.crosses for s in range(self.stages))
        crossings = ((stage, reader, value) for stage, value in made for reader in self.readers(value, stage))
        return {crossing: number * self.micro_batches for number, crossing in enumerate(crossings)}

    @cached_property
    def value_between(self) -> dict[tuple[Stage, Stage, str], Value]:
        """Maps (sender, receiver, letter) to the value sent; the letter "" stands for a value that texts leave out."""
        named = {(source, target, value.letter): value for source, target, value in self.edges}
        return named | {(source, target, ""): value for source, target, value in reversed(self.edges)}

    @property
    def title(self) -> str:
        """The scheme with its parameters, as in ``name(D=4, N=8)``."""
        return f"{self.scheme}({', '.join(f'{name}={value}' for name, value in self.parameters)})"

    def limits(self, quantity: Quantity, most: int) -> tuple[int, ...]:
        """The declared limit of each worker, rounded down, but at most ``most``; ``most`` if none is declared."""
        declared = (bound.limits for bound in self.bounds if bound.quantity is quantity)
        limits = next(declared, (most,) * self.workers)
        return tuple(min(most, int(limit)) for limit in limits)

    def strategy(self, group: WeightGroup) -> Strategy:
        """The strategy by which the sum of a group's gradients is launched; eager_opt if its stages differ.

        If stages step inside the schedule, every strategy is eager, because the steps wait for the sums.
        """
        if self.steps_inside:
            return Strategy.EAGER
        chosen = dict(self.strategies)
        strategies = {chosen.get(stage, Strategy.EAGER_OPT) for stage in group}
        return strategies.pop() if len(strategies) == 1 else Strategy.EAGER_OPT

    @property
    def parts(self) -> int:
        """The number of parts that a micro-batch is cut into; a `Micro` counts one part."""
        return 2 if self.halves else self.slices

    @property
    def units(self) -> int:
        """The units of memory in a whole micro-batch: one for each half or slice; with lengths, the sum of lengths."""
        return sum(self.lengths) or self.parts

    def length(self, micros: Sequence[Micro]) -> int:
        """The units of memory (`units`) of all ``micros`` together, which may be whole, halves or slices."""
        return sum(self.lengths[micro % self.slices] for micro in micros) if self.lengths else len(micros)

    @property
    def slice_lengths(self) -> tuple[int, ...]:
        """The relative length of each slice; 1 for each if they are equally long."""
        return self.lengths or (1,) * self.slices

    @cached_property
    def loads(self) -> tuple[int | Fraction, ...]:
        """The work of micro-batch or slice m, at ``m % len``: 1 with weight 1 and mean length; empty if all are 1."""
        return loads(self.weights, self.lengths)

    def weight(self, operation: ops.Operation) -> int | Fraction:
        """The sum of the loads of an operation's micro-batches; for a pair, the mean of the sums of its two sides.

        An operation takes its cost times this number, divided by ``parts``: a half, with load 1, takes half as long.
        """
        return weighed(operation, self.loads)

    @cached_property
    def weight_unit(self) -> int:
        """A number whose product with the weight of any operation is an integer."""
        whole = lcm(*(Fraction(weight).denominator for weight in self.weights))
        return 2 * whole * (sum(self.lengths) or 1) if self.loads else 1

    @property
    def asynchronous(self) -> bool:
        """Whether the scheme is asynchronous, that is without a flush between updates."""
        return self.period > 0

    @property
    def steps_inside(self) -> bool:
        """Whether stages step inside the schedule; each step then names the version that it makes.

        If not, the caller steps after the schedule, and ranks that hold a stage may share its optimizer's state.
        """
        return self.asynchronous

    @property
    def made(self) -> Sequence[Version | None]:
        """The version that each update's step makes: 1, 2, ..; with a flush one None, as no line names a version."""
        return cast("Sequence[Version]", range(1, self.updates + 1)) if self.steps_inside else (None,)

    @property
    def per_update(self) -> int:
        """The number of micro-batches per update, halves and slices counted one by one."""
        return self.micro_batches // self.updates

    @property
    def per_turn(self) -> int:
        """The number of updates per turn of a stream; with a flush every update is a turn."""
        return self.period // self.per_update or 1

    def update_of(self, micros: Iterable[Micro]) -> int:
        """The update, counted from 0, that micro-batches belong to; the last one if they belong to several."""
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
        """The workers that hold stage s, as ``holders[s]``, ascending, each once even if it holds s for two pipes."""
        return tuple(tuple(sorted({pipe.workers[s] for pipe in self.pipes})) for s in range(self.stages))

    @cached_property
    def stages_of(self) -> tuple[tuple[Stage, ...], ...]:
        """The stages that worker w holds, as ``stages_of[w]``, ascending."""
        held: list[list[Stage]] = [[] for _ in range(self.workers)]
        for s, workers in enumerate(self.holders):
            for worker in workers:
                held[worker].append(Stage(s))
        return tuple(tuple(stages) for stages in held)

    @cached_property
    def groups(self) -> tuple[WeightGroup, ...]:
        """All weight groups: each stage by itself, ascending, then the ties."""
        return (*((Stage(stage),) for stage in range(self.stages)), *self.ties)

    @cached_property
    def group_numbers(self) -> dict[WeightGroup, int]:
        """The place of each group in ``groups``; for a stage by itself it is the number of the stage."""
        return {group: number for number, group in enumerate(self.groups)}

    @cached_property
    def groups_with(self) -> tuple[tuple[WeightGroup, ...], ...]:
        """The groups that stage s is in, as ``groups_with[s]``."""
        return tuple((group, *(tie for tie in self.ties if group[0] in tie)) for group in self.groups[: self.stages])

    @cached_property
    def groups_of(self) -> tuple[tuple[WeightGroup, ...], ...]:
        """The groups of which worker w holds any stage, as ``groups_of[w]``, in the order of ``groups``."""
        return tuple(
            (*((stage,) for stage in held), *(tie for tie in self.ties if not {*tie}.isdisjoint(held)))
            for held in self.stages_of
        )

    def members(self, group: WeightGroup) -> tuple[Worker, ...]:
        """The workers that hold any stage of a group, and so sum its gradients, ascending."""
        if len(group) == 1:
            return self.holders[group[0]]
        return tuple(sorted({worker for stage in group for worker in self.holders[stage]}))

    def recomputes(self, micro: Micro, stage: Stage) -> bool:
        """Whether a stage keeps only its input of a micro-batch, and so runs the forward again."""
        if not self.recomputing:
            return False
        pipe = self.pipe(micro)
        if not pipe.recomputed:
            return stage in pipe.recompute
        some = self._recomputed.get((pipe.name, stage))
        number = micro if micro in self.pipe_of else micro % self.period
        return stage in pipe.recompute and (some is None or number in some)

    @cached_property
    def _recomputed(self) -> dict[tuple[str, Stage], frozenset[int]]:
        """The micro-batches that a stage of a pipe recomputes, where these are not all."""
        return {(pipe.name, stage): frozenset(micros) for pipe in self.pipes for stage, micros in pipe.recomputed}

    @cached_property
    def recomputing(self) -> bool:
        """Whether any stage of any pipe keeps only its input."""
        return any(pipe.recompute for pipe in self.pipes)

    def worker(self, micro: Micro, stage: Stage) -> Worker:
        """The worker that runs a stage for a micro-batch."""
        return self.pipe(micro).workers[stage]

    def pipe(self, micro: Micro) -> Pipe:
        """The pipe of a micro-batch, which may belong to a turn before or after those of the header."""
        return self.pipe_of[micro if micro in self.pipe_of else Micro(micro % self.period)]


@dataclass(frozen=True, slots=True, repr=False)
class Plan(OneLine):
    """An evaluated scheme: every operation once, in the order of the text."""

    header: Header
    operations: tuple[Planned | Unclocked, ...]

    @property
    def clocked(self) -> list[Planned]:
        """The operations that have clocks, in the order of the text."""
        return [planned for planned in self.operations if isinstance(planned, Planned)]

    @property
    def unclocked(self) -> list[Unclocked]:
        """The operations that have no clocks, in the order of the text."""
        return [planned for planned in self.operations if isinstance(planned, Unclocked)]


@dataclass(frozen=True, slots=True, repr=False)
class Schedule(OneLine):
    """A schedule: ``lanes[w]`` has the compute operations of worker w in the order in which it runs them."""

    header: Header
    lanes: tuple[tuple[ops.Operation, ...], ...]

    @staticmethod
    def from_lanes(
        lanes: "Iterable[Iterable[Given]]", like: Header | None = None, *, name: str = "by_hand"
    ) -> "Schedule":
        """The schedule in which worker w runs the operations ``lanes[w]`` in their order.

        An operation is one of another schedule, or its line in IR text, ``"F m0 s1"``. The header is ``like``. Without
        it, it follows from the lanes, is called ``name`` and has as many pipes as there are ways in which stages are
        placed on workers; its micro-batches are whole, and it declares no bounds. Nothing is verified:
        `Compilation.of` does that.

        Raises `OptionError` if no header follows from the lanes, and `TextError` with the mistakes of their texts.

        Examples
        --------
        >>> schedule = Schedule.from_lanes([["F m0 s0", "B m0 s0"], ["F m0 s1", "B m0 s1"]])
        >>> schedule
        <Schedule of by_hand(D=2, N=1): 2 workers, 2 stages, 1 micro-batch>
        >>> Schedule.from_lanes(schedule.lanes, schedule.header) == schedule
        True
        """
        from chimera_ir.ir.given_lanes import schedule_of

        return schedule_of(lanes, like, name)


@dataclass(frozen=True, repr=False)
class Program(OneLine):
    """A program: ``lanes[w]`` has all instructions of worker w in the header's updates, in the order of their run."""

    header: Header
    lanes: tuple[tuple[ops.Instruction, ...], ...]

    @cached_property
    def parts(self) -> tuple[LaneParts, ...]:
        """The instructions of every lane sorted by type, for passes that look only for those of some types."""
        return tuple(map(parts_of, self.lanes))
