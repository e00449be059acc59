"""Makes the operations that the lines of a pipe stand for, for all its micro-batches and stages."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, product
from typing import NamedTuple, cast

from chimera_ir.diagnostics.catalogue import groups, slices
from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.elaborate.evaluate import Frame, Scope, compiled, evaluate
from chimera_ir.elaborate.grid import Grid, UndefinedOnGrid
from chimera_ir.elaborate.pipes import Shape
from chimera_ir.elaborate.read_versions import Readings
from chimera_ir.ir.ids import Clock, Micro, Stage, Worker
from chimera_ir.ir.levels import Pipe
from chimera_ir.ir.ops import Compute, Operation, Pair
from chimera_ir.ir.planned import Planned, Unclocked
from chimera_ir.ir.text.printer import absolute, micros_name, numbered_line
from chimera_ir.syntax import ast

Pipes = Mapping[str, tuple[Shape, Pipe]]
"""All pipes by name, an indexed one as ``up[1]``."""


class _Single(NamedTuple):
    """One operation that a line names, the subject, with its pipe; a line with a pair has two of them.

    The pipe is the one that the line is in, or the one that the line names after ``of``. ``shape`` has the formulas of
    the pipe, ``pipe`` its workers and micro-batches.
    """

    subject: ast.Subject
    shape: Shape
    pipe: Pipe

    @property
    def numbers(self) -> dict[int, Micro]:
        """Maps a micro-batch's number within the pipe to its global number; with slices, to that of its first slice."""
        return dict(zip(self.shape.micro_range, self.pipe.micros[:: self.shape.slices], strict=True))

    @property
    def cells(self) -> int:
        """The most micro-batches that all ranges of a line can name, counted once for each stage."""
        return len(self.shape.micro_range) * len(self.shape.stage_range)

    def computes(
        self, batches: Iterable[tuple[Micro, ...]], stages: Iterable[Stage], line: ast.Operation, reads: Readings
    ) -> list[Compute]:
        """Returns an operation for each group of micro-batches in ``batches``, on the stage at its place in ``stages``.

        ``line`` is the origin of all of them; ``reads`` has the versions that they read. Moves read no weights.
        """
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

    ``shape`` has the formulas of the pipe, ``reads`` the versions that operations read, ``pipes`` all pipes that ``of``
    may name. Raises ``Rejected`` for the first operation that fails.
    """
    return [planned for sliced in shape.by_slice() for planned in _operations(line, sliced, pipe, reads, pipes)]


def _operations(line: ast.Operation, shape: Shape, pipe: Pipe, reads: Readings, pipes: Pipes) -> list[Listed]:
    singles = [_single(subject, shape, pipe, pipes) for subject in line.subjects]
    try:
        return _all_at_once(line, singles, shape, reads)
    except (UndefinedOnGrid, Rejected):
        return list(_one_by_one(line, singles, shape, reads))


def _single(subject: ast.Subject, shape: Shape, pipe: Pipe, pipes: Pipes) -> _Single:
    if subject.pipe is None:
        return _Single(subject, shape, pipe)
    name, index = subject.pipe.name.text, subject.pipe.index
    if index is not None:
        name = f"{name}[{evaluate(index, shape.scope, shape.instance())}]"
    if name not in pipes:
        known = ", ".join(f"`{pipe}`" for pipe in pipes)
        raise Rejected([groups.NoSuchPipe(subject.pipe.span, (), shape.instance(), name, known)])
    return _Single(subject, *pipes[name])


def _all_at_once(line: ast.Operation, singles: Sequence[_Single], shape: Shape, reads: Readings) -> list[Listed]:
    """Returns the operations of ``line`` for all micro-batches and stages, evaluated as lists instead of one by one.

    ``singles`` has the one operation that the line names, or the two of a pair. Raises `UndefinedOnGrid` or
    ``Rejected`` if an operation fails, or may fail; then `_one_by_one` finds out.
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
    line: ast.Operation, single: _Single, grid: Grid, holds: Sequence[int] | None, reads: Readings
) -> tuple[list[Worker], list[Compute]]:
    """Returns the workers and the operations of ``single`` for all micro-batches and stages where the guard holds.

    ``single`` is the operation of ``line``, or a half of its pair. ``grid`` has the pairs; ``holds`` has the guard's
    truth (the condition after ``when``) for each pair, None if the line has no guard.
    """

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


def _one_by_one(line: ast.Operation, singles: Sequence[_Single], shape: Shape, reads: Readings) -> Iterator[Listed]:
    """Yields the operations of ``line``, evaluated one by one; raises ``Rejected`` for the first that fails.

    ``singles`` has the one operation that the line names, or the two of a pair.
    """
    scope = shape.scope.with_variables(*shape.names)
    guard = None if line.guard is None else compiled(line.guard, scope)
    clock = None if line.clock is None else compiled(line.clock, scope)
    preference = None if line.preference is None else compiled(line.preference, scope)
    formulas = [
        (single, compiled(single.subject.stage, scope), _batches(single.subject, scope, single)) for single in singles
    ]
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
                    raise Rejected([groups.RangesOverlap(span, (), shape.instance(*values), *facts)])
                (operation,) = single.computes([batch], [Stage(stage)], line, reads)
                placed.append((single.pipe.workers[stage], operation))
            worker, joint = placed[0][0], _joined(line, placed, shape, *values)
            if clock is not None:
                yield Planned(Clock(clock(frame)), worker, joint)
            else:
                yield Unclocked(preference and preference(frame), worker, joint)


def _joined(line: ast.Operation, placed: Sequence[_Placed], shape: Shape, *values: tuple[str, int]) -> Operation:
    """Returns the operation of a line: the one in ``placed``, or the two in ``placed`` as a pair.

    ``values`` are the names and values of variables, for the diagnostic. Raises ``Rejected`` if the two are on
    different workers, differ in size, or share a micro-batch.
    """
    if len(placed) == 1:
        return placed[0][1]
    (worker, first), (other, second) = placed
    numbers = absolute(shape.slices)
    facts = line.span, (), shape.instance(*values), numbered_line(first, numbers), numbered_line(second, numbers)
    if worker != other:
        raise Rejected([groups.PairApart(*facts, worker, other)])
    if first.size != second.size:
        raise Rejected([groups.PairUneven(*facts, first.size, second.size)])
    common = {*first.micros} & {*second.micros}
    if common:
        raise Rejected([groups.PairOfOne(*facts, micros_name([min(common)], shape.slices))])
    forward, backward = (first, second) if first.kind.opens else (second, first)
    return Pair(forward, backward, line.span)


def _batches_on_grid(
    values: Callable[[ast.Expression], list[int]], single: _Single
) -> Sequence[tuple[Micro, ...] | None]:
    """Returns the global numbers of the micro-batches that ``single`` names, for each pair where the guard holds.

    ``values`` evaluates a formula for these pairs. None stands for an empty range, or one that leaves the pipe. Raises
    `UndefinedOnGrid` before ranges are made that name more than the pipe has.
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
    """Returns the global number of slice ``place`` of a micro-batch, which is the only one of ``batch``.

    ``slices`` is the number of slices of a micro-batch. The result is None if the micro-batch or the slice does not
    exist.
    """
    return (Micro(batch[0] + place),) if batch is not None and 0 <= place < slices else None


def _batches(subject: ast.Subject, scope: Scope, single: _Single) -> Callable[[Frame], tuple[Micro, ...] | None]:
    """Returns a function from the values of variables (a frame) to the micro-batches that ``subject`` names.

    The micro-batches have their global numbers. The function returns None for an empty range, or one that leaves the
    pipe.
    """
    if subject.slice is None:
        return _whole_batches(subject.micro, scope, single.numbers)
    batches, place = _whole_batches(subject.micro, scope, single.numbers), compiled(subject.slice, scope)
    return lambda frame: _slice(batches(frame), place(frame), single.shape.slices)


def _whole_batches(
    micro: ast.Expression | ast.Range, scope: Scope, numbers: dict[int, Micro]
) -> Callable[[Frame], tuple[Micro, ...] | None]:
    if not isinstance(micro, ast.Range):
        only = compiled(micro, scope)
        single = {micro_batch: (number,) for micro_batch, number in numbers.items()}
        return lambda frame: single.get(only(frame))
    start, stop = compiled(micro.start, scope), compiled(micro.stop, scope)
    return lambda frame: _group(numbers, start(frame), stop(frame))


def _group(numbers: dict[int, Micro], start: int, stop: int) -> tuple[Micro, ...] | None:
    inside = start < stop and start in numbers and stop - 1 in numbers
    return tuple([numbers[number] for number in range(start, stop)]) if inside else None


def _no_such(single: _Single, shape: Shape, frame: Frame) -> Diagnostic:
    """The diagnostic of an operation on a micro-batch or a stage that its pipe lacks; ``frame`` has the variables."""
    scope, subject = shape.scope.with_variables(*shape.names), single.subject
    instance, micros = shape.instance(*zip(shape.names, frame, strict=True)), single.shape.micro_range
    formulas = (subject.micro.start, subject.micro.stop) if isinstance(subject.micro, ast.Range) else (subject.micro,)
    numbers = [compiled(formula, scope)(frame) for formula in formulas]
    values = tuple({pair: None for formula in formulas for pair in scope.values_in(formula, frame)})
    # The micro-batches are ``first`` to ``last``; of an expression instead of a range, only one.
    first, last = numbers[0], numbers[-1] - (len(numbers) - 1)
    if last < first:
        return groups.EmptyGroup(subject.micro.span, values, instance, *numbers)
    if first not in micros or last not in micros:
        micro = first if first not in micros else micros.stop
        return say.NoSuchMicro(subject.micro.span, values, instance, micro, micros.start, micros.stop - 1)
    if subject.slice is not None:
        values, place = scope.values_in(subject.slice, frame), compiled(subject.slice, scope)(frame)
        if not 0 <= place < single.shape.slices:
            return slices.NoSuchSlice(subject.slice.span, values, instance, place, single.shape.slices - 1)
    values, stage = scope.values_in(subject.stage, frame), compiled(subject.stage, scope)(frame)
    return say.NoSuchStage(subject.stage.span, values, instance, stage, single.shape.stage_range.stop - 1)
