"""The pipes for given parameters: how long they are, where their stages run, how their micro-batches are numbered."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from chimera_ir.diagnostics.catalogue import endless, groups
from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.catalogue.values import Instance
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.elaborate.evaluate import LIMIT, Scope, evaluate
from chimera_ir.elaborate.settings import Globals
from chimera_ir.syntax import ast


@dataclass(frozen=True, slots=True)
class Shape:
    """One pipe, as long as its parameters make it; the numbers are known, the formulas not yet looked at.

    ``micro_range`` are its micro-batches, ``steps`` those that the binder takes. A pipe that goes on for ever is as
    long as it is wanted, at first one step.
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
    micro_range: range
    steps: range

    def instance(self, *values: tuple[str, int]) -> Instance:
        """This pipe, for a message, and values of its variables."""
        return Instance(self.name, values)

    def lengthened(self, count: int) -> "Shape":
        """The first micro-batches of a pipe that goes on for ever; ``count`` is a multiple of its step."""
        start = self.micro_range.start
        micros = range(start, start + count)
        return replace(self, micro_range=micros, steps=micros[:: self.steps.step])


def shapes(scheme: ast.Scheme, known: Globals, max_operations: int) -> tuple[Shape, ...]:
    """All pipes in the order of the text, an indexed one once for each index.

    Raises
    ------
    Rejected
        If a range is none, the pipes do not cut the model alike, there is nothing to run, or too much of it.
    """
    found: list[Shape] = []
    failed: list[Diagnostic] = []
    for item in scheme.items:
        if isinstance(item, ast.Pipe):
            for outcome in _shapes_of(item, known.scope, max_operations):
                if isinstance(outcome, Diagnostic):
                    failed.append(outcome)
                else:
                    found.append(outcome)
    reject(failed)
    reject(_disagreements(found))
    reject(_halves(found))
    reject(_too_many(found, scheme, known, max_operations))
    return tuple(found)


def reject(failed: Iterable[Diagnostic]) -> None:
    """Raises what has failed, each failure of a line once, though it may be one of many pipes."""
    distinct = {(type(diagnostic), diagnostic.span): diagnostic for diagnostic in reversed(list(failed))}
    if distinct:
        raise Rejected(distinct.values())


def _shapes_of(pipe: ast.Pipe, scope: Scope, limit: int) -> list[Shape | Diagnostic]:
    if pipe.index is None:
        return [_shape(pipe, pipe.name.text, scope)]
    indices = _range(pipe.index.range, scope, Instance())
    if isinstance(indices, Diagnostic):
        return [indices]
    if len(indices) > limit:
        values = _range_values(pipe.index.range, scope)
        return [say.TooManyPipes(pipe.index.range.span, values, Instance(), len(indices), limit)]
    variable = pipe.index.variable.text
    return [_shape(pipe, f"{pipe.name.text}[{i}]", scope.with_values({variable: i})) for i in indices]


def _shape(pipe: ast.Pipe, name: str, scope: Scope) -> Shape | Diagnostic:
    stages = next(clause for clause in pipe.clauses if isinstance(clause, ast.Stages))
    micros = next(clause for clause in pipe.clauses if isinstance(clause, ast.Micros))
    operations = tuple(clause for clause in pipe.clauses if isinstance(clause, ast.Operation))
    stage_range = _range(stages.range, scope, Instance(name))
    if isinstance(stage_range, Diagnostic):
        return stage_range
    step = 1 if micros.step is None else evaluate(micros.step, scope, Instance(name))
    if isinstance(step, Diagnostic):
        return step
    if micros.step is not None and step < 1:
        return groups.BadStep(micros.step.span, scope.values_in(micros.step, ()), Instance(name), step)
    micro_range = _micro_range(micros.range, step, scope, Instance(name))
    if isinstance(micro_range, Diagnostic):
        return micro_range
    recompute = next((clause for clause in pipe.clauses if isinstance(clause, ast.Recompute)), None)
    syncs = tuple(clause for clause in pipe.clauses if isinstance(clause, ast.Sync))
    reads = next((clause for clause in pipe.clauses if isinstance(clause, ast.Reads)), None)
    steps = micro_range[:: min(step, LIMIT)]
    return Shape(name, stages, micros, operations, recompute, syncs, reads, scope, stage_range, micro_range, steps)


def _micro_range(text: ast.Range | ast.Endless, step: int, scope: Scope, instance: Instance) -> range | Diagnostic:
    """The micro-batches of a pipe; the first step of one without end."""
    if isinstance(text, ast.Range):
        return _range(text, scope, instance)
    start = evaluate(text.start, scope, instance)
    return start if isinstance(start, Diagnostic) else range(start, start + step)


def _range(text: ast.Range, scope: Scope, instance: Instance) -> range | Diagnostic:
    start = evaluate(text.start, scope, instance)
    stop = evaluate(text.stop, scope, instance)
    if isinstance(start, Diagnostic):
        return start
    if isinstance(stop, Diagnostic):
        return stop
    if stop < start:
        return say.BackwardRange(text.span, _range_values(text, scope), instance, start, stop)
    return range(start, stop)


def _range_values(text: ast.Range | ast.Endless, scope: Scope) -> say.Values:
    """The names in the ends of a range with what they stand for."""
    ends = (text.start, text.stop) if isinstance(text, ast.Range) else (text.start,)
    return tuple(dict(pair for end in ends for pair in scope.values_in(end, ())).items())


def _disagreements(found: Sequence[Shape]) -> list[Diagnostic]:
    """Pipes that do not have the stages 0 .. D-1, or another D than the first."""
    failed: list[Diagnostic] = []
    for shape in found:
        span, count, first = shape.stages.range.span, len(shape.stage_range), found[0]
        values = shape.scope.values_in(shape.stages.range.stop, ())
        if count == 0:
            failed.append(say.NoStages(span, values, shape.instance()))
        elif shape.stage_range.start != 0:
            values = shape.scope.values_in(shape.stages.range.start, ())
            failed.append(say.StagesNotFromZero(span, values, shape.instance(), shape.stage_range.start))
        elif count != len(first.stage_range):
            expected = len(first.stage_range)
            place = first.stages.range.span
            failed.append(say.StagesDiffer(span, values, Instance(), shape.name, count, first.name, expected, place))
    return failed


def _halves(found: Sequence[Shape]) -> list[Diagnostic]:
    """Pipes that count halves beside pipes that count whole micro-batches; an odd number of halves."""
    counting = [shape for shape in found if shape.micros.halves is not None]
    if not counting:
        return []
    whole = [shape for shape in found if shape.micros.halves is None]
    if whole:
        first = counting[0]
        return [groups.HalvesDiffer(whole[0].micros.span, (), Instance(), whole[0].name, first.name, first.micros.span)]
    total = sum(len(shape.micro_range) for shape in found)
    if total % 2 == 0:
        return []
    text = found[0].micros.range
    return [groups.OddHalves(text.span, _range_values(text, found[0].scope), Instance(), total)]


def _too_many(found: Sequence[Shape], scheme: ast.Scheme, known: Globals, limit: int) -> list[Diagnostic]:
    """Nothing to run, or more than the limit; counted, not enumerated."""
    if not found:
        index = next(item.index for item in scheme.items if isinstance(item, ast.Pipe) and item.index is not None)
        return [say.EmptyIndex(index.range.span, _range_values(index.range, known.scope), Instance())]
    micros = sum(len(shape.micro_range) for shape in found)
    if micros == 0:
        text = found[0].micros.range
        return [say.NoMicros(text.span, _range_values(text, found[0].scope), Instance())]
    stages = len(found[0].stage_range)
    count = sum(len(shape.steps) * stages * len(shape.operations) for shape in found)
    count = max(count, stages * len(found), micros)
    if count <= limit:
        return []
    longest = max(found, key=lambda shape: len(shape.micro_range))
    text, values = longest.micros.range, _range_values(longest.micros.range, longest.scope)
    if isinstance(text, ast.Endless):
        return [endless.TooManyInTurns(text.span, values, Instance(), count, limit, stages, micros)]
    return [say.TooManyOperations(text.span, values, Instance(), count, limit, micros, stages)]
