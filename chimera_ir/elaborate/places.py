"""Places pipes: workers of stages, global numbers of micro-batches, stages that recompute or have a strategy."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from itertools import accumulate, chain, product
from operator import itemgetter

from chimera_ir.diagnostics.catalogue import endless
from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.catalogue.groups import SyncDiffers
from chimera_ir.diagnostics.model import Attempts, Diagnostic, Rejected, made_of, reject
from chimera_ir.elaborate.evaluate import Fault, compiled
from chimera_ir.elaborate.pipes import Shape
from chimera_ir.ir.ids import Micro, Stage, Worker
from chimera_ir.ir.levels import Pipe, Strategy
from chimera_ir.source import Span
from chimera_ir.syntax import ast


def place(shapes: Sequence[Shape], workers: int, workers_span: Span, left_out: Mapping[int, Span]) -> tuple[Pipe, ...]:
    """The pipes with the workers of their stages and the global numbers of their micro-batches or, if cut, slices.

    Raises `Rejected` if a stage is placed on no worker, a worker has no stage, or the numbers are not 0 .. N-1, each
    once. ``workers_span`` is the place in the text that gives the number of workers; ``left_out`` has the workers that
    have no stage, each with the place that says so.
    """
    with Attempts() as attempts:
        rows = attempts.each(shapes, lambda shape: tuple(_workers(shape, workers, left_out)))
        with attempts.step():
            columns = global_numbers(shapes)
        recomputed = attempts.each(shapes, _recomputed)
    idle = {*range(workers)} - left_out.keys() - {worker for row in rows for worker in row}
    if idle:
        # A smaller number of workers helps only if the idle ones are the last.
        fewer = min(idle) if len(idle) == workers - min(idle) else None
        raise Rejected([say.IdleWorker(workers_span, min(idle), workers, len(idle), fewer)])
    return tuple(map(_pipe, shapes, rows, columns, recomputed))


def _pipe(
    shape: Shape, workers: tuple[Worker, ...], numbers: Sequence[int], recomputed: Mapping[int, Set[int]]
) -> Pipe:
    """A pipe; ``recomputed`` has the micro-batches, in the pipe's own numbers, that stages recompute."""
    stages = tuple(Stage(stage) for stage in shape.stage_range if stage in recomputed)
    named = dict(zip(shape.micro_range, numbers, strict=True))
    some = tuple(
        (stage, tuple(_each_slice([named[m] for m in shape.micro_range if m in recomputed[stage]], shape.slices)))
        for stage in stages
        if not recomputed[stage] >= named.keys()
    )
    return Pipe(shape.name, workers, tuple(_each_slice(numbers, shape.slices)), stages, some)


def _each_slice(numbers: Sequence[int], slices: int) -> Iterator[Micro]:
    """Yields the numbers of all slices of the micro-batches ``numbers``."""
    return (Micro(slices * number + place) for number in numbers for place in range(slices))


def _recomputed(shape: Shape) -> Mapping[int, Set[int]]:
    """Maps each stage that recomputes to the micro-batches, in the pipe's own numbers, that it recomputes.

    The line ``recompute`` of the pipe says which they are; without this line, its operation lines that are
    recomputations do. If a formula of such an operation line has no value, the elaboration of the operations reports
    it.
    """
    clause, (micro_variable, stage_variable) = shape.recompute, shape.names
    if clause and (clause.guard is None or not shape.scope.depends(clause.guard, micro_variable)):
        return dict.fromkeys(_stages_of(shape, clause), frozenset(shape.micro_range))
    recomputed: dict[int, set[int]] = defaultdict(set)
    if clause and clause.guard is not None:
        cells = {micro_variable: shape.micro_range, stage_variable: shape.stage_range}
        for (micro, stage), holds in shape.values(clause.guard, cells):
            if holds:
                recomputed[stage].add(micro)
        return recomputed
    for line, sliced in product(shape.operations, shape.by_slice()):
        if line.subjects[0].kind.recomputes:
            with suppress(Fault):
                for stage, micros in _recomputations(line, sliced):
                    recomputed[stage].update(micros)
    return recomputed


def _recomputations(line: ast.Operation, shape: Shape) -> Iterator[tuple[int, range]]:
    """Yields the stage and the micro-batches of each recomputation of a line; raises ``Fault`` at the first failure.

    It ends where ranges name more micro-batches than there are, which the elaboration of the operations reports.
    """
    scope, subject, micros = shape.scope.with_variables(*shape.names), line.subjects[0], shape.micro_range
    stage, holds = compiled(subject.stage, scope), None if line.guard is None else compiled(line.guard, scope)
    ends = (subject.micro.start, subject.micro.stop) if isinstance(subject.micro, ast.Range) else (subject.micro,)
    numbers = [compiled(end, scope) for end in ends]
    left = len(micros) * len(shape.stage_range)
    for frame in product(shape.steps, shape.stage_range):
        if holds is None or holds(frame):
            first, *stop = (number(frame) for number in numbers)
            batch = range(max(first, micros.start), min(stop[0] if stop else first + 1, micros.stop))
            left -= len(batch)
            if left < 0:
                return
            yield stage(frame), batch


def _stages_of(shape: Shape, clause: ast.Recompute | ast.Sync) -> Iterator[Stage]:
    """The stages of a pipe for which the guard of a clause holds."""
    if clause.guard is None:
        return map(Stage, shape.stage_range)
    guards = shape.values(clause.guard, {shape.stages.variable.text: shape.stage_range})
    return (Stage(stage) for (stage,), holds in guards if holds)


def strategies(shapes: Sequence[Shape]) -> tuple[tuple[Stage, Strategy], ...]:
    """Returns the stages whose strategy for sums is not the default, each with its strategy, ascending.

    The ``sync`` lines of the pipes give the strategies; of several such lines of a pipe that hold for a stage, the last
    one counts. A pipe without one for a stage leaves the choice to the other pipes.

    Raises `Rejected` if two pipes ask for different strategies for the same stage.
    """
    lines = [(shape, sync) for shape in shapes for sync in shape.syncs]
    stages_of = made_of(lines, lambda line: tuple(_stages_of(*line)))
    by_pipe = {(line[0].name, stage): line for line, stages in zip(lines, stages_of, strict=True) for stage in stages}
    chosen: dict[Stage, tuple[Shape, ast.Sync]] = {}
    differing: list[Diagnostic] = []
    for (_, stage), (shape, sync) in by_pipe.items():
        other, first = chosen.setdefault(stage, (shape, sync))
        if sync.mode is not first.mode:
            instance, modes = shape.instance((shape.names[1], stage)), (sync.mode.value, first.mode.value)
            differing.append(SyncDiffers(sync.span, (), instance, stage, *modes, other.name, first.span))
    reject(differing)
    listed = [(stage, Strategy(sync.mode.value)) for stage, (_, sync) in sorted(chosen.items(), key=itemgetter(0))]
    return tuple(entry for entry in listed if entry[1] is not Strategy.EAGER_OPT)


def _workers(shape: Shape, workers: int, left_out: Mapping[int, Span]) -> Iterator[Worker]:
    """Yields the workers of a pipe's stages; raises ``Rejected`` for the first that does not exist or is left out."""
    clause, variable = shape.stages, shape.stages.variable.text
    for (stage,), worker in shape.values(clause.place, {variable: shape.stage_range}):
        if not 0 <= worker < workers or worker in left_out:
            names = shape.scope.with_variables(variable).values_in(clause.place, (stage,))
            where = clause.place.span, names, shape.instance((variable, stage)), stage, worker
            if worker in left_out:
                raise Rejected([say.WorkerLeftOut(*where, left_out[worker])])
            raise Rejected([say.WorkerOutOfRange(*where, workers)])
        yield Worker(worker)


def weights(shapes: Sequence[Shape], pipes: Sequence[Pipe]) -> tuple[int, ...]:
    """The weights of all micro-batches, slices counted one by one; empty if all weigh 1.

    Raises `Rejected` with the first weight of each pipe that is below 1.
    """
    if all(shape.micros.weight is None for shape in shapes):
        return ()
    columns = made_of(zip(shapes, pipes, strict=True), lambda pipe: tuple(_weights(*pipe)))
    by_number = dict(chain.from_iterable(columns))
    return tuple(by_number[number] for number in sorted(by_number)) if {*by_number.values()} != {1} else ()


def _weights(shape: Shape, pipe: Pipe) -> Iterator[tuple[Micro, int]]:
    """Yields each global number with the weight of its micro-batch."""
    formula, variable = shape.micros.weight, shape.micros.variable.text
    if formula is None:
        yield from ((number, 1) for number in pipe.micros)
        return
    for place, ((micro,), weight) in enumerate(shape.values(formula, {variable: shape.micro_range})):
        if weight < 1:
            values = shape.scope.with_variables(variable).values_in(formula, (micro,))
            raise Rejected([say.BadWeight(formula.span, values, shape.instance((variable, micro)), micro, weight)])
        yield from ((number, weight) for number in pipe.micros[place * shape.slices : (place + 1) * shape.slices])


def global_numbers(shapes: Sequence[Shape]) -> list[list[int]]:
    """The global numbers of each pipe's micro-batches; raises ``Rejected`` if they are not 0 .. N-1, each once."""
    *firsts, total = accumulate((len(shape.micro_range) for shape in shapes), initial=0)
    columns = made_of(zip(shapes, firsts, strict=True), lambda pipe: list(_numbers(*pipe)))
    micros = [(shape, micro) for shape in shapes for micro in shape.micro_range]
    # The first micro-batch with each number.
    owners: dict[int, tuple[Shape, int]] = {}
    numbered = list(zip(chain.from_iterable(columns), micros, strict=True))
    for number, micro in numbered:
        owners.setdefault(number, micro)
    reject(_outside(*micro, number, total) for number, micro in owners.items() if not 0 <= number < total)
    clash = next(((number, *micro) for number, micro in numbered if owners[number] is not micro), None)
    if clash is not None:
        raise Rejected([_clash(*clash, owners, total)])
    return columns


def _numbers(shape: Shape, first: int) -> Iterable[int]:
    """Returns the global numbers of a pipe's micro-batches; without an ``as`` clause they count on from ``first``."""
    if shape.micros.number is None:
        return range(first, first + len(shape.micro_range))
    numbers = shape.values(shape.micros.number, {shape.micros.variable.text: shape.micro_range})
    return (number for _, number in numbers)


def _outside(shape: Shape, micro: int, number: int, total: int) -> Diagnostic:
    where = _where(shape, micro)
    if isinstance(shape.micros.range, ast.Endless):
        variable, count = shape.micros.variable.text, len(shape.micro_range)
        return endless.NumberOutsideTurn(*where, variable, micro, number, count, total, total - 1)
    return say.NumberOutside(*where, micro, number, total - 1)


def _clash(number: int, shape: Shape, micro: int, owners: Mapping[int, tuple[Shape, int]], total: int) -> Diagnostic:
    missing = next(candidate for candidate in range(total) if candidate not in owners)
    owner, owner_micro = owners[number]
    earlier = f"{owner.micros.variable.text} = {owner_micro} of `{owner.name}`"
    later = f"{shape.micros.variable.text} = {micro} of `{shape.name}`"
    first = owner.micros.number or owner.micros.range
    return say.NumberTaken(*_where(shape, micro), number, earlier, later, missing, first.span)


def _where(shape: Shape, micro: int) -> tuple[Span, say.Values, say.Instance]:
    """Returns what a diagnostic about the global number of a micro-batch shows, as three values.

    They are the place in the text that gives the number, the values of the names there, and the pipe with the
    micro-batch.
    """
    number, variable = shape.micros.number, shape.micros.variable.text
    instance = shape.instance((variable, micro))
    if number is None:
        return shape.micros.range.span, (), instance
    return number.span, shape.scope.with_variables(variable).values_in(number, (micro,)), instance
