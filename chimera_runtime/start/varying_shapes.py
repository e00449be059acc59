"""Micro-batches of several shapes: the ranks agree on the shapes of an update, and fit their stages to each of them.

The example has the largest shapes. Memory is reserved for these, and a message about a smaller micro-batch uses its
first part. When a shape comes for the first time, each stage runs one forward, which shows the shapes of its outputs.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from chimera_runtime.blame import UserCode
from chimera_runtime.data.feed import Feed
from chimera_runtime.data.mini_batch import ALL, COMPONENTS, KEYWORDS, Uses, by_item, require_rows
from chimera_runtime.errors import FAILED, Misuse, PeerLost, RanksDiffer
from chimera_runtime.errors import data as data_mistakes
from chimera_runtime.errors import start as mistakes
from chimera_runtime.program.compiled_program import CompiledProgram
from chimera_runtime.program.job import Job
from chimera_runtime.program.numbering import Round
from chimera_runtime.program.rank_facts import spread
from chimera_runtime.ranks.agreement import largest_in_copy
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.module_state import unchanged
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import Auxiliary, collecting
from chimera_runtime.start.assemble import needed_inputs
from chimera_runtime.start.probe import Chain, ProbeResult, boundary_before, copied
from chimera_runtime.values.boundary import NO_CARRY, Boundary, Keywords, Whole, called, cut_alone
from chimera_runtime.values.nested import Tensors, draw_seed, fresh, leaves, lengths, taken_apart, to_device

Shape = tuple[int, ...]

Load = Callable[[int, int], Any]
"""Function (micro-batch, number) that returns inputs (0), targets (1) or keyword arguments (2) of its first part."""

_SHAPES = "for the shapes of micro-batches"
_INPUT, _TARGET = 0, 1
_LIMIT = 2**62  # larger than any size or digest


class ShapeKey(NamedTuple):
    """What decides about the shapes between stages: the ``sizes`` of a micro-batch (see `Sizes`), and the stages that
    it lacks.
    """

    sizes: tuple[int, ...]
    lacking: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ShapeList:
    """The shapes of the micro-batches of a mini-batch of this copy; ``key[m]`` is that of m, which is in pipe
    ``pipes[m]``. The ranks of this pipe ``load`` it.
    """

    keys: Sequence[ShapeKey]
    pipes: Sequence[int]
    load: Load


# The sizes of a micro-batch as a row of numbers, which ranks can tell each other.


@dataclass(frozen=True)
class Sizes:
    """Writes the sizes of a micro-batch into a row of numbers, which is as long for each as for the example.

    A row has the number of items, the sizes of each tensor of inputs and keyword arguments, and a digest of the shapes
    of each keyword argument that is whole. Each number is larger by 1, so that 0 stands for what is not there, or not
    on this rank. ``largest`` are the shapes of the example: of the inputs of each source, then of the keyword arguments
    ``names``; ``wholes`` are the names of whole ones.
    """

    job: Job
    items: int
    by_source: bool
    names: tuple[str, ...]
    wholes: tuple[str, ...]
    largest: tuple[tuple[Shape, ...], ...]

    @classmethod
    def of_example(cls, job: Job, by_source: bool, inputs: Any, keywords: Keywords, items: int) -> "Sizes":
        """Makes it from the example, of which a part has so many ``items``."""
        names = tuple(sorted(cut_alone(keywords)))
        wholes = tuple(sorted(name for name in keywords if isinstance(name, Whole)))
        sizes = cls(job, items, by_source, names, wholes, ())
        return replace(sizes, largest=tuple(map(_shapes, sizes._values(inputs, keywords))))

    def row(self, name: str, inputs: Any, target: Any, keywords: Keywords, uses: frozenset[int] = ALL) -> list[int]:
        """Returns the row of a micro-batch of which this rank ``uses`` some components. Raises `Misuse` if a tensor is
        larger than in the example in any dimension, if their number differs, or if they differ in items.
        """
        used = inputs if _INPUT in uses else None, target, keywords if KEYWORDS in uses else {}
        items = max(lengths(by_item(used)), default=-1)
        if items > self.items:
            require_rows(used, self.items, name, data_mistakes.as_in_example(size=self.items))
        require_rows(used, items, name, mistakes.as_in_others(items=items))
        if not items:
            raise mistakes.micro_batch_is_empty(name=name)
        row = [1 + items]
        for number, (value, largest) in enumerate(zip(self._values(used[0], used[2]), self.largest, strict=True)):
            is_unused = value is None and (self.by_source or _INPUT not in uses or number >= self._inputs)
            shapes = None if is_unused else _shapes(value)
            _require_fitting(name, largest if shapes is None else shapes, largest)
            row += [0 if shapes is None else 1 + size for shape in shapes or largest for size in shape]
        return row + [1 + _digest(_shapes(used[2][name])) if name in used[2] else 0 for name in self.wholes]

    @cached_property
    def words(self) -> list[str]:
        """What each number of a row is."""
        ends = [f" of {self.job.end_name(stage)}" for stage in self.job.sources] if self.by_source else [""]
        places = [f"the input{end}" for end in ends] + [f"keyword argument {name}" for name in self.names]
        sizes = [
            f"dimension {dimension} of {place}"
            for place, shapes in zip(places, self.largest, strict=True)
            for shape in shapes
            for dimension in range(len(shape))
        ]
        return ["the number of items", *sizes, *(f"a digest of the shapes of {name}" for name in self.wholes)]

    def missing(self, row: Sequence[int]) -> list[int]:
        """Returns the sources for which a micro-batch has no input."""
        if not self.by_source:
            return []
        missing, start = [], 1
        for stage, shapes in zip(self.job.sources, self.largest, strict=False):
            end = start + sum(map(len, shapes))
            missing += [stage] if start < end and not any(row[start:end]) else []
            start = end
        return missing

    def untold(self, row: Sequence[int]) -> list[str]:
        """What is not there in a row: words for each number, but for those of inputs by source, which may lack."""
        inputs = 1 + sum(len(shape) for shapes in self.largest[: self._inputs] for shape in shapes)
        start = inputs if self.by_source else 1
        return [word for word, size in zip(self.words[start:], row[start:], strict=True) if not size]

    @property
    def _inputs(self) -> int:
        return len(self.job.sources) if self.by_source else 1

    def _values(self, inputs: Any, keywords: Keywords) -> list[Any]:
        sources = self.job.sources
        of_sources = (
            [inputs.get(self.job.end_name(s)) if inputs else None for s in sources] if self.by_source else [inputs]
        )
        return of_sources + [keywords.get(name) for name in self.names]


def _shapes(value: Any) -> tuple[Shape, ...]:
    return tuple(tuple(leaf.shape) for leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def _digest(shapes: object) -> int:
    return int.from_bytes(blake2b(repr(shapes).encode(), digest_size=7).digest())


def _require_fitting(name: str, shapes: Sequence[Shape], largest: Sequence[Shape]) -> None:
    if len(shapes) != len(largest):
        raise mistakes.number_of_tensors_differs(name=name, here=len(shapes), in_example=len(largest))
    for shape, of_example in zip(shapes, largest, strict=True):
        if len(shape) != len(of_example) or any(a > b for a, b in zip(shape, of_example, strict=True)):
            raise mistakes.tensor_is_larger_than_example(name=name, here=shape, in_example=of_example)


# Micro-batches that one operation or message has together, which must have equal shapes.


class _Calls:
    """In place of a lane and all its parts: notes the ``groups`` of micro-batches with which a script calls them."""

    def __init__(self) -> None:
        self.groups: set[tuple[int, ...]] = set()

    def __getattr__(self, _name: str) -> Callable[..., "_Calls"]:
        return self._call

    def _call(self, *arguments: Any, **_named: Any) -> "_Calls":
        for argument in arguments:
            for part in (argument, *argument) if isinstance(argument, tuple) else ():
                if isinstance(part, tuple) and len(part) > 1 and {*map(type, part)} == {int}:
                    self.groups.add(part)
        return self


def _groups_of(script: Callable[[Any], None], parts: int) -> list[list[int]]:
    """Returns the micro-batches, counted whole, that operations of a script have together."""
    calls = _Calls()
    script(calls)
    whole = {tuple(sorted({micro // parts for micro in group})) for group in calls.groups}
    return [list(group) for group in sorted(whole) if len(group) > 1]


# Shapes of each micro-batch of an update or an evaluation.


@dataclass(eq=False)
class VaryingShapes:
    """Fits the stages of this rank to the shapes of each micro-batch; other copies may have other shapes.

    Make it while the feed still holds the example; every rank does. ``program`` is the directory's.
    """

    world: World
    feed: Feed
    modules: Mapping[int, torch.nn.Module]
    stages: Mapping[int, Stage]
    probed: ProbeResult
    program: CompiledProgram
    _shapes: ShapeList = field(default=ShapeList((), (), lambda _micro, _component: None), init=False)
    _agreements: Counter[str] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        job, feed = self.world.job, self.feed
        if job.period:
            raise mistakes.shapes_vary_without_flush(scheme=job.name)
        if job.lengths:
            raise Misuse(mistakes.VARYING_IN_UNEQUAL_SLICES)
        first = self.probed.first
        example = feed.input(0, first), feed.keywords(0, first)
        items = feed.size // job.row_parts
        self._sizes = Sizes.of_example(job, self.probed.by_source, *example, items)
        row = self._sizes.row("the example", example[0], None, example[1])
        self._boundaries = {ShapeKey(tuple(row)): self.probed.boundaries}
        self._current: Sequence[ShapeKey] = [*self._boundaries]
        takes_keywords = any(self.probed.traits[stage].keywords for stage in self.stages)
        self._uses = {
            number: needed_inputs(each.job, each.ranks[self.world.place.worker], takes_keywords=takes_keywords)
            for number, each in self.program.programs.items()
        }
        self._groups = self._groups_of_all() if job.grouped else {}
        feed.varies = feed.keeps = True

    def _groups_of_all(self) -> dict[str, list[list[int]]]:
        """The groups of micro-batches in operations on any rank, by the number of micro-batches of a program."""
        worker, parts = self.world.place.worker, self.world.job.parts
        scripts: dict[str, Callable[[Any], None]] = {f"{n}": run for n, run in self.program.updates(worker).items()}
        scripts["evaluation"] = self.program.script(worker).evaluate
        here = {name: _groups_of(script, parts) for name, script in scripts.items()}
        of_ranks = self.world.control_group.collect("shapes/groups", here, "for the operations of other ranks")
        return {name: [group for of_rank in of_ranks for group in of_rank[name]] for name in here}

    # ---- agreement

    def agree(self, feed: Feed, update: int, rounds: Sequence[Sequence[Round]] = ()) -> ShapeList:
        """Returns the shapes of the micro-batches of an update, on which all ranks agree; every rank calls it, before
        any has sent a message. ``rounds`` are those of each copy, without them one of N.

        All ranks see the shapes of a mini-batch in one piece. Of any other each rank tells the shapes that it holds.
        Then all ranks raise the same error: `Misuse` if a micro-batch does not fit, or is in one operation with others
        of other shapes; `RanksDiffer` if ranks of a copy have different micro-batches.
        """
        job, place = self.world.job, self.world.place
        rounds = rounds or [(Round(job.micro_batches),)] * place.copies
        load = partial(_first_part, feed, update)
        mine = rounds[place.copy]
        if feed.is_in_one_piece(update):
            rows = self._rows_in_one_piece(load, mine[-1].stop)
            self._require_groups([(each, rows[each.start : each.stop]) for each in mine])
            return ShapeList(self._keys(mine, rows), (0,) * len(rows), load)

        def tell(told: torch.Tensor) -> None:
            for each in mine:
                uses = self._uses[each.number] if each.number else {}
                self._tell(told[place.copy, each.start : each.stop], uses, load, each.start)

        largest = max(of_copy[-1].stop for of_copy in rounds)
        control = self.world.control_group
        agreed = self._agreed(
            (place.copies, largest),
            tell,
            lambda told: control.reduce(told, _SHAPES, dist.ReduceOp.MAX),
            "update",
        )
        for of_copy, of_rounds in zip(agreed.tolist(), rounds, strict=True):
            self._require_groups([(each, of_copy[each.start : each.stop]) for each in of_rounds])
        rows = agreed[place.copy, : mine[-1].stop].tolist()
        pipes = [self._pipe(each.number, micro) for each in mine for micro in range(each.number)]
        return ShapeList(self._keys(mine, rows), pipes, load)

    def agree_in_copy(self, sizes: Sequence[int], load: Load, *, is_in_one_piece: bool) -> ShapeList:
        """Returns the shapes of a round of an evaluation, on which the ranks of this copy agree as in `agree`. Its
        micro-batches have ``sizes`` items, and ``load`` fills each that has any up to those of the example.
        """
        job, place = self.world.job, self.world.place
        present = [micro for micro, items in enumerate(sizes) if items]
        if is_in_one_piece:
            rows = [self._row_in_one_piece(load, present[0])] * len(sizes)
            return ShapeList(self._keys([Round(len(sizes))], rows), (0,) * len(sizes), load)

        def tell(told: torch.Tensor) -> None:
            uses = self._uses[job.micro_batches]
            self._tell(told[0], {m: parts & _FORWARD for m, parts in uses.items() if m in present}, load)

        def reduce(told: torch.Tensor) -> None:
            told.copy_(largest_in_copy(self.world.control_group, told))

        agreed = self._agreed((1, len(sizes)), tell, reduce, f"evaluation {place.copy}")
        rows = agreed[0].tolist()
        self._require_groups(
            [(Round(len(sizes)), [rows[m] if m in present else () for m in range(len(sizes))])], "evaluation"
        )
        rows = [rows[micro] if micro in present else rows[present[0]] for micro in range(len(sizes))]
        pipes = [self._pipe(job.micro_batches, micro) for micro in range(len(sizes))]
        return ShapeList(self._keys([Round(len(sizes))], rows), pipes, load)

    def _rows_in_one_piece(self, load: Load, number: int) -> list[list[int]]:
        """The rows of micro-batches that differ in nothing but the number of items of the last one."""
        if not number:
            return []
        first, last = self._row_in_one_piece(load, 0), self._row_in_one_piece(load, number - 1)
        return [*([first] * (number - 1)), last]

    def _row_in_one_piece(self, load: Load, micro: int) -> list[int]:
        row = self._row(f"micro-batch {micro}", load, micro, _FORWARD)
        if untold := self._sizes.untold(row):
            raise mistakes.is_not_in_one_piece(what=untold[0])
        return row

    def _row(self, name: str, load: Load, micro: int, uses: frozenset[int]) -> list[int]:
        inputs, target, keywords = (load(micro, i) if i in uses else None for i in range(len(COMPONENTS)))
        return self._sizes.row(name, inputs, target, keywords or {}, uses)

    def _tell(self, told: torch.Tensor, uses: Uses, load: Load, start: int = 0) -> None:
        """Writes into ``told`` the rows of the micro-batches of which this rank ``uses`` anything."""
        for micro, parts in uses.items():
            if parts:
                row = self._row(f"micro-batch {start + micro}", load, start + micro, parts)
                told[micro] = torch.tensor(row)

    def _agreed(
        self,
        count: tuple[int, int],
        tell: Callable[[torch.Tensor], None],
        reduce: Callable[[torch.Tensor], None],
        scope: str,
    ) -> torch.Tensor:
        """Returns the rows of micro-batches of copies, of which ``tell`` writes those that this rank holds and
        ``reduce`` finds the largest number on any rank; errors as in `agree`.
        """
        control, rank = self.world.control_group, self.world.place.rank
        told, refusal = torch.zeros(*count, len(self._sizes.words), dtype=torch.int64), ""
        try:
            tell(told)
        except Misuse as error:
            if isinstance(error, PeerLost | RanksDiffer):
                raise
            refusal = str(error)
        self._agreements[scope] += 1
        key = f"shapes/refused/{scope}/{self._agreements[scope]}"
        if refusal:
            control.store.set(f"{key}/{rank}", refusal)
        smallest = torch.where(told > 0, _LIMIT - told, 0)
        number = len(control.members) - rank if refusal else 0  # so that the first rank that refuses has the largest
        numbers = torch.cat([told.flatten(), smallest.flatten(), torch.tensor([number])])
        reduce(numbers)
        if number := int(numbers[-1]):
            first = len(control.members) - number
            raise Misuse(control.wait_for_key(f"{key}/{first}", first, _SHAPES).decode())
        largest, smallest = (part.view_as(told) for part in numbers[:-1].chunk(2))
        smallest = torch.where(largest > 0, _LIMIT - smallest, 0)
        if (differing := (largest != smallest).nonzero()).numel():
            copy, micro, place = place_of = differing[0].tolist()
            sizes = [int(of_ranks[tuple(place_of)]) - 1 for of_ranks in (smallest, largest)]
            copy = copy if count[0] > 1 else self.world.place.copy
            raise mistakes.ranks_differ_in_shapes(copy=copy, micro=micro, what=self._sizes.words[place], sizes=sizes)
        return largest

    def _require_groups(self, of_rounds: Iterable[tuple[Round, Sequence[Sequence[int]]]], program: str = "") -> None:
        """Raises `Misuse` if an operation has micro-batches of other sizes than one another: ``of_rounds`` has those of
        each round, an empty row for one without items.
        """
        for each, rows in of_rounds:
            for group in self._groups.get(program or f"{each.number}", ()):
                first, *others = [micro for micro in group if rows[micro]]
                if other := next((micro for micro in others if rows[micro] != rows[first]), None):
                    micros = each.start + first, each.start + other
                    raise mistakes.block_differs_in_shape(scheme=self.world.job.name, micros=micros)

    def _keys(self, rounds: Sequence[Round], rows: Sequence[Sequence[int]]) -> list[ShapeKey]:
        keys = list[ShapeKey]()
        for each in rounds:
            job = self.program.programs[each.number].job if each.number in self.program.programs else self.world.job
            for micro, row in enumerate(rows[each.start : each.stop]):
                keys.append(ShapeKey(tuple(row), self._lacking(job, micro, row) if job.at_times else frozenset()))
        return keys

    def _lacking(self, job: Job, micro: int, row: Sequence[int]) -> frozenset[int]:
        by_program = {stage for stage in range(job.stages) if job.leaves_out(micro * job.parts, stage)}
        return job.without(self._sizes.missing(row)) | by_program

    def _pipe(self, number: int, micro: int) -> int:
        """The pipe of a micro-batch in the program for ``number`` of them: that of the workers that load its inputs."""
        program, job = self.program.programs[number], self.world.job
        loading = {worker for worker, facts in enumerate(program.ranks) if micro in spread(facts.inputs)}
        pipes = (p for p, workers in enumerate(job.placement) if loading.issuperset(workers[s] for s in job.sources))
        return next(pipes, 0)

    # ---- fitting

    def begin(self, shapes: ShapeList) -> None:
        """Finds out what stages hand on for shapes that come for the first time; every rank of the copy calls it.
        Raises `BadModel` if a stage returns more numbers than for the example, `ModelError` if its forward fails,
        `PeerLost` if another rank does not answer.
        """
        self._shapes = shapes
        for micro, key in enumerate(shapes.keys):
            if key not in self._boundaries:
                self._boundaries[key] = self._probe(key, micro, shapes)

    def begin_round(self, each: Round) -> None:
        """Resizes the stages for a round of the update, after `begin`, unless they have these sizes."""
        keys = self._shapes.keys[each.start : each.stop]
        keys = keys[:1] if len({*keys}) == 1 else keys
        if not keys or keys == self._current:
            return
        boundaries = self.boundaries(keys)
        for number, stage in self.stages.items():
            before = boundary_before(number, self.world.job, boundaries)
            after = boundaries[number] if self.world.job.fed[number] else None
            stage.resize(before, after, are_equal=len(keys) == 1)
        self._current = keys

    def boundaries(self, keys: Sequence[ShapeKey]) -> Mapping[int, Boundary]:
        """Returns the boundaries between stages for micro-batches of these shapes, after `begin`."""
        of_keys = [self._boundaries[key] for key in keys]
        if len({*keys}) == 1:
            return of_keys[0]
        parts = range(self.world.job.parts)
        return {
            stage: replace(largest, of_micros=tuple(each[stage].shapes for each in of_keys for _ in parts))
            for stage, largest in self.probed.boundaries.items()
        }

    def _probe(self, key: ShapeKey, micro: int, shapes: ShapeList) -> dict[int, Boundary]:
        copy, job = self.world.place.copy, self.world.job
        chain = Chain(
            *(self.world, copy, f"shapes/{copy}/{_digest((key.sizes, sorted(key.lacking))):x}/"),
            reads="for the shapes of what stage {} hands on",
            sends="for stage {} to see new shapes",
            receives="for new shapes of stage {}",
            pipe=shapes.pipes[micro],
        )
        boundaries = dict(self.probed.boundaries)
        outputs: dict[int, Tensors] = {}

        def feeding(stage: int) -> Iterator[int]:
            return (other for other in job.feeding[stage] if other not in key.lacking)

        def run(stage: int) -> tuple[Shape, ...]:
            before, received = boundary_before(stage, job, boundaries), list[torch.Tensor]()
            for other in feeding(stage):
                received += outputs[other] if other in outputs else chain.receive(other, boundaries[other])
            if before is None:
                argument = copied(job.of_end(shapes.load(micro, _INPUT), stage, job.sources), self.world.device)
            else:
                before = before.without(key.lacking) if before.feeds else before
                argument = before.form.filled(received)
            outputs[stage] = self._run(stage, argument, partial(shapes.load, micro, KEYWORDS), before)
            return tuple(tuple(tensor.shape) for tensor in outputs[stage])

        for stage, largest in self.probed.boundaries.items():  # a stage that feeds no other is not run
            if stage not in key.lacking:
                for other in filter(chain.is_mine, feeding(stage)):
                    chain.send(stage, outputs[other])
                boundaries[stage] = replace(largest, shapes=chain.of_stage("stage", stage, partial(run, stage)))
        return boundaries

    @torch.no_grad()
    def _run(
        self, number: int, argument: Any, load_keywords: Callable[[], Keywords], before: Boundary | None
    ) -> Tensors:
        module, largest = self.modules[number], self.probed.boundaries[number]
        traits = self.probed.traits[number]
        loaded = to_device(load_keywords(), self.world.device) if traits.keywords else {}
        keywords = fresh({name: loaded[name] for name in traits.keywords})
        torch.manual_seed(draw_seed("shapes", number))
        with unchanged(number, module, traits.touched):
            with UserCode(f"the forward of stage {number}", FAILED), collecting(Auxiliary(takes=False)):
                returned = called(module, before)(argument, **keywords, **NO_CARRY.arguments(traits.takes, ()))
            tensors, form = taken_apart(traits.takes.split_result(f"stage {number}", returned)[0])
        if excess := largest.excess(tensors, form):
            raise mistakes.output_is_larger_than_for_example(stage=number, excess=excess)
        return tensors


_FORWARD = frozenset({_INPUT, KEYWORDS})
"""The components of a micro-batch that stages get."""


def _first_part(feed: Feed, update: int, micro: int, component: int) -> Any:
    """A component of the first part of a micro-batch, counted within the update."""
    before, feed.start = feed.start, micro
    try:
        return feed.component(update, 0, component)
    finally:
        feed.start = before
