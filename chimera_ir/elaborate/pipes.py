"""Evaluates the pipes of a scheme for given parameters: their stages, their micro-batches, and further clauses.

scheme a(D = 2, N = 4)                 Shape p[0]: stage_range 0..2, micro_range 0..4, steps 0 and 2
pipe p[i in 0..2] {                    Shape p[1]: stage_range 0..2, micro_range 4..8, steps 4 and 6
  stages s in 0..D on s
  micros m in i*N..i*N + N by 2
  F(m..m+2, s) @ m + s                 (formulas stay formulas)
}
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import accumulate, chain, product
from typing import NamedTuple

from chimera_ir.diagnostics.catalogue import names
from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.catalogue.values import Instance
from chimera_ir.diagnostics.model import Diagnostic, Rejected, made_of, reject
from chimera_ir.elaborate.evaluate import Fault, Frame, Scope, compiled, evaluate, rejecting
from chimera_ir.elaborate.settings import Globals
from chimera_ir.ir.graph import NamedStages
from chimera_ir.ir.levels import MAX_MICRO_BATCHES, MAX_PIPES, MAX_STAGES
from chimera_ir.ir.ops import Stage
from chimera_ir.source import Span
from chimera_ir.syntax import ast

MAX_ENTRIES = 1_000_000
"""The most entries of tables, and other formulas with a name, in all pipes."""


class StageLine(NamedTuple):
    """A line ``stages`` of a pipe for given parameters: the values of its variable, the number of its first stage."""

    line: ast.Stages
    values: range
    first: int

    @property
    def variable(self) -> str:
        """The name of the stage variable."""
        return self.line.variable.text

    @property
    def group(self) -> str:
        """The name of the stages; empty if they have none."""
        return self.line.group.text if self.line.group else ""


@dataclass(frozen=True, slots=True)
class Shape:
    """A pipe for given parameters: its ranges are evaluated, its other formulas are not yet.

    ``steps`` are the values of the micro-batch variable, every ``step``-th of ``micro_range``; an endless pipe has one
    until `lengthened` gives it more. A pipe of `by_workers` has some of the micro-batches in ``micro_range``, whose
    global numbers are these less ``origin``.
    ``fixed`` has the slice variable with its value in a shape of `by_slice`. ``lines`` are its lines ``stages``; the
    variable ``names[1]`` takes the values of ``stage_range``, which are all stages unless these have names.
    """

    name: str
    stages: ast.Stages
    micros: ast.Micros
    operations: tuple[ast.Operation, ...]
    recompute: ast.Recompute | None
    syncs: tuple[ast.Sync, ...]
    reads: ast.Reads | None
    scope: Scope
    stage_range: range
    micro_range: Sequence[int]
    steps: Sequence[int]
    step: int
    stage_variable: str
    lines: tuple[StageLine, ...]
    cut: ast.Slices | None = None
    slices: int = 1
    fixed: tuple[tuple[str, int], ...] = ()
    origin: int | None = None

    def instance(self, *values: tuple[str, int]) -> Instance:
        """Returns this pipe together with the given names and values of variables, for a diagnostic to name."""
        named = (value for value in values if value[0])
        return Instance(self.name, (*named, *self.fixed))

    @property
    def groups(self) -> tuple[NamedStages, ...]:
        """The numbers of the stages of each line."""
        starts = ((line.group, line.first, line.first + len(line.values)) for line in self.lines)
        return tuple(NamedStages(name, Stage(start), Stage(stop)) for name, start, stop in starts)

    def by_slice(self) -> Iterator["Shape"]:
        """Yields a copy for each slice, whose formulas have the slice's number; the pipe itself if it has no slices."""
        if self.cut is None:
            yield self
            return
        for place in range(self.slices):
            value = self.cut.variable.text, place
            yield replace(self, scope=self.scope.with_value(*value), fixed=(value,))

    @property
    def names(self) -> tuple[str, str]:
        """The names of the micro-batch variable and of the stage variable, which is empty in a shape of no group."""
        return self.micros.variable.text, self.stage_variable

    def on_line(self, stages: StageLine) -> "Shape":
        """This pipe with the stage variable of one of its lines ``stages``."""
        return replace(self, stages=stages.line, stage_range=stages.values, stage_variable=stages.variable)

    def on_group(self, *formulas: ast.Expression | None) -> "Shape":
        """This pipe with the stage variable that some formulas use; if its groups of stages have names, of one group.

        If they use none, the variable has no name and one value. Raises `Rejected` if they use those of two groups.
        """
        if not self.lines[0].group:
            return self
        present = [formula for formula in formulas if formula is not None]
        used = [line for line in self.lines if any(self.scope.depends(f, line.variable) for f in present)]
        if len(used) > 1:
            first, second = used[:2]
            span = Span(present[0].span.start, present[-1].span.end)
            raise Rejected([names.TwoGroups(span, first.variable, first.group, second.variable, second.group)])
        if used:
            return self.on_line(used[0])
        return replace(self, stage_range=range(1), stage_variable="")

    def values(self, formula: ast.Expression, variables: Mapping[str, Iterable[int]]) -> Iterator[tuple[Frame, int]]:
        """Yields each combination of variables with the formula's value; raises `Rejected` where it has none."""
        value = compiled(formula, self.scope.with_variables(*variables))
        for frame in product(*variables.values()):
            try:
                yield frame, value(frame)
            except Fault as fault:
                raise Rejected([fault.diagnostic(self.instance(*zip(variables, frame, strict=True)))]) from None

    def rejecting(self, *values: tuple[str, int]) -> AbstractContextManager[None]:
        """Context in which a ``Fault`` becomes a ``Rejected`` whose diagnostic names the pipe with these values."""
        return rejecting(self.instance(*values))

    def work(self, micros: int, longest: int) -> int:
        """The most operations on a stage if the pipe has ``micros`` micro-batches, and the longest pipe ``longest``.

        An operation over a range of micro-batches counts once for each.
        """
        steps, total = -(-micros // self.step), 0
        for line in self.operations:
            ranges = [subject for subject in line.subjects if isinstance(subject.micro, ast.Range)]
            in_range = longest if any(subject.pipe for subject in ranges) else micros
            total += max(1, in_range if ranges else steps)
        guarded = self.recompute is not None and self.recompute.guard is not None
        return self.slices * max(total, micros if guarded else 0)

    def following(self, count: int) -> "Shape":
        """Returns this endless pipe, begun ``count`` micro-batches later than it is."""
        micros = range(self.start + count, self.stop + count)
        return replace(self, micro_range=micros, steps=micros[:: self.step])

    def lengthened(self, count: int) -> "Shape":
        """This endless pipe, cut after ``count`` micro-batches; ``count`` is a multiple of the step."""
        micros = range(self.start, self.start + count)
        return replace(self, micro_range=micros, steps=micros[:: self.step])

    @property
    def start(self) -> int:
        """The first micro-batch; of a pipe without any, where its range starts."""
        return self.micro_range.start if isinstance(self.micro_range, range) else self.micro_range[0]

    @property
    def stop(self) -> int:
        """The number behind the last micro-batch."""
        return self.micro_range.stop if isinstance(self.micro_range, range) else self.micro_range[-1] + 1

    def by_workers(self, first: int) -> Iterator["Shape"]:
        """Yields the pipe itself or, where `on` names the micro-batch, one for each way in which that places stages.

        ``first`` is the global number of the first micro-batch. The new pipes are numbered in the order of their own
        first ones. Raises `Rejected` if the pipe is endless, or has an index.
        """
        micro = self.micros.variable.text
        placed = [line for line in self.lines if self.scope.depends(line.line.place, micro)]
        if not placed:
            yield self
            return
        span = placed[0].line.place.span
        if isinstance(self.micros.range, ast.Endless):
            raise Rejected([names.PlaceNotSupported(span)])
        if self.name.endswith("]"):
            raise Rejected([names.PlacedTwice(span, (), self.instance(), micro)])
        ways: dict[int, list[int]] = {number: [] for number in self.micro_range}
        for line in placed:
            variables = {micro: self.micro_range, line.variable: line.values}
            for (number, _), worker in self.values(line.line.place, variables):
                ways[number].append(worker)
        pipes: dict[tuple[int, ...], list[int]] = {}
        for number, way in ways.items():
            pipes.setdefault(tuple(way), []).append(number)
        for place, micros in enumerate(pipes.values()):
            steps = tuple(number for number in micros if (number - self.start) % self.step == 0)
            name, origin = f"{self.name}[{place}]", self.start - first
            yield replace(self, name=name, micro_range=tuple(micros), steps=steps, origin=origin)


def shapes(scheme: ast.Scheme, values: Globals, max_operations: int) -> tuple[Shape, ...]:
    """All pipes in the order of the text; an indexed pipe once for each index.

    Raises `Rejected` if a range runs backward, pipes differ in their stages, there is nothing to run, or there are more
    than ``max_operations`` operations.
    """
    pipe_shapes = tuple(made_of(_instances(scheme.pipes, values.scope), lambda instance: _shape(*instance)))
    reject(_disagreements(pipe_shapes))
    reject(_halves(pipe_shapes))
    reject(_slices(pipe_shapes))
    reject(_too_many(pipe_shapes, scheme.pipes, values, max_operations))
    firsts = accumulate((len(shape.micro_range) for shape in pipe_shapes), initial=0)
    apart = made_of(zip(pipe_shapes, firsts, strict=False), lambda pipe: tuple(pipe[0].by_workers(pipe[1])))
    if (count := sum(map(len, apart))) > MAX_PIPES:
        raise Rejected([say.TooMany(scheme.pipes[0].name.span, (), Instance(), "pipe", count, MAX_PIPES)])
    return tuple(chain.from_iterable(apart))


def _instances(pipes: Iterable[ast.PipeBlock], scope: Scope) -> list[tuple[ast.PipeBlock, str, Scope]]:
    """Each pipe with its name and scope, an indexed one for each index; raises ``Rejected`` if there are too many."""
    instances: list[tuple[ast.PipeBlock, str, Scope]] = []
    entries = 0
    for pipe in pipes:
        name = pipe.name.text
        if pipe.index is None:
            instances.append((pipe, name, scope))
            indices = range(1)
        else:
            variable = pipe.index.variable.text
            indices = range_of(pipe.index.range, scope, Instance(), MAX_PIPES, "pipe")
            instances += [(pipe, f"{name}[{i}]", scope.with_value(variable, i)) for i in indices]
        if len(instances) > MAX_PIPES:
            raise Rejected([say.TooMany(pipe.name.span, (), Instance(), "pipe", len(instances), MAX_PIPES)])
        entries += len(indices) * sum(len(let.formulas) for let in pipe.lines(ast.Let))
        if entries > MAX_ENTRIES:
            raise Rejected([say.TooManyEntries(pipe.name.span, (), Instance(), "entry", entries, MAX_ENTRIES)])
    return instances


def _shape(pipe: ast.PipeBlock, name: str, scope: Scope) -> Shape:
    instance, micros = Instance(name), pipe.lines(ast.Micros)[0]
    scope, lines = _named(pipe.lines(ast.Let), pipe.lines(ast.Stages), scope, instance)
    stages = lines[0]
    stage_range = range(lines[-1].first + len(lines[-1].values)) if stages.group else stages.values
    step = 1 if micros.step is None else evaluate(micros.step, scope, instance)
    if micros.step is not None and step < 1:
        raise Rejected([names.BadStep(micros.step.span, scope.values_in((), micros.step), instance, step)])
    micro_range = _micro_range(micros, step, scope, instance)
    cut = next(iter(pipe.lines(ast.Slices)), None)
    return Shape(
        name,
        stages.line,
        micros,
        operations=pipe.lines(ast.Operation),
        recompute=next(iter(pipe.lines(ast.Recompute)), None),
        syncs=pipe.lines(ast.Sync),
        reads=next(iter(pipe.lines(ast.Reads)), None),
        scope=scope,
        stage_range=stage_range,
        micro_range=micro_range,
        steps=micro_range[::step],
        step=step,
        stage_variable=stages.variable,
        lines=lines,
        cut=cut,
        slices=1 if cut is None else _slice_count(cut, scope, instance),
    )


def _named(
    lets: Iterable[ast.Let], stages: Iterable[ast.Stages], scope: Scope, instance: Instance
) -> tuple[Scope, tuple[StageLine, ...]]:
    """The scope with the names that a pipe defines, and its lines ``stages``.

    The name of a group of stages is a table of their numbers.
    """
    formulas = {line.worker.text: line.place for line in stages if line.worker is not None}
    tables: dict[str, tuple[int, ...]] = {}
    named = scope.with_names(formulas, tables)
    lines: list[StageLine] = []
    for line in stages:
        first = lines[-1].first + len(lines[-1].values) if lines else 0
        values = range_of(line.range, named, instance, MAX_STAGES - first, "stage")
        lines.append(StageLine(line, values, first))
        if line.group is not None:
            tables[line.group.text] = tuple(range(first, first + len(values)))
    for let in lets:
        if isinstance(let.value, ast.NumberTable):
            tables[let.name.text] = tuple(evaluate(entry, named, instance) for entry in let.formulas)
        else:
            formulas[let.name.text] = let.value
    return named, tuple(lines)


def _slice_count(cut: ast.Slices, scope: Scope, instance: Instance) -> int:
    slices = range_of(cut.range, scope, instance, MAX_MICRO_BATCHES, "slice")
    where = cut.range.span, scope.values_in((), *cut.range.ends), instance
    if not slices:
        raise Rejected([names.NoSlices(*where, slices.start)])
    if slices.start:
        raise Rejected([names.SlicesNotFromZero(*where, slices.start)])
    return len(slices)


def _micro_range(micros: ast.Micros, step: int, scope: Scope, instance: Instance) -> range:
    """The micro-batches of a pipe; of an endless pipe only those of its first step."""
    if isinstance(micros.range, ast.Range):
        return range_of(micros.range, scope, instance, MAX_MICRO_BATCHES, "micro-batch")
    start = evaluate(micros.range.start, scope, instance)
    if micros.step is not None and step > MAX_MICRO_BATCHES:
        values = scope.values_in((), micros.step)
        raise Rejected([say.TooMany(micros.step.span, values, instance, "micro-batch", step, MAX_MICRO_BATCHES)])
    return range(start, start + step)


def range_of(text: ast.Range, scope: Scope, instance: Instance, most: int, thing: str) -> range:
    """The value of a range of at most ``most`` numbers, each of which messages call ``thing``."""
    start, stop = evaluate(text.start, scope, instance), evaluate(text.stop, scope, instance)
    if stop < start:
        raise Rejected([say.BackwardRange(text.span, scope.values_in((), *text.ends), instance, start, stop)])
    if stop - start > most:
        values = scope.values_in((), *text.ends)
        raise Rejected([say.TooMany(text.span, values, instance, thing, stop - start, most)])
    return range(start, stop)


def _disagreements(shapes: Sequence[Shape]) -> Iterator[Diagnostic]:
    for shape in shapes:
        for line in shape.lines:
            text = line.line.range
            if not line.values:
                values = shape.scope.values_in((), text.stop)
                yield say.NoStages(text.span, values, shape.instance())
            elif line.values.start != 0:
                values = shape.scope.values_in((), text.start)
                yield say.StagesNotFromZero(text.span, values, shape.instance(), line.values.start)
        text, count, first = shape.stages.range, len(shape.stage_range), shapes[0]
        groups, of_first = shape.groups, first.groups
        if groups != of_first and (shape.lines[0].group or first.lines[0].group):
            spans = shape.stages.span, (), Instance(), shape.name, _listed(groups), first.name, _listed(of_first)
            yield say.GroupsDiffer(*spans, first.stages.span)
        elif count != len(first.stage_range):
            values, span = shape.scope.values_in((), text.stop), first.stages.range.span
            yield say.StagesDiffer(
                text.span, values, Instance(), shape.name, count, first.name, len(first.stage_range), span
            )


def _listed(groups: Sequence[NamedStages]) -> str:
    return ", ".join(f"{name or 'without a name'}: {stop - start}" for name, start, stop in groups)


def _halves(shapes: Sequence[Shape]) -> Iterator[Diagnostic]:
    halved = next((shape for shape in shapes if shape.micros.halves is not None), None)
    whole = next((shape for shape in shapes if shape.micros.halves is None), None)
    total = sum(len(shape.micro_range) for shape in shapes)
    if halved and whole:
        span = whole.micros.span
        yield names.HalvesDiffer(span, (), Instance(), whole.name, halved.name, halved.micros.span)
    elif halved and total % 2:
        text = shapes[0].micros.range
        yield names.OddHalves(text.span, shapes[0].scope.values_in((), *text.ends), Instance(), total)


def _slices(shapes: Sequence[Shape]) -> Iterator[Diagnostic]:
    for shape in shapes:
        if shape.slices != shapes[0].slices:
            first = shapes[0]
            facts = shape.name, shape.slices, first.name, first.slices, (first.cut or first.micros).span
            yield names.SlicesDiffer((shape.cut or shape.micros).span, (), Instance(), *facts)


def _too_many(shapes: Sequence[Shape], pipes: Sequence[ast.PipeBlock], values: Globals, limit: int) -> list[Diagnostic]:
    """A diagnostic if there is nothing to run, or too much, as counted from the ranges before operations are made."""
    if not shapes:
        index = next(pipe.index for pipe in pipes if pipe.index is not None)
        return [say.EmptyIndex(index.range.span, values.scope.values_in((), *index.range.ends), Instance())]
    micros = sum(len(shape.micro_range) * shape.slices for shape in shapes)
    longest = max(shapes, key=lambda shape: len(shape.micro_range))
    text = longest.micros.range
    where = longest.scope.values_in((), *text.ends), Instance()
    if micros == 0:
        return [say.NoMicros(text.span, *where)]
    if micros > MAX_MICRO_BATCHES:
        noun = "slice" if shapes[0].slices > 1 else "micro-batch"
        return [say.TooMany(text.span, *where, noun, micros, MAX_MICRO_BATCHES)]
    # An endless pipe has one step so far: its operations are counted when its turn is known.
    stages = len(shapes[0].stage_range)
    by_stage = stages * sum(1 + len(shape.syncs) for shape in shapes)
    operations = stages * sum(shape.work(len(shape.micro_range), len(longest.micro_range)) for shape in shapes)
    count = max(by_stage, operations, micros) if values.per_update is None else by_stage
    if count <= limit:
        return []
    return [say.TooManyOperations(text.span, *where, count, limit, micros // shapes[0].slices, stages)]
