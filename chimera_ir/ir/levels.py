"""Plan, Schedule and Program: what each pass takes and returns."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fractions import Fraction
from functools import cache, cached_property
from itertools import accumulate, chain, pairwise
from math import lcm
from typing import TYPE_CHECKING, TypeVar, cast

from chimera_ir.ir import ops
from chimera_ir.ir.graph import Absence, Feed, NamedStages
from chimera_ir.ir.kinds import (
    FORWARD_OF_INPUT,
    IN_M_A,
    INPUT,
    KEPT,
    RECOMPUTATION,
    Counted,
    Kind,
    Readers,
    Resource,
    Trained,
    Value,
    all_kinds,
    values,
)
from chimera_ir.ir.ops import (
    Blocks,
    Compute,
    Instruction,
    LaneParts,
    Micro,
    Operation,
    Pair,
    Planned,
    Stage,
    Unclocked,
    Version,
    WeightGroup,
    Worker,
    parts_of,
)
from chimera_ir.plural import counted
from chimera_ir.source import Span

if TYPE_CHECKING:
    from chimera_ir.ir.text.given_lanes import Given


# Declared bounds on what each worker keeps.


class Quantity(Enum):
    """The quantity that a declared memory bound limits."""

    ACTIVATIONS = "activations"
    WEIGHTS = "weights"
    BYTES = "bytes"
    HOST = "host"
    HOST_BYTES = "host_bytes"

    @property
    def in_bytes(self) -> bool:
        """Whether the quantity is counted in bytes, which follow from a profile."""
        return self in (Quantity.BYTES, Quantity.HOST_BYTES)


@dataclass(frozen=True, slots=True)
class Bound:
    """A declared upper limit of a quantity of memory: ``limits[w]`` on worker w, declared by the line ``origin``.

    Activations and values in host memory are counted in M_a, weights in M_theta, and both kinds of memory in bytes.
    """

    quantity: Quantity
    limits: tuple[int | Fraction, ...]
    origin: Span = field(default=ops.NOWHERE, compare=False, repr=False)

    def exceeded(self, amounts: Sequence[int | Fraction]) -> Worker | None:
        """The worker whose amount exceeds its limit most; None if the limits of all workers hold."""
        worker = max(range(len(amounts)), key=lambda w: amounts[w] - self.limits[w])
        return Worker(worker) if amounts[worker] > self.limits[worker] else None


# The line that shows a level in a session of Python, in place of all its operations.


class OneLine:
    """Base class of types with a header: their ``repr`` is a line with the type, the scheme and its size."""

    __slots__ = ()
    header: "Header"

    def __repr__(self) -> str:
        header = self.header
        numbers = (
            (header.workers, "worker"),
            (header.stages, "stage"),
            (header.micro_batches // header.parts, "micro-batch"),
        )
        sizes = ", ".join(counted(number, noun) for number, noun in numbers)
        return f"<{type(self).__name__} of {header.title}: {sizes}>"


# Lengths of the slices of a micro-batch, relative to one another: extents and loads; without any all are equally long.

Extent = tuple[Fraction, Fraction]
"""Start and end of a slice, as shares of the sequence."""

MAX_LENGTH = 10**9
"""The largest length of a slice in a text."""


def normalized(lengths: Sequence[int]) -> tuple[int, ...]:
    """Returns the lengths as they are, or an empty tuple if they are all equal.

    Examples
    --------
    >>> normalized([3, 2, 2, 1]), normalized([5, 5])
    ((3, 2, 2, 1), ())
    """
    return tuple(lengths) if len({*lengths}) > 1 else ()


@cache
def extents(lengths: tuple[int, ...]) -> tuple[Extent, ...]:
    """Returns start and end of each slice as shares of the sequence, from the relative lengths of the slices.

    Examples
    --------
    >>> extents((3, 1))
    ((Fraction(0, 1), Fraction(3, 4)), (Fraction(3, 4), Fraction(1, 1)))
    """
    ends = [Fraction(end, sum(lengths)) for end in accumulate(lengths, initial=0)]
    return tuple(pairwise(ends))


def loads(weights: Sequence[int | Fraction], lengths: Sequence[int]) -> tuple[int | Fraction, ...]:
    """Returns the work of consecutive micro-batches or slices, as a list that repeats from its end on.

    An entry is a weight times a length, divided by the mean length. ``weights`` is empty if all are 1, ``lengths`` if
    all are equal. If both are empty, so is the result, and every load is 1.

    Examples
    --------
    >>> loads((), (3, 1))
    (Fraction(3, 2), Fraction(1, 2))
    """
    if not lengths:
        return tuple(weights)
    factors = [Fraction(length * len(lengths), sum(lengths)) for length in lengths]
    return tuple(w * factors[place % len(factors)] for place, w in enumerate(weights or (1,) * len(factors)))


def weighed(operation: ops.Operation, loads: Sequence[int | Fraction]) -> int | Fraction:
    """Adds up the loads of an operation's micro-batches; of a pair, returns the mean of its two sums.

    Micro-batch m has load ``loads[m % len(loads)]``, or 1 if ``loads`` is empty.
    """
    if not loads:
        return operation.size
    parts = operation.parts
    total = sum(loads[micro % len(loads)] for part in parts for micro in part.micros)
    return total if len(parts) == 1 else Fraction(total, len(parts))


MAX_SHARE = 10**6
"""The largest share of M_a that a stage may keep, and the largest common denominator of the shares of all stages."""

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
    that share parameters, ``frozen`` the stages, ascending, whose weights are not trained. ``moves`` says whether any
    operation moves activations between a worker and its host. Micro-batch m weighs ``weights[m % len(weights)]``, or 1
    if there are no weights. ``lengths`` are the relative lengths of the slices; if there are none, all are equally
    long. Stage s keeps ``shares[s]`` of M_a of a micro-batch; if there are no shares, every stage keeps 1.

    ``named`` are the groups of stages with names, ascending; of stages without names there are none. ``feeds`` are the
    edges of the graph of stages beside those inside groups, in the order of the text; without any, all stages are one
    chain. ``absent`` are the micro-batches that groups do not have.
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
    frozen: tuple[Stage, ...] = ()
    named: tuple[NamedStages, ...] = ()
    feeds: tuple[Feed, ...] = ()
    absent: tuple[Absence, ...] = ()
    shares: tuple[Fraction, ...] = ()

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that operations of the level may have."""
        present = {*self.trained}
        rows = [row for row in all_kinds() if not present.isdisjoint(row.stages)]
        further = (row for row in rows if (row.recomputes and self.recomputing) or (row.moves and self.moves))
        plain = [row for row in rows if not (row.recomputes or row.moves)]
        listed = self.only or [row for row in plain if Trained.ITSELF in row.stages]
        letters = {kind.letter for kind in listed}
        of_frozen = (row for row in plain if Trained.ITSELF not in row.stages and row.letter in letters)
        return (*listed, *of_frozen, *further)

    @cached_property
    def kinds_of(self) -> tuple[tuple[Kind, ...], ...]:
        """The kinds that operations of stage s may have, as ``kinds_of[s]``."""
        rows = {trained: tuple(kind for kind in self.kinds if trained in kind.stages) for trained in Trained}
        return tuple(rows[trained] for trained in self.trained)

    @cached_property
    def trained(self) -> tuple[Trained, ...]:
        """The trained part of stage s and of the stages before it, as ``trained[s]``."""
        frozen, trained = {*self.frozen}, list[Trained]()
        for stage, feeding in enumerate(self.feeding):  # a stage is fed by stages of lower numbers
            behind = any(trained[before] is not Trained.NOTHING for before in feeding)
            of_frozen = Trained.BEFORE if behind else Trained.NOTHING
            trained.append(of_frozen if stage in frozen else Trained.ITSELF)
        return tuple(trained)

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
        """Whether values go both ways between stages: forwards alone hand them on in one direction."""
        return len({value.readers for kind in self.kinds for value in kind.hands_on}) > 1

    def answered(self, edge: ops.Crossing) -> bool:
        """Whether the stage that reads a value hands one back: a message that shows that the earlier one arrived."""
        source, target, _ = edge
        back = (value for kind in self.kinds_of[target] for value in kind.hands_on)
        return any(source in self.readers(value, target) for value in back)

    @cached_property
    def graph(self) -> tuple[Feed, ...]:
        """All edges of the graph of stages: those from a stage to the next one of its group, then ``feeds``."""
        breaks = {group.start for group in self.named} if self.feeds else set[Stage]()
        return (*(Feed(Stage(s - 1), Stage(s)) for s in range(1, self.stages) if s not in breaks), *self.feeds)

    @cached_property
    def fed(self) -> tuple[tuple[Stage, ...], ...]:
        """The stages that stage s feeds, as ``fed[s]``, ascending."""
        fed: list[list[Stage]] = [[] for _ in range(self.stages)]
        for edge in self.graph:
            fed[edge.source].append(edge.target)
        return tuple(tuple(sorted(stages)) for stages in fed)

    @cached_property
    def feeding(self) -> tuple[tuple[Stage, ...], ...]:
        """The stages that feed stage s, as ``feeding[s]``, in the order of its arguments; all have lower numbers."""
        feeding: list[list[Stage]] = [[] for _ in range(self.stages)]
        for edge in self.graph:
            feeding[edge.target].append(edge.source)
        return tuple(map(tuple, feeding))

    def stage_name(self, stage: int) -> str:
        """A stage as messages name it: ``image[1]`` by its group, or its number."""
        for name, start, stop in self.named:
            if start <= stage < stop:
                return f"{name}[{stage - start}]"
        return f"{stage}"

    @cached_property
    def lacks(self) -> dict[Stage, frozenset[Micro]]:
        """The micro-batches that a stage does not have, for each stage that lacks any."""
        groups = {group.name: group for group in self.named}
        return {
            Stage(stage): frozenset(absence.micros)
            for absence in self.absent
            for stage in range(groups[absence.group].start, groups[absence.group].stop)
        }

    def has(self, micro: Micro, stage: Stage) -> bool:
        """Whether a micro-batch has operations on a stage."""
        return not self.absent or micro not in self.lacks.get(stage, ())

    def readers(self, value: Value, stage: Stage, micro: Micro | None = None) -> tuple[Stage, ...]:
        """The stages that read a value which ``stage`` makes; of a given micro-batch those that have it."""
        return self._there(self._stages[value][0][stage], micro)

    def makers(self, value: Value, stage: Stage, micro: Micro | None = None) -> tuple[Stage, ...]:
        """The stages that make a value which ``stage`` reads; of a given micro-batch those that have it."""
        return self._there(self._stages[value][1][stage], micro)

    def sharing(self, value: Value, source: Stage, target: Stage, micro: Micro) -> tuple[Stage, ...]:
        """The stages that read what ``source`` sends to ``target``, ascending.

        Activations go once to each worker: all stages there that read them share a message, which is named by the first
        of these. Gradients are other ones for each reader.
        """
        if not self.feeds or value.readers is not Readers.FED:
            return (target,)
        workers = self.pipe(micro).workers
        if workers[source] == workers[target]:
            return (target,)
        return tuple(stage for stage in self.readers(value, source, micro) if workers[stage] == workers[target])

    def _there(self, stages: tuple[Stage, ...], micro: Micro | None) -> tuple[Stage, ...]:
        if micro is None or not self.absent:
            return stages
        return tuple(stage for stage in stages if self.has(micro, stage))

    @cached_property
    def _stages(self) -> dict[Value, tuple[tuple[tuple[Stage, ...], ...], ...]]:
        themselves = tuple((Stage(s),) for s in range(self.stages))
        fed, feeding = self.fed, self.feeding
        backs = [trained is not Trained.NOTHING for trained in self.trained]
        backing = tuple(tuple(stage for stage in before if backs[stage]) for before in feeding)
        followers = tuple(after if backs[stage] else () for stage, after in enumerate(fed))
        both = {Readers.FED: (fed, feeding), Readers.FEEDING: (backing, followers), Readers.OWN: (themselves,) * 2}
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

    @cached_property
    def units_of_m_a(self) -> int:
        """The units in M_a, of which there is a whole number in each stage's share of each of the `units`."""
        return self.units * self._fineness

    @cached_property
    def _fineness(self) -> int:
        return lcm(*(share.denominator for share in self.shares))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The units of M_a (`units_of_m_a`) that stage s keeps of a unit of a micro-batch, as ``sizes[s]``."""
        return tuple(int(share * self._fineness) for share in self.shares) or (1,) * self.stages

    def size(self, counted: Counted, stage: Stage) -> int:
        """The units of M_a in a unit of a micro-batch that ``stage`` keeps of a value.

        What is not counted in M_a, such as stashed inputs, has the size that it has on a stage whose share is 1.
        """
        return self.sizes[stage] if counted in IN_M_A else self._fineness

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
        """All weight groups: each trained stage by itself, ascending, then the ties."""
        return (*chain.from_iterable(self._alone), *self.ties)

    @cached_property
    def _alone(self) -> tuple[tuple[WeightGroup, ...], ...]:
        """The group of each stage by itself; none of a frozen stage."""
        of_stage = enumerate(self.trained)
        return tuple(((Stage(s),),) if trained is Trained.ITSELF else () for s, trained in of_stage)

    @cached_property
    def group_numbers(self) -> dict[WeightGroup, int]:
        """The place of each group in ``groups``."""
        return {group: number for number, group in enumerate(self.groups)}

    @cached_property
    def groups_with(self) -> tuple[tuple[WeightGroup, ...], ...]:
        """The groups that stage s is in, as ``groups_with[s]``."""
        return tuple((*alone, *(tie for tie in self.ties if s in tie)) for s, alone in enumerate(self._alone))

    @cached_property
    def groups_of(self) -> tuple[tuple[WeightGroup, ...], ...]:
        """The groups of which worker w holds any stage, as ``groups_of[w]``, in the order of ``groups``."""
        return tuple(
            (
                *chain.from_iterable(self._alone[stage] for stage in held),
                *(tie for tie in self.ties if not {*tie}.isdisjoint(held)),
            )
            for held in self.stages_of
        )

    def members(self, group: WeightGroup) -> tuple[Worker, ...]:
        """The workers that hold any stage of a group, and so sum its gradients, ascending."""
        if len(group) == 1:
            return self.holders[group[0]]
        return tuple(sorted({worker for stage in group for worker in self.holders[stage]}))

    def recomputing_for_backwards(self) -> "Header":
        """The header in which only stages recompute that have a backward."""
        idle = {stage for stage, trained in enumerate(self.trained) if trained is Trained.NOTHING}
        if not idle:
            return self
        pipes = (
            replace(
                pipe,
                recompute=tuple(stage for stage in pipe.recompute if stage not in idle),
                recomputed=tuple(some for some in pipe.recomputed if some[0] not in idle),
            )
            for pipe in self.pipes
        )
        return replace(self, pipes=tuple(pipes))

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
    def is_clocked(self) -> bool:
        """Whether every operation has a clock."""
        return all(isinstance(planned, Planned) for planned in self.operations)

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
        from chimera_ir.ir.text.given_lanes import schedule_of

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

    @cached_property
    def blocks(self) -> Blocks:
        """The micro-batches that operations take together."""
        return Blocks(chain.from_iterable(parts.computes.lines for parts in self.parts))


# Gives the operations of plans and schedules the rows that their stages have, and adds recomputations, as the header
# lists the stages that recompute or are frozen. A forward on a stage that recomputes keeps its input alone, and
# recompute is an operation of the lane.
#
#     F m0 s0                     F m0 s0
#     F m1 s0                     F m1 s0
#     B m0 s0                     recompute m0 s0
#     B m1 s0                     B m0 s0
#                                 recompute m1 s0
#                                 B m1 s0

Line = TypeVar("Line", bound=Instruction)


def in_full(header: Header, lanes: Iterable[Sequence[Line]]) -> tuple[tuple[Line, ...], ...]:
    """The lanes with all recomputations, each right before the operation that needs the activations it makes.

    Where a lane already has a recomputation of a stage of a pipe, none are added for that stage. Operations of frozen
    stages, and of stages that recompute, get the rows of these stages.
    """
    if not (header.recomputing or header.frozen):
        return tuple(map(tuple, lanes))
    return tuple(tuple(cast("Iterator[Line]", chain.from_iterable(_blocks(header, lane)))) for lane in lanes)


def recomputes_all(pipe: Pipe, stage: int) -> bool:
    """Whether a stage of a pipe keeps only its input of every micro-batch."""
    return stage in pipe.recompute and all(stage != other for other, _ in pipe.recomputed)


def in_blocks(header: Header, operations: Sequence[Operation]) -> Sequence[tuple[Operation, ...]]:
    """A block for each operation, as `in_full` has them: its recomputations, then the operation."""
    if not (header.recomputing or header.frozen):
        return [(operation,) for operation in operations]
    return cast("list[tuple[Operation, ...]]", list(_blocks(header, operations)))


def _blocks(header: Header, lane: Sequence[Instruction]) -> Iterator[tuple[Instruction, ...]]:
    whole, done = _listed(header, lane), set[tuple[Micro, Stage]]()
    for instruction in lane:
        first: list[Compute] = []
        for part in _parts(instruction):
            micros = tuple([micro for micro in part.micros if (micro, part.stage) not in done])
            needs = KEPT in part.kind.reads and not part.kind.moves and header.recomputes(part.micros[0], part.stage)
            if needs and _place(header, part) not in whole:
                done.update((micro, part.stage) for micro in micros)
                first += [Compute(RECOMPUTATION, micros, part.stage, part.origin, part.version)] if micros else []
        if isinstance(instruction, Pair):
            yield *first, replace(instruction, forward=_of_stage(header, instruction.forward))
        else:
            yield *first, _of_stage(header, instruction) if isinstance(instruction, Compute) else instruction


def forwards_of_clocked(plan: Plan) -> Iterator[Planned]:
    """The operations with clocks; forwards whose recomputations are lines of the plan keep only their input."""
    listed = _listed(plan.header, (planned.operation for planned in plan.operations))
    for planned in plan.clocked:
        operation = planned.operation
        for part in operation.parts if listed else ():
            if part.kind.opens and _place(plan.header, part) in listed:
                forward = _of_stage(plan.header, part)
                operation = replace(operation, forward=forward) if isinstance(operation, Pair) else forward
        yield planned if operation is planned.operation else planned._replace(operation=operation)


def _listed(header: Header, lane: Iterable[Instruction]) -> set[tuple[str, Stage]]:
    """The stages for which a lane itself has recomputations, each as (name of the pipe, stage)."""
    parts = (part for instruction in lane for part in _parts(instruction))
    return {_place(header, part) for part in parts if INPUT in part.kind.reads}


def _place(header: Header, part: Compute) -> tuple[str, Stage]:
    return header.pipe(part.micros[0]).name, part.stage


def _parts(instruction: Instruction) -> tuple[Compute, ...]:
    return instruction.parts if isinstance(instruction, Compute | Pair) else ()


def _of_stage(header: Header, operation: Compute) -> Compute:
    """The operation with the row of its letter that its stage has; unchanged if the stage has none."""
    if operation.kind.opens and header.recomputes(operation.micros[0], operation.stage):
        return replace(operation, kind=FORWARD_OF_INPUT)
    if not header.frozen or not 0 <= operation.stage < header.stages:
        return operation
    letter, rows = operation.kind.letter, header.kinds_of[operation.stage]
    kind = next((row for row in rows if row.letter == letter and not row.recomputes), operation.kind)
    return operation if kind is operation.kind else replace(operation, kind=kind)
