"""The placement of pipes: workers by stage, stages that recompute or have a strategy, numbers of micro-batches."""

from collections.abc import Sequence

from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.catalogue.groups import SyncDiffers
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.elaborate.evaluate import Fault, compiled
from chimera_ir.elaborate.global_numbers import global_numbers
from chimera_ir.elaborate.pipes import Shape, reject
from chimera_ir.elaborate.settings import Globals
from chimera_ir.ir.ids import Micro, Stage, Worker
from chimera_ir.ir.levels import Pipe, Strategy
from chimera_ir.syntax import ast


def place(shapes: Sequence[Shape], values: Globals) -> tuple[Pipe, ...]:
    """The pipes with the workers of their stages and the global numbers of their micro-batches.

    Raises `Rejected` if a stage is placed on no worker, a worker has no stage, or the numbers are not 0 .. N-1, each
    once.
    """
    workers = len(shapes[0].stage_range) if values.workers is None else values.workers
    failed: list[Diagnostic] = []
    places = [_workers(shape, workers, failed) for shape in shapes]
    columns = global_numbers(shapes, failed)
    recompute = [_stages_of(shape, shape.recompute, failed) if shape.recompute else () for shape in shapes]
    reject(failed)
    reject(_idle({worker for row in places for worker in row}, workers, values))
    return tuple(
        Pipe(shape.name, tuple(map(Worker, row)), tuple(map(Micro, column)), stages)
        for shape, row, column, stages in zip(shapes, places, columns, recompute, strict=True)
    )


def _stages_of(shape: Shape, clause: ast.Recompute | ast.Sync, failed: list[Diagnostic]) -> tuple[Stage, ...]:
    """The stages of a pipe for which the guard of a clause holds."""
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


def strategies(shapes: Sequence[Shape]) -> tuple[tuple[Stage, Strategy], ...]:
    """The stages with another strategy than the default, ascending, by the ``sync`` clauses of the pipes.

    If several clauses of a pipe hold for a stage, the last one counts. A pipe without such a clause does not count.

    Raises `Rejected` if two pipes ask for different strategies for the same stage.
    """
    failed: list[Diagnostic] = []
    chosen: dict[Stage, tuple[ast.Sync, Shape]] = {}
    for shape in shapes:
        clauses = {stage: clause for clause in shape.syncs for stage in _stages_of(shape, clause, failed)}
        for stage, clause in clauses.items():
            first, other = chosen.setdefault(stage, (clause, shape))
            if first.mode is not clause.mode:
                instance = shape.instance((shape.stages.variable.text, stage))
                modes = clause.mode.value, first.mode.value
                failed.append(SyncDiffers(clause.span, (), instance, stage, *modes, other.name, first.span))
    reject(failed)
    listed = [(stage, Strategy(clause.mode.value)) for stage, (clause, _) in sorted(chosen.items(), key=lambda c: c[0])]
    return tuple(entry for entry in listed if entry[1] is not Strategy.EAGER_OPT)


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
            names = scope.values_in(clause.place, (stage,))
            failed.append(say.WorkerOutOfRange(clause.place.span, names, instance, stage, worker, workers))
            break
        row.append(worker)
    return row


def _idle(used: set[int], workers: int, values: Globals) -> list[Diagnostic]:
    """The diagnostic of the first worker without a stage, if there is one."""
    if len(used) == workers:
        return []
    first = next(worker for worker in range(workers) if worker not in used)
    return [say.IdleWorker(values.workers_span, first, workers, workers - len(used))]
