"""The job: facts about the program that all ranks share, and the place of a rank in it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from chimera_runtime.program.rank_facts import VALUES, Group, Route, implied, spread


class Feed(NamedTuple):
    """An edge of the graph of stages: ``target`` gets the output of ``source``, as the argument ``keyword`` if any."""

    source: int
    target: int
    keyword: str = ""


def group_of(named: Iterable[tuple[str, int, int]], stage: int) -> tuple[str, int] | None:
    """Returns the name of the group of a stage (see `Job.named`), and the place of the stage in it; None without."""
    places = ((name, stage - start) for name, start, stop in named if start <= stage < stop)
    return next(places, None)


@dataclass(frozen=True)
class Job:
    """Facts about a program that all its ranks share.

    ``program`` is a digest of the bytes of all generated files.

    ``placement[p][s]`` is the worker of stage s in pipe p; ``micro_batches`` is N, over all pipes. ``evaluated`` is the
    number of micro-batches of a round of an evaluation: N, or more if there is no flush. ``links`` are pairs of workers
    of which the first sends to the second. ``ties`` are the groups of stages that share parameters.

    A micro-batch is cut into ``parts``: halves, or the ``slices`` of a sequence. ``lengths`` are the relative lengths
    of slices, if these differ. ``recomputing`` are the stages that recompute, ``grouped`` the stages with operations
    over several micro-batches, ``split_backward`` the stages with backwards in two halves. ``moving`` are the stages
    whose activations move to the host and back, ``moving_operands`` the stages that move what is kept between the
    halves. ``kinds`` are the letters of all kinds of operations.

    The weights of the stages in ``frozen`` are not trained. ``feeds`` are the edges of the graph of stages, in the
    order of a stage's arguments; without any the stages are a chain, in which each feeds the next one. ``named`` are
    groups of stages: a name, the first stage, and the one behind the last. ``absent`` has for each group that the
    program leaves out at times the micro-batches of a cycle, or slices, that it does not have, as runs (start, stop).

    Without a flush the lanes repeat every ``period`` micro-batches. ``reads[s]`` says which version of the weights
    stage s reads for each micro-batch of a period: the number of updates in the periods before plus an offset. The
    offsets are written as runs (offset, number of micro-batches). An update has made its step on every stage once
    ``lag`` further updates have begun. With a flush ``period`` and ``lag`` are 0.

    ``numbers`` are those of micro-batches for which there are programs beside this one, each with the digest of it;
    all have fewer than ``micro_batches``.

    ``communicators`` are the choices of communicators with which the program is proven to finish. In a rehearsal, the
    sleeps of successive parts are in proportion to ``weights``, which repeat; without weights all parts are equal.
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
    slices: int = 1
    moving: tuple[int, ...] = ()
    moving_operands: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    feeds: tuple[Feed, ...] = ()
    named: tuple[tuple[str, int, int], ...] = ()
    absent: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = ()
    numbers: tuple[tuple[int, str], ...] = ()

    @property
    def moves(self) -> bool:
        """Whether anything moves to the host and back."""
        return bool(self.moving or self.moving_operands)

    @property
    def row_parts(self) -> int:
        """The number of parts into which a micro-batch is cut along dimension 0."""
        return self.parts // self.slices

    @property
    def units(self) -> int:
        """Number of units as which `KeptMicros` counts a micro-batch: its slices, or the sum of their lengths."""
        return sum(self.lengths) or self.slices

    @property
    def passes(self) -> int:
        """Number of forwards of a stage in an update, over all pipes: one for each part of each micro-batch."""
        return self.micro_batches * self.parts

    @property
    def cycle(self) -> int:
        """Number of micro-batches after which the schedule repeats: the period of a stream, else those of an update."""
        return self.period or self.passes

    def value_of(self, route: Route) -> str:
        """The letter of the value that is sent along a route."""
        return route.value or implied(route.source, route.target)

    @cached_property
    def edges(self) -> tuple[Feed, ...]:
        """All edges of the graph of stages, each to a stage of a higher number."""
        return self.feeds or tuple(Feed(stage, stage + 1) for stage in range(self.stages - 1))

    @cached_property
    def fed(self) -> tuple[tuple[int, ...], ...]:
        """The stages that stage s feeds, as ``fed[s]``, ascending; a stage that feeds no other computes a loss."""
        return tuple(tuple(sorted(e.target for e in self.edges if e.source == s)) for s in range(self.stages))

    @cached_property
    def feeding(self) -> tuple[tuple[int, ...], ...]:
        """The stages that feed stage s, as ``feeding[s]``, in the order of its arguments; a stage that no other feeds
        gets an input of the dataset.
        """
        return tuple(tuple(e.source for e in self.edges if e.target == s) for s in range(self.stages))

    def makers(self, value: str, stage: int) -> tuple[int, ...]:
        """The stages that make a value which ``stage`` reads, in the order of `Rooms`."""
        return (self.feeding if VALUES[value].onward else self.fed)[stage]

    def stage_name(self, stage: int) -> str:
        """A stage as messages name it: ``image[1]`` by its group, or its number."""
        group = group_of(self.named, stage)
        return f"{stage}" if group is None else f"{group[0]}[{group[1]}]"

    def end_name(self, stage: int) -> str:
        """The name of a stage that no other feeds, or that feeds no other: that of its group, or its number."""
        group = group_of(self.named, stage)
        return f"{stage}" if group is None else group[0]

    def of_end(self, value: Any, stage: int, ends: Sequence[int]) -> Any:
        """The part of an input, or of a target, for ``stage``, which is one of the ``ends`` that get one. If there are
        several, and the value `is_by_end`, that is an entry of it, None if there is none; else the whole.
        """
        return value.get(self.end_name(stage)) if self.is_by_end(value, ends) else value

    def is_by_end(self, value: Any, ends: Sequence[int]) -> bool:
        """Whether an input, or a target, is a dict with names of the ``ends`` that get one, if these are several."""
        return len(ends) > 1 and isinstance(value, dict) and {*map(self.end_name, ends)} >= value.keys()

    def are_of_one_group(self, *stages: int) -> bool:
        """Whether stages are of one group, so that a micro-batch has all of them or none."""
        return len({*map(self.end_name, stages)}) == 1

    @cached_property
    def lacking(self) -> Mapping[int, frozenset[int]]:
        """The micro-batches of a cycle that the program leaves out, for each stage of which it leaves out some."""
        micros = {name: frozenset(spread(runs)) for name, runs in self.absent}
        return {s: micros[name] for name, start, stop in self.named if name in micros for s in range(start, stop)}

    def leaves_out(self, micro: int, stage: int) -> bool:
        """Whether the program leaves a micro-batch, counted in parts, out on a stage."""
        return micro % self.cycle in self.lacking.get(stage, ())

    def without(self, sources: Collection[int]) -> frozenset[int]:
        """Returns the stages that have no part in a micro-batch without an input for some ``sources``: those of their
        groups, and of each further group that only groups without a part feed.
        """
        lacking = set[int]()
        for _, start, stop in self.named:  # a group is fed by groups before it
            inside = range(start, stop)
            inputs = [stage for stage in inside if stage in self.sources]
            feeding = [e.source for e in self.edges if e.target in inside and e.source not in inside]
            if not {*sources}.isdisjoint(inputs) if inputs else all(stage in lacking for stage in feeding):
                lacking.update(inside)
        return frozenset(lacking)

    @cached_property
    def may_lack_input(self) -> bool:
        """Whether a micro-batch may have inputs for some of the stages that get one, and none for others."""
        return bool(self.named) and len(self.sources) > 1

    @cached_property
    def at_times(self) -> frozenset[int]:
        """The stages that some micro-batches may lack, by the program or by the data."""
        others = [[o for o in self.sources if o != s] for s in self.sources] if self.may_lack_input else []
        return frozenset(self.lacking).union(*map(self.without, others))

    @cached_property
    def backwards(self) -> tuple["Backwards", ...]:
        """The part that each stage has in backwards."""
        backs = list[bool]()
        for stage, feeding in enumerate(self.feeding):  # a stage is fed by stages of lower numbers
            backs.append(stage not in self.frozen or any(backs[before] for before in feeding))
        return tuple(
            Backwards(backs[stage], stage not in self.frozen, any(backs[before] for before in feeding))
            for stage, feeding in enumerate(self.feeding)
        )

    @cached_property
    def sinks(self) -> tuple[int, ...]:
        """The stages that feed no other, ascending."""
        return tuple(stage for stage, fed in enumerate(self.fed) if not fed)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The stages that no other feeds, ascending."""
        return tuple(stage for stage, feeding in enumerate(self.feeding) if not feeding)

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


class Backwards(NamedTuple):
    """The part of a stage in backwards: whether it ``has`` any, ``trains`` its weights, and ``returns`` gradients of
    its inputs to the stage before.

    A stage that is not frozen has all but the last, which it lacks where nothing before it is trained.
    """

    has: bool = True
    trains: bool = True
    returns: bool = True


WHOLE = Backwards()
"""The part of a stage that is trained, behind another trained one."""


@dataclass(frozen=True)
class Place:
    """The place of a rank among all ranks, which make W = ``copies`` copies of the workers.

    In the layout ``pipeline`` the ranks of a copy have consecutive numbers, in the other layout the ranks of a worker.
    """

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
        """The copy that this rank belongs to."""
        return self.rank // self.workers if self.layout == "pipeline" else self.rank % self.copies

    @property
    def ranks(self) -> range:
        """All ranks of the job."""
        return range(self.workers * self.copies)

    def rank_of(self, copy: int, worker: int) -> int:
        """The rank of a worker of a copy."""
        return copy * self.workers + worker if self.layout == "pipeline" else worker * self.copies + copy

    def ranks_of(self, workers: Iterable[int]) -> list[int]:
        """The ranks of some workers in all copies, ascending."""
        return sorted(self.rank_of(copy, worker) for worker in workers for copy in range(self.copies))
