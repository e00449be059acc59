"""Makes the operations that the lines of a pipe stand for, for all its micro-batches and stages."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, chain, compress, islice, product
from math import ceil, lcm
from operator import itemgetter
from typing import NamedTuple, cast

from chimera_ir.diagnostics.catalogue import names
from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.catalogue.values import Instance
from chimera_ir.diagnostics.model import Attempts, Diagnostic, Rejected, made_of, reject
from chimera_ir.elaborate.affine import ALWAYS, Law, eventual_law, law, limited
from chimera_ir.elaborate.evaluate import LIMIT, Fault, Frame, Scope, compiled, evaluate
from chimera_ir.elaborate.grid import Grid, UndefinedOnGrid
from chimera_ir.elaborate.pipes import Shape, StageLine
from chimera_ir.ir.levels import MAX_AGE, Header, Pipe, Strategy
from chimera_ir.ir.ops import (
    Clock,
    Compute,
    Micro,
    Operation,
    Pair,
    Planned,
    Stage,
    Unclocked,
    Version,
    Worker,
    singles,
)
from chimera_ir.ir.text.printer import absolute, micros_name, numbered_line
from chimera_ir.source import Span
from chimera_ir.syntax import ast
from chimera_ir.syntax.formatter import show_expression

# Places pipes: workers of stages, global numbers of micro-batches, stages that recompute or have a strategy.


def place(shapes: Sequence[Shape], workers: int, workers_span: Span, left_out: Mapping[int, Span]) -> tuple[Pipe, ...]:
    """The pipes with the workers of their stages and the global numbers of their micro-batches or, if cut, slices.

    Raises `Rejected` if a stage is placed on no worker, a worker has no stage, or the numbers are not 0 .. N-1, each
    once. ``workers_span`` is where the text gives the number of workers, ``left_out`` where it leaves out some.
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
    stages = tuple(Stage(stage) for stage in shape.stage_range if stage in recomputed)
    named = dict(zip(shape.micro_range, numbers, strict=True))
    some = tuple(
        (stage, tuple(_each_slice([named[m] for m in shape.micro_range if m in recomputed[stage]], shape.slices)))
        for stage in stages
        if not recomputed[stage] >= named.keys()
    )
    return Pipe(shape.name, workers, tuple(_each_slice(numbers, shape.slices)), stages, some)


def _each_slice(numbers: Sequence[int], slices: int) -> Iterator[Micro]:
    return (Micro(slices * number + place) for number in numbers for place in range(slices))


def _recomputed(shape: Shape) -> Mapping[int, Set[int]]:
    """Maps each stage that recomputes to the micro-batches, in the pipe's own numbers, that it recomputes.

    By the line ``recompute`` or, without one, by operation lines; failures of those are reported with the operations.
    """
    clause, (micro_variable, _) = shape.recompute, shape.names
    if clause and (clause.guard is None or not shape.scope.depends(clause.guard, micro_variable)):
        return dict.fromkeys(_stages_of(shape, clause), frozenset(shape.micro_range))
    recomputed: dict[int, set[int]] = defaultdict(set)
    if clause and clause.guard is not None:
        for of_line in _lines_of(shape, clause.guard):
            cells = {micro_variable: shape.micro_range, of_line.variable: of_line.values}
            for (micro, stage), holds in shape.values(clause.guard, cells):
                if holds:
                    recomputed[of_line.first + stage].add(micro)
        return recomputed
    for line, sliced in product(shape.operations, shape.by_slice()):
        if line.subjects[0].kind.recomputes:
            with suppress(Fault):
                for stage, micros in _recomputations(line, sliced):
                    recomputed[stage].update(micros)
    return recomputed


def _recomputations(line: ast.Operation, shape: Shape) -> Iterator[tuple[int, range]]:
    """Yields the stage and the micro-batches of each recomputation of a line; raises ``Fault`` at the first failure.

    Ends where ranges name more micro-batches than there are, which is reported with the operations.
    """
    left = len(shape.micro_range) * len(shape.stage_range)
    shape = shape.on_group(*line.formulas)
    scope, subject = shape.scope.with_variables(*shape.names), line.subjects[0]
    stage, holds = compiled(subject.stage, scope), None if line.guard is None else compiled(line.guard, scope)
    numbers = [compiled(end, scope) for end in subject.ends]
    for frame in product(shape.steps, shape.stage_range):
        if holds is None or holds(frame):
            first, *stop = (number(frame) for number in numbers)
            batch = range(max(first, shape.start), min(stop[0] if stop else first + 1, shape.stop))
            left -= len(batch)
            if left < 0:
                return
            yield stage(frame), batch


def _stages_of(shape: Shape, clause: ast.Recompute | ast.Sync) -> Iterator[Stage]:
    if clause.guard is None:
        yield from map(Stage, shape.stage_range)
        return
    for line in _lines_of(shape, clause.guard):
        guards = shape.values(clause.guard, {line.variable: line.values})
        yield from (Stage(line.first + stage) for (stage,), holds in guards if holds)


def _lines_of(shape: Shape, guard: ast.Expression) -> Sequence[StageLine]:
    """The lines ``stages`` of which a guard speaks: that whose variable it uses, else all."""
    variable = shape.on_group(guard).stage_variable
    return [line for line in shape.lines if line.variable == variable] or shape.lines


def strategies(shapes: Sequence[Shape]) -> tuple[tuple[Stage, Strategy], ...]:
    """Returns the stages whose strategy for sums is not the default, each with its strategy, ascending.

    The last ``sync`` line of a pipe that holds for a stage counts; a pipe without one leaves the choice to the others.

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
            differing.append(names.SyncDiffers(sync.span, (), instance, stage, *modes, other.name, first.span))
    reject(differing)
    listed = [(stage, sync.mode) for stage, (_, sync) in sorted(chosen.items(), key=itemgetter(0))]
    return tuple(entry for entry in listed if entry[1] is not Strategy.EAGER_OPT)


def _workers(shape: Shape, workers: int, left_out: Mapping[int, Span]) -> Iterator[Worker]:
    if len(shape.micro_range):  # all are placed as the first one
        shape = replace(shape, scope=shape.scope.with_value(shape.micros.variable.text, shape.start))
    for line in shape.lines:
        place, variable = line.line.place, line.variable
        for (stage,), worker in shape.values(place, {variable: line.values}):
            if not 0 <= worker < workers or worker in left_out:
                names = shape.scope.with_variables(variable).values_in((stage,), place)
                where = place.span, names, shape.instance((variable, stage)), stage, worker
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
    formula, variable = shape.micros.weight, shape.micros.variable.text
    if formula is None:
        yield from ((number, 1) for number in pipe.micros)
        return
    for place, ((micro,), weight) in enumerate(shape.values(formula, {variable: shape.micro_range})):
        if weight < 1:
            values = shape.scope.with_variables(variable).values_in((micro,), formula)
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
    if shape.micros.number is None:
        origin = shape.start - first if shape.origin is None else shape.origin
        return (micro - origin for micro in shape.micro_range)
    numbers = shape.values(shape.micros.number, {shape.micros.variable.text: shape.micro_range})
    return (number for _, number in numbers)


def _outside(shape: Shape, micro: int, number: int, total: int) -> Diagnostic:
    where = _where(shape, micro)
    if isinstance(shape.micros.range, ast.Endless):
        variable, count = shape.micros.variable.text, len(shape.micro_range)
        return say.NumberOutsideTurn(*where, variable, micro, number, count, total, total - 1)
    return say.NumberOutside(*where, micro, number, total - 1)


def _clash(number: int, shape: Shape, micro: int, owners: Mapping[int, tuple[Shape, int]], total: int) -> Diagnostic:
    missing = next(candidate for candidate in range(total) if candidate not in owners)
    owner, owner_micro = owners[number]
    earlier = f"{owner.micros.variable.text} = {owner_micro} of `{owner.name}`"
    later = f"{shape.micros.variable.text} = {micro} of `{shape.name}`"
    first = owner.micros.number or owner.micros.range
    return say.NumberTaken(*_where(shape, micro), number, earlier, later, missing, first.span)


def _where(shape: Shape, micro: int) -> tuple[Span, say.Values, say.Instance]:
    """The place of the formula that numbers a micro-batch, the values of its names, the pipe and micro-batch."""
    number, variable = shape.micros.number, shape.micros.variable.text
    instance = shape.instance((variable, micro))
    if number is None:
        return shape.micros.range.span, (), instance
    return number.span, shape.scope.with_variables(variable).values_in((micro,), number), instance


# Finds the rhythm of an endless pipe, that is its clocks per micro-batch and when it repeats, from laws of formulas.
#
# A pipe has a rhythm if the clocks of all its operations grow at the same rate, so that its lanes stay together:
#
#     F(m, s) @ 3*m + s            rate 3 clocks per micro-batch, for every operation
#     B(m, s) @ 3*m + m%2 + 4      the law of this clock repeats after 2 micro-batches: period 2, which is 6 clocks


class _Beat(NamedTuple):
    """An operation line on one stage, with laws in m: of its clock, if any, and of its guard (after ``when``).

    All formulas of the line repeat after ``period`` micro-batches. ``span`` is its clock or preference, or the line.
    """

    span: Span
    stage: int
    clock: Law | None
    guard: Law
    period: int


class Rhythm(NamedTuple):
    """The rhythm of a pipe without end: how fast it goes, and after how many micro-batches it repeats.

    ``rate`` is the clocks per micro-batch, above 0 and the same for every operation. Everything repeats after
    ``period`` micro-batches, which take ``rate * period`` clocks; ``first`` and ``last`` are the lowest and the highest
    clock of an operation on the first ``period`` of them. ``number`` is the law of the global numbers of micro-batches.
    ``versions`` has for each stage the law of the version that micro-batches read in the long run.
    """

    rate: Fraction
    period: int
    first: int
    last: int
    number: Law
    versions: tuple[Law, ...]


def rhythm_of(shape: Shape, stages: Sequence[int], most: int) -> Rhythm:
    """The rhythm of a pipe on ``stages``, with periods of at most ``most``; raises `Rejected` if there is none."""
    # The laws of all formulas. Rates are compared only if there are no other failures.
    number = Law((-shape.start,), 1)  # without ``as`` the numbers count from the start of the pipe
    with Attempts() as attempts:
        lines = [(line, sliced) for line in shape.operations for sliced in shape.by_slice()]
        by_line = attempts.each(lines, lambda line: list(_beats(*line, stages, most)))
        with attempts.step(), shape.rejecting():
            if shape.micros.number is not None:
                number = law(shape.micros.number, shape.scope, shape.micros.variable.text, most)
        weight = ALWAYS
        with attempts.step(), shape.rejecting():
            if shape.micros.weight is not None:
                weight = _weight(shape.micros.weight, shape, most)
        with attempts.step():
            recomputed = tuple(_recomputed_by_turns(shape, stages, most))
        with attempts.step():
            versions = tuple(_versions(shape, stages, most))
    beats = list(chain.from_iterable(by_line))
    reject(_drifts(beats, shape))
    # The period of the pipe is the shortest one that all laws share.
    shared = lcm(
        shape.step,
        *(part.period for part in (number, weight, *recomputed, *versions)),
        *(beat.period for beat in beats),
    )
    with shape.rejecting():
        period = limited(shared, most, shape.micros.span)
    steps = shape.lengthened(period).steps
    clocks = [beat.clock.at(m) for beat in beats if beat.clock for m in steps if beat.guard.at(m)] or [0]
    rate = next((beat.clock.rate for beat in beats if beat.clock), Fraction(1))
    return Rhythm(rate, period, min(clocks), max(clocks), number, versions)


def _weight(formula: ast.Expression, shape: Shape, most: int) -> Law:
    weight = law(formula, shape.scope, shape.micros.variable.text, most)
    if weight.increment:
        raise Fault(partial(say.WeightDrifts, formula.span, (), rate=str(weight.rate)))
    return weight


def _recomputed_by_turns(shape: Shape, stages: Sequence[int], most: int) -> Iterator[Law]:
    guard = None if shape.recompute is None else shape.recompute.guard
    for stage in stages if guard is not None else ():
        assert guard is not None
        with shape.rejecting((shape.names[1], stage)):
            yield law(guard, shape.scope.with_value(shape.names[1], stage), shape.names[0], most)


def _beats(line: ast.Operation, shape: Shape, stages: Sequence[int], most: int) -> Iterator[_Beat]:
    micro_variable, stage_variable = shape.names
    for stage in stages:
        scope = shape.scope.with_value(stage_variable, stage)
        laws = partial(law, scope=scope, variable=micro_variable, most=most)
        with shape.rejecting((stage_variable, stage)):
            guard = ALWAYS if line.guard is None else laws(line.guard)
            if any(guard.values):
                (subject,) = line.subjects  # a stream has no pairs: see `check_clauses`
                places, formula = _places(subject, shape, guard, laws, most), line.clock or line.preference
                order = ALWAYS if formula is None else laws(formula)
                clock = None if line.clock is None else order
                yield _Beat((formula or line).span, stage, clock, guard, lcm(places, order.period, guard.period))


def _places(subject: ast.Subject, shape: Shape, guard: Law, laws: Callable[[ast.Expression], Law], most: int) -> int:
    """Number of micro-batches after which the stage, the slice and the micro-batches of ``subject`` repeat.

    Raises ``Fault`` if the stage or slice grows without end, or the operation is, where ``guard`` holds, on other
    micro-batches than those for which its variable stands, m .. m + step - 1.
    """
    place, part = laws(subject.stage), ALWAYS if subject.slice is None else laws(subject.slice)
    for noun, formula, grown in (("stage", subject.stage, place), ("slice", subject.slice, part)):
        if grown.increment and formula is not None:
            raise Fault(partial(say.StageDrifts, formula.span, (), noun=noun, rate=str(grown.rate)))
    variable, step = shape.micros.variable.text, shape.step
    ends, text = [laws(end) for end in subject.ends], "..".join(map(show_expression, subject.ends))
    for number, end in enumerate(ends):
        period = limited(lcm(step, end.period, guard.period), most, subject.micro.span)
        guarded = (m for m in shape.lengthened(period).steps if guard.at(m))
        if end.rate != 1 or not all(number <= end.at(m) - m < step + number for m in guarded):
            raise Fault(partial(say.MicroStrays, subject.micro.span, (), micro=text, variable=variable, step=step))
    return lcm(place.period, part.period, *(end.period for end in ends))


def _versions(shape: Shape, stages: Sequence[int], most: int) -> Iterator[Law]:
    assert shape.reads is not None, "a pipe without end reads versions, see `check_clauses`"
    micro_variable, stage_variable = shape.names
    for stage in stages:
        scope = shape.scope.with_value(stage_variable, stage)
        with shape.rejecting((stage_variable, stage)):
            version = eventual_law(shape.reads.version, scope, micro_variable, most)
            age = ceil((version.since - shape.start) * version.rate)
            if age > MAX_AGE:
                count = min(age, LIMIT)
                raise Fault(partial(say.VersionsTooOld, shape.reads.version.span, (), count=count, most=MAX_AGE))
            yield version


def _drifts(beats: Sequence[_Beat], shape: Shape) -> Iterator[Diagnostic]:
    """Yields a mistake for each clock that grows at another rate than the first; ends at one that does not grow."""
    variable = shape.stages.variable.text
    clocked = [(beat, beat.clock.rate) for beat in beats if beat.clock]
    for beat, rate in clocked:
        span, (other, other_rate) = beat.span, clocked[0]
        instance = shape.instance((variable, beat.stage))
        if rate <= 0:
            yield say.ClockStands(span, (), instance, str(rate))
            return
        if rate != other_rate:
            first = other.stage, str(other_rate), other.span
            yield say.LanesDrift(span, (), instance, beat.stage, str(rate), *first)


# Finds and checks the weight versions that the micro-batches of pipes without end read.

Readings = Mapping[tuple[Micro, Stage], Version]
"""The versions that micro-batches read, by micro-batch and stage; empty with a flush."""


def check_versions(shape: Shape, laws: Sequence[Law]) -> None:
    """Checks that every micro-batch m of a pipe without end reads version max(0, f(m)) on each stage.

    f is the law of the stage in ``laws``: the version that micro-batches read in the long run. The first micro-batches
    are checked one by one, until the law has held for a period. All laws grow.

    Raises `Rejected` for the first micro-batch that reads another version.
    """
    if shape.reads is None:
        return
    start, span = shape.start, shape.reads.version.span
    for number, reads_law in enumerate(laws):
        micros = range(start, max(start, reads_law.since) + reads_law.period)
        cells: dict[str, Iterable[int]] = dict(zip(shape.names, (micros, [number]), strict=True))
        for (micro, stage), version in shape.values(shape.reads.version, cells):
            where = span, (), shape.instance(*zip(shape.names, (micro, stage), strict=True)), micro, stage, version
            expected = max(0, reads_law.at(micro))
            if version < 0:
                raise Rejected([say.NegativeVersion(*where)])
            if version != expected:
                raise Rejected([say.VersionUnsettled(*where, expected)])


def readings(shapes: Sequence[Shape], pipes: Sequence[Pipe], rhythms: Sequence[Rhythm]) -> Readings:
    """Returns the versions that the micro-batches of turn 0 read, as the laws of their pipes give them.

    Versions may be below 0, where the first micro-batches of a run read version 0: turn 0 stands for all turns.
    """
    return {
        (number, Stage(stage)): Version(law.at(shape.micro_range[place // shape.slices]))
        for shape, pipe, rhythm in zip(shapes, pipes, rhythms, strict=True)
        for stage, law in enumerate(rhythm.versions)
        for place, number in enumerate(pipe.micros)
    }


def torn(planned: Iterable[Planned | Unclocked], reads: Readings, header: Header, turns: int) -> Iterator[Diagnostic]:
    """Yields mistakes in operations whose micro-batches belong to different updates, or read different versions.

    ``planned`` and ``reads`` are those of turn 0. All of the ``turns`` are checked: micro-batches that read different
    versions later may all read version 0 at first.
    """
    groups = [part for part in singles(entry.operation for entry in planned) if len(part.micros) > 1]
    per_turn = header.per_turn
    for turn, operation in product(range(turns if groups else 0), groups):
        first, more = operation.micros[0], turn * per_turn
        for micro in operation.micros[1:]:
            updates = [number // header.per_update + more for number in (first, micro)]
            versions = [max(0, reads[number, operation.stage] + more) for number in (first, micro)]
            numbers = first + turn * header.period, micro + turn * header.period
            where = operation.origin, (), Instance(header.pipe_of[first].name), *numbers
            if updates[0] != updates[1]:
                yield say.GroupTorn(*where, "update", *updates)
            elif versions[0] != versions[1]:
                yield say.GroupTorn(*where, "version", *versions)


Pipes = Mapping[str, tuple[Shape, Pipe]]
"""All pipes by name, an indexed one as ``up[1]``."""


class Single(NamedTuple):
    """One operation that a line names (a pair has two), with the pipe that it is in or that ``of`` names."""

    subject: ast.Subject
    shape: Shape
    pipe: Pipe

    @property
    def numbers(self) -> dict[int, Micro]:
        """Maps a micro-batch's number within the pipe to its global number; with slices, to that of its first slice."""
        return dict(zip(self.shape.micro_range, self.pipe.micros[:: self.shape.slices], strict=True))

    @property
    def cells(self) -> int:
        """The number of pairs of a micro-batch and a stage."""
        return len(self.shape.micro_range) * len(self.shape.stage_range)

    def computes(
        self, batches: Iterable[tuple[Micro, ...]], stages: Iterable[Stage], line: ast.Operation, reads: Readings
    ) -> list[Compute]:
        """An operation for each group of micro-batches, on the stage at its place; moves read no weights."""
        kind, span = self.subject.kind, line.span
        versions = {} if kind.moves else reads
        return [
            Compute(kind, batch, stage, span, versions.get((batch[0], stage)) if versions else None)
            for batch, stage in zip(batches, stages, strict=True)
        ]


Listed = Planned | Unclocked
"""An operation of a plan."""


def operations(line: ast.Operation, shape: Shape, pipe: Pipe, reads: Readings, pipes: Pipes) -> list[Listed]:
    """Returns the operations of a line of a pipe, for all its micro-batches and stages.

    ``pipes`` are those that ``of`` may name. Raises ``Rejected`` for the first operation that fails.
    """
    return [planned for sliced in shape.by_slice() for planned in _operations(line, sliced, pipe, reads, pipes)]


def _operations(line: ast.Operation, shape: Shape, pipe: Pipe, reads: Readings, pipes: Pipes) -> list[Listed]:
    singles = [single_of(subject, shape, pipe, pipes) for subject in line.subjects]
    shape = shape.on_group(*line.formulas)
    try:
        return _all_at_once(line, singles, shape, reads)
    except (UndefinedOnGrid, Rejected):
        return list(_one_by_one(line, singles, shape, reads))


def single_of(subject: ast.Subject, shape: Shape, pipe: Pipe, pipes: Pipes) -> Single:
    """One operation that a line of a pipe names; raises ``Rejected`` if it names no such pipe."""
    if subject.pipe is None:
        return Single(subject, shape, pipe)
    name, index = subject.pipe.name.text, subject.pipe.index
    if index is not None:
        name = f"{name}[{evaluate(index, shape.scope, shape.instance())}]"
    if name not in pipes:
        known = ", ".join(f"`{pipe}`" for pipe in pipes)
        raise Rejected([names.NoSuchPipe(subject.pipe.span, (), shape.instance(), name, known)])
    return Single(subject, *pipes[name])


def _all_at_once(line: ast.Operation, singles: Sequence[Single], shape: Shape, reads: Readings) -> list[Listed]:
    """The operations of ``line``, evaluated as lists instead of one by one.

    Raises `UndefinedOnGrid` or ``Rejected`` if an operation fails, or may fail; then `_one_by_one` finds out.
    """
    grid = Grid(shape.steps, shape.stage_range, shape.names, shape.scope)
    # Whether the guard holds, for each micro-batch and stage; then workers and operations, and clocks, where it does.
    holds = None if line.guard is None else grid.values(line.guard)
    columns = [_column(line, single, grid, holds, reads) for single in singles]
    workers, computes = columns[0]
    joint: Sequence[Operation] = computes
    if len(columns) > 1:
        # The operations of two columns are joined to pairs.
        pairs = zip(*(zip(*column, strict=True) for column in columns), strict=True)
        joint = [_joined(line, both, shape) for both in pairs]
    order = line.clock or line.preference
    if order is None:
        return [Unclocked(None, worker, operation) for worker, operation in zip(workers, joint, strict=True)]
    values = grid.values(order)
    values = values if holds is None else list(compress(values, holds))
    if line.clock is None:
        return list(map(Unclocked, values, workers, joint))
    return list(map(Planned, cast("list[Clock]", values), workers, joint))


_Placed = tuple[Worker, Compute]


def _column(
    line: ast.Operation, single: Single, grid: Grid, holds: Sequence[int] | None, reads: Readings
) -> tuple[list[Worker], list[Compute]]:
    """The workers and operations of ``single`` at the pairs of ``grid`` where the guard ``holds``."""

    def values(formula: ast.Expression) -> list[int]:
        column = grid.values(formula)
        return column if holds is None else list(compress(column, holds))

    batches = _batches_on_grid(values, single)
    if single.subject.slice is not None:
        places = values(single.subject.slice)
        batches = [_slice(batch, place, single.shape.slices) for batch, place in zip(batches, places, strict=True)]
    stages = cast("list[Stage]", values(single.subject.stage))
    if None in batches or not {*stages} <= {*single.shape.stage_range}:
        raise UndefinedOnGrid
    workers, complete = single.pipe.workers, cast("list[tuple[Micro, ...]]", batches)
    return [workers[stage] for stage in stages], single.computes(complete, stages, line, reads)


def _one_by_one(line: ast.Operation, singles: Sequence[Single], shape: Shape, reads: Readings) -> Iterator[Listed]:
    """Yields the operations of ``line``, evaluated one by one; raises ``Rejected`` for the first that fails."""
    scope = shape.scope.with_variables(*shape.names)
    guard = None if line.guard is None else compiled(line.guard, scope)
    clock = None if line.clock is None else compiled(line.clock, scope)
    preference = None if line.preference is None else compiled(line.preference, scope)
    formulas = [(single, compiled(single.subject.stage, scope), _batches(single, scope)) for single in singles]
    named = [0] * len(singles)
    for frame in product(shape.steps, shape.stage_range):
        values = tuple(zip(shape.names, frame, strict=True))
        with shape.rejecting(*values):
            if guard is not None and not guard(frame):
                continue
            placed: list[_Placed] = []
            for number, (single, stage_of, batch_of) in enumerate(formulas):
                stage, batch = stage_of(frame), batch_of(frame)
                if batch is None or stage not in single.shape.stage_range:
                    raise Rejected([_no_such(single, shape, frame)])
                named[number] += len(batch)
                if named[number] > single.cells:
                    facts = len(single.shape.micro_range), len(single.shape.stage_range)
                    span = single.subject.micro.span
                    raise Rejected([names.RangesOverlap(span, (), shape.instance(*values), *facts)])
                (operation,) = single.computes([batch], [Stage(stage)], line, reads)
                placed.append((single.pipe.workers[stage], operation))
            worker, joint = placed[0][0], _joined(line, placed, shape, *values)
            if clock is not None:
                yield Planned(Clock(clock(frame)), worker, joint)
            else:
                yield Unclocked(preference and preference(frame), worker, joint)


def _joined(line: ast.Operation, placed: Sequence[_Placed], shape: Shape, *values: tuple[str, int]) -> Operation:
    """The operation in ``placed``, or the two in it as a pair; raises ``Rejected`` if two cannot be a pair."""
    if len(placed) == 1:
        return placed[0][1]
    (worker, first), (other, second) = placed
    numbers = absolute(shape.slices)
    facts = line.span, (), shape.instance(*values), numbered_line(first, numbers), numbered_line(second, numbers)
    if worker != other:
        raise Rejected([names.PairApart(*facts, worker, other)])
    if first.size != second.size:
        raise Rejected([names.PairUneven(*facts, first.size, second.size)])
    common = {*first.micros} & {*second.micros}
    if common:
        raise Rejected([names.PairOfOne(*facts, micros_name([min(common)], shape.slices))])
    forward, backward = (first, second) if first.kind.opens else (second, first)
    return Pair(forward, backward, line.span)


def _batches_on_grid(
    values: Callable[[ast.Expression], list[int]], single: Single
) -> Sequence[tuple[Micro, ...] | None]:
    """The micro-batches that ``single`` names where the guard holds; None for an empty range, or one beyond the pipe.

    Raises `UndefinedOnGrid` before ranges are made that name more than the pipe has.
    """
    micro, numbers = single.subject.micro, single.numbers
    if not isinstance(micro, ast.Range):
        batch_of = {micro_batch: (number,) for micro_batch, number in numbers.items()}
        return list(map(batch_of.get, values(micro)))
    ranges = list(zip(values(micro.start), values(micro.stop), strict=True))
    if sum(stop - start for start, stop in ranges) > single.cells:
        raise UndefinedOnGrid
    batches = {ends: _group(numbers, *ends) for ends in {*ranges}}
    return [batches[ends] for ends in ranges]


def _slice(batch: tuple[Micro, ...] | None, place: int, slices: int) -> tuple[Micro, ...] | None:
    """Slice ``place`` of the only micro-batch of ``batch``; None if the micro-batch or the slice does not exist."""
    return (Micro(batch[0] + place),) if batch is not None and 0 <= place < slices else None


def _batches(single: Single, scope: Scope) -> Callable[[Frame], tuple[Micro, ...] | None]:
    """As `_batches_on_grid`, for one frame: the values of the variables."""
    subject, numbers = single.subject, single.numbers
    ends = [compiled(end, scope) for end in subject.ends]
    place = None if subject.slice is None else compiled(subject.slice, scope)

    def batch(frame: Frame) -> tuple[Micro, ...] | None:
        start, *stop = (end(frame) for end in ends)
        micros = _group(numbers, start, stop[0] if stop else start + 1)
        return micros if place is None else _slice(micros, place(frame), single.shape.slices)

    return batch


def _group(numbers: dict[int, Micro], start: int, stop: int) -> tuple[Micro, ...] | None:
    if not (start < stop and start in numbers and stop - 1 in numbers):
        return None
    group = tuple([numbers[number] for number in range(start, stop) if number in numbers])
    return group if len(group) == stop - start else None


def _no_such(single: Single, shape: Shape, frame: Frame) -> Diagnostic:
    scope, subject = shape.scope.with_variables(*shape.names), single.subject
    instance, of_pipe = shape.instance(*zip(shape.names, frame, strict=True)), single.shape
    numbers = [compiled(end, scope)(frame) for end in subject.ends]
    values = scope.values_in(frame, *subject.ends)
    # The micro-batches are ``first`` to ``last``; of an expression instead of a range, only one.
    first, last = numbers[0], numbers[-1] - (len(numbers) - 1)
    if last < first:
        return names.EmptyGroup(subject.micro.span, values, instance, *numbers)
    known = {*of_pipe.micro_range}
    if missing := [*islice((micro for micro in range(first, last + 1) if micro not in known), 1)]:
        message = say.NoSuchMicro if of_pipe.origin is None else say.MicroElsewhere
        return message(subject.micro.span, values, instance, missing[0], of_pipe.start, of_pipe.stop - 1)
    if subject.slice is not None:
        values, place = scope.values_in(frame, subject.slice), compiled(subject.slice, scope)(frame)
        if not 0 <= place < single.shape.slices:
            return names.NoSuchSlice(subject.slice.span, values, instance, place, single.shape.slices - 1)
    values, stage = scope.values_in(frame, subject.stage), compiled(subject.stage, scope)(frame)
    return say.NoSuchStage(subject.stage.span, values, instance, stage, single.shape.stage_range.stop - 1)
