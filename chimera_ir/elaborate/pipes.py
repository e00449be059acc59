"""The pipes for given parameters: how long they are, where their stages run, how their micro-batches are numbered."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chimera_ir.diagnostics.catalogue import groups
from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.catalogue.values import Instance
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.elaborate.evaluate import LIMIT, Fault, Scope, compiled, evaluate
from chimera_ir.elaborate.settings import Globals
from chimera_ir.ir.ids import Micro, Stage, Worker
from chimera_ir.ir.levels import Pipe
from chimera_ir.syntax import ast


@dataclass(frozen=True, slots=True)
class Shape:
    """One pipe, as long as its parameters make it; the numbers are known, the formulas not yet looked at.

    ``micro_range`` are its micro-batches, ``steps`` those that the binder takes.
    """

    name: str
    stages: ast.Stages
    micros: ast.Micros
    operations: tuple[ast.Operation, ...]
    recompute: ast.Recompute | None
    syncs: tuple[ast.Sync, ...]
    scope: Scope
    stage_range: range
    micro_range: range
    steps: range

    def instance(self, *values: tuple[str, int]) -> Instance:
        """This pipe, for a message, and values of its variables."""
        return Instance(self.name, values)


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
    _reject(failed)
    _reject(_disagreements(found))
    _reject(_halves(found))
    _reject(_too_many(found, scheme, known, max_operations))
    return tuple(found)


def _reject(failed: Iterable[Diagnostic]) -> None:
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
        values = (*scope.values_in(pipe.index.range.start, ()), *scope.values_in(pipe.index.range.stop, ()))
        return [say.TooManyPipes(pipe.index.range.span, values, Instance(), len(indices), limit)]
    variable = pipe.index.variable.text
    return [_shape(pipe, f"{pipe.name.text}[{i}]", scope.with_values({variable: i})) for i in indices]


def _shape(pipe: ast.Pipe, name: str, scope: Scope) -> Shape | Diagnostic:
    stages = next(clause for clause in pipe.clauses if isinstance(clause, ast.Stages))
    micros = next(clause for clause in pipe.clauses if isinstance(clause, ast.Micros))
    operations = tuple(clause for clause in pipe.clauses if isinstance(clause, ast.Operation))
    stage_range = _range(stages.range, scope, Instance(name))
    micro_range = _range(_bounded(micros), scope, Instance(name))
    if isinstance(stage_range, Diagnostic):
        return stage_range
    if isinstance(micro_range, Diagnostic):
        return micro_range
    step = 1 if micros.step is None else evaluate(micros.step, scope, Instance(name))
    if isinstance(step, Diagnostic):
        return step
    if micros.step is not None and step < 1:
        return groups.BadStep(micros.step.span, scope.values_in(micros.step, ()), Instance(name), step)
    recompute = next((clause for clause in pipe.clauses if isinstance(clause, ast.Recompute)), None)
    syncs = tuple(clause for clause in pipe.clauses if isinstance(clause, ast.Sync))
    steps = micro_range[:: min(step, LIMIT)]
    return Shape(name, stages, micros, operations, recompute, syncs, scope, stage_range, micro_range, steps)


def _bounded(micros: ast.Micros) -> ast.Range:
    """The range of the micro-batches; one without end does not come here, see ``clauses.unsupported``."""
    assert isinstance(micros.range, ast.Range)
    return micros.range


def _range(text: ast.Range, scope: Scope, instance: Instance) -> range | Diagnostic:
    start = evaluate(text.start, scope, instance)
    stop = evaluate(text.stop, scope, instance)
    if isinstance(start, Diagnostic):
        return start
    if isinstance(stop, Diagnostic):
        return stop
    if stop < start:
        values = dict([*scope.values_in(text.start, ()), *scope.values_in(text.stop, ())])
        return say.BackwardRange(text.span, tuple(values.items()), instance, start, stop)
    return range(start, stop)


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
    text = _bounded(found[0].micros)
    values = dict([*found[0].scope.values_in(text.start, ()), *found[0].scope.values_in(text.stop, ())])
    return [groups.OddHalves(text.span, tuple(values.items()), Instance(), total)]


def _too_many(found: Sequence[Shape], scheme: ast.Scheme, known: Globals, limit: int) -> list[Diagnostic]:
    """Nothing to run, or more than the limit; counted, not enumerated."""
    if not found:
        index = next(item.index for item in scheme.items if isinstance(item, ast.Pipe) and item.index is not None)
        return [say.EmptyIndex(index.range.span, known.scope.values_in(index.range.stop, ()), Instance())]
    micros = sum(len(shape.micro_range) for shape in found)
    if micros == 0:
        values = found[0].scope.values_in(_bounded(found[0].micros).stop, ())
        return [say.NoMicros(found[0].micros.range.span, values, Instance())]
    stages = len(found[0].stage_range)
    count = sum(len(shape.steps) * stages * len(shape.operations) for shape in found)
    placed = max(stages * len(found), micros)
    if max(count, placed) <= limit:
        return []
    longest = max(found, key=lambda shape: len(shape.micro_range))
    span = longest.micros.range.span
    values = longest.scope.values_in(_bounded(longest.micros).stop, ())
    return [say.TooManyOperations(span, values, Instance(), max(count, placed), limit, micros, stages)]


def place(found: Sequence[Shape], known: Globals) -> tuple[Pipe, ...]:
    """The pipes with the workers of their stages and the global numbers of their micro-batches.

    Raises
    ------
    Rejected
        If a stage is placed beyond the workers, a worker has none, or the numbers are not 0 .. N-1, each once.
    """
    workers = len(found[0].stage_range) if known.workers is None else known.workers
    failed: list[Diagnostic] = []
    places = [_workers(shape, workers, failed) for shape in found]
    numbers = _numbers(found, failed)
    recompute = [_recomputing(shape, failed) for shape in found]
    _reject(failed)
    _reject(_idle({worker for row in places for worker in row}, workers, known))
    return tuple(
        Pipe(shape.name, tuple(map(Worker, row)), tuple(map(Micro, column)), stages)
        for shape, row, column, stages in zip(found, places, numbers, recompute, strict=True)
    )


def _recomputing(shape: Shape, failed: list[Diagnostic]) -> tuple[Stage, ...]:
    """The stages that keep only their input."""
    return stages_of(shape, shape.recompute, failed) if shape.recompute else ()


def stages_of(shape: Shape, clause: ast.Recompute | ast.Sync, failed: list[Diagnostic]) -> tuple[Stage, ...]:
    """The stages of a pipe that a clause speaks of: those for which its guard holds."""
    variable = shape.stages.variable.text
    if clause.guard is None:
        return tuple(map(Stage, shape.stage_range))
    guard = compiled(clause.guard, shape.scope.with_variables(variable))
    stages: list[Stage] = []
    for stage in shape.stage_range:
        try:
            stages += [Stage(stage)] if guard((stage,)) else []
        except Fault as fault:
            failed.append(fault.diagnostic(shape.instance((variable, stage))))
            break
    return tuple(stages)


def _workers(shape: Shape, workers: int, failed: list[Diagnostic]) -> list[int]:
    clause = shape.stages
    variable = clause.variable.text
    scope = shape.scope.with_variables(variable)
    formula = compiled(clause.place, scope)
    row: list[int] = []
    for stage in shape.stage_range:
        instance = shape.instance((variable, stage))
        try:
            worker = formula((stage,))
        except Fault as fault:
            failed.append(fault.diagnostic(instance))
            break
        if not 0 <= worker < workers:
            values = scope.values_in(clause.place, (stage,))
            failed.append(say.WorkerOutOfRange(clause.place.span, values, instance, stage, worker, workers))
            break
        row.append(worker)
    return row


def _idle(used: set[int], workers: int, known: Globals) -> list[Diagnostic]:
    """The first worker that no stage is placed on, if there is one."""
    if len(used) == workers:
        return []
    first = next(worker for worker in range(workers) if worker not in used)
    return [say.IdleWorker(known.workers_span, first, workers, workers - len(used))]


def _numbers(found: Sequence[Shape], failed: list[Diagnostic]) -> list[list[int]]:
    """The global numbers of each pipe's micro-batches, which are all of 0 .. N-1 unless something has failed."""
    total = sum(len(shape.micro_range) for shape in found)
    taken: dict[int, tuple[Shape, int]] = {}
    clash: tuple[int, Shape, int] | None = None
    columns: list[list[int]] = []
    for shape in found:
        column = _column(shape, sum(map(len, columns)), failed)
        columns.append(column)
        for micro, number in zip(shape.micro_range, column, strict=False):
            if number not in taken:
                taken[number] = (shape, micro)
            elif clash is None:
                clash = (number, shape, micro)
    outside = [_outside(*taken[number], number, total) for number in taken if not 0 <= number < total]
    failed += outside
    if clash is not None and not failed:
        failed.append(_taken(clash, taken, total))
    return columns


def _column(shape: Shape, first: int, failed: list[Diagnostic]) -> list[int]:
    number, variable = shape.micros.number, shape.micros.variable.text
    if number is None:
        return list(range(first, first + len(shape.micro_range)))
    formula = compiled(number, shape.scope.with_variables(variable))
    column: list[int] = []
    for micro in shape.micro_range:
        try:
            column.append(formula((micro,)))
        except Fault as fault:
            failed.append(fault.diagnostic(shape.instance((variable, micro))))
            break
    return column


def _outside(shape: Shape, micro: int, number: int, total: int) -> Diagnostic:
    text, variable = shape.micros.number or shape.micros.range, shape.micros.variable.text
    values = _number_values(shape, micro)
    instance = shape.instance((variable, micro))
    return say.NumberOutside(text.span, values, instance, micro, number, total - 1)


def _taken(clash: tuple[int, Shape, int], taken: dict[int, tuple[Shape, int]], total: int) -> Diagnostic:
    number, shape, micro = clash
    other, other_micro = taken[number]
    missing = next(candidate for candidate in range(total) if candidate not in taken)
    text, first = shape.micros.number or shape.micros.range, other.micros.number or other.micros.range
    one = f"m = {other_micro} of `{other.name}`".replace("m", other.micros.variable.text, 1)
    two = f"m = {micro} of `{shape.name}`".replace("m", shape.micros.variable.text, 1)
    instance = shape.instance((shape.micros.variable.text, micro))
    values = _number_values(shape, micro)
    return say.NumberTaken(text.span, values, instance, number, one, two, missing, first.span)


def _number_values(shape: Shape, micro: int) -> say.Values:
    if shape.micros.number is None:
        return ()
    return shape.scope.with_variables(shape.micros.variable.text).values_in(shape.micros.number, (micro,))
