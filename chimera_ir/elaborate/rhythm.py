"""Finds the rhythm of an endless pipe, that is its clocks per micro-batch and when it repeats, from laws of formulas.

A pipe has a rhythm if the clocks of all its operations grow at the same rate, so that its lanes stay together:

    F(m, s) @ 3*m + s            rate 3 clocks per micro-batch, for every operation
    B(m, s) @ 3*m + m%2 + 4      the law of this clock repeats after 2 micro-batches: period 2, which is 6 clocks
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import chain
from math import ceil, lcm

from chimera_ir.diagnostics.catalogue import endless
from chimera_ir.diagnostics.model import Attempts, Diagnostic, reject
from chimera_ir.elaborate.affine import ALWAYS, Law, eventual_law, law, limited
from chimera_ir.elaborate.evaluate import LIMIT, Fault
from chimera_ir.elaborate.pipes import Shape
from chimera_ir.ir.levels import MAX_AGE
from chimera_ir.source import Span
from chimera_ir.syntax import ast
from chimera_ir.syntax.formatter import show_expression


@dataclass(frozen=True, slots=True)
class _Beat:
    """An operation line on one stage, with laws in m: of its clock, if any, and of its guard (after ``when``).

    ``period`` is a number of micro-batches after which all formulas of the line repeat. ``span`` is the place in the
    text of the clock or preference, or of the whole line.
    """

    span: Span
    stage: int
    clock: Law | None
    guard: Law
    period: int


@dataclass(frozen=True, slots=True)
class Rhythm:
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
    number = Law((-shape.micro_range.start,), 1)  # without ``as`` the numbers count from the start of the pipe
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
        shape.steps.step,
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
    """The law of the weights of micro-batches; raises ``Fault`` unless they repeat."""
    weight = law(formula, shape.scope, shape.micros.variable.text, most)
    if weight.increment:
        raise Fault(partial(endless.WeightDrifts, formula.span, (), rate=str(weight.rate)))
    return weight


def _recomputed_by_turns(shape: Shape, stages: Sequence[int], most: int) -> Iterator[Law]:
    """Yields for each stage the law of the condition of the line ``recompute``; nothing if there is no condition."""
    guard = None if shape.recompute is None else shape.recompute.guard
    for stage in stages if guard is not None else ():
        assert guard is not None
        with shape.rejecting((shape.names[1], stage)):
            yield law(guard, shape.scope.with_value(shape.names[1], stage), shape.names[0], most)


def _beats(line: ast.Operation, shape: Shape, stages: Sequence[int], most: int) -> Iterator[_Beat]:
    """Yields a beat of a line for each stage on which it has operations; raises ``Rejected`` at its first failure."""
    micro_variable, stage_variable = shape.names
    for stage in stages:
        scope = shape.scope.with_value(stage_variable, stage)
        laws = partial(law, scope=scope, variable=micro_variable, most=most)
        with shape.rejecting((stage_variable, stage)):
            guard = ALWAYS if line.guard is None else laws(line.guard)
            if any(guard.values):
                (subject,) = line.subjects  # a stream has no pairs: see `clauses`
                places, formula = _places(subject, shape, guard, laws, most), line.clock or line.preference
                order = ALWAYS if formula is None else laws(formula)
                clock = None if line.clock is None else order
                yield _Beat((formula or line).span, stage, clock, guard, lcm(places, order.period, guard.period))


def _places(subject: ast.Subject, shape: Shape, guard: Law, laws: Callable[[ast.Expression], Law], most: int) -> int:
    """Returns a number of micro-batches after which the stage, the slice and the micro-batches of ``subject`` repeat.

    ``subject`` is the operation that a line names; ``laws`` gives the law of a formula. Raises ``Fault`` if the stage
    or slice grows without end. Raises ``Fault``, too, if the operation is on other micro-batches than those for which
    its variable stands, m .. m + step - 1, at an m for which ``guard`` holds.
    """
    place, part = laws(subject.stage), ALWAYS if subject.slice is None else laws(subject.slice)
    if place.increment:
        raise Fault(partial(endless.StageDrifts, subject.stage.span, (), rate=str(place.rate)))
    if part.increment and subject.slice is not None:
        raise Fault(partial(endless.SliceDrifts, subject.slice.span, (), rate=str(part.rate)))
    variable, step = shape.micros.variable.text, shape.steps.step
    if isinstance(subject.micro, ast.Range):
        ends = [laws(subject.micro.start), laws(subject.micro.stop)]
        text = f"{show_expression(subject.micro.start)}..{show_expression(subject.micro.stop)}"
    else:
        ends, text = [laws(subject.micro)], show_expression(subject.micro)
    for number, end in enumerate(ends):
        period = limited(lcm(step, end.period, guard.period), most, subject.micro.span)
        guarded = (m for m in shape.lengthened(period).steps if guard.at(m))
        if end.rate != 1 or not all(number <= end.at(m) - m < step + number for m in guarded):
            raise Fault(partial(endless.MicroStrays, subject.micro.span, (), micro=text, variable=variable, step=step))
    return lcm(place.period, part.period, *(end.period for end in ends))


def _versions(shape: Shape, stages: Sequence[int], most: int) -> Iterator[Law]:
    """Yields for each stage the law of the version that micro-batches read; raises ``Rejected`` at a failure."""
    assert shape.reads is not None, "a pipe without end reads versions, see `clauses`"
    micro_variable, stage_variable = shape.names
    for stage in stages:
        scope = shape.scope.with_value(stage_variable, stage)
        with shape.rejecting((stage_variable, stage)):
            version = eventual_law(shape.reads.version, scope, micro_variable, most)
            age = ceil((version.since - shape.micro_range.start) * version.rate)
            if age > MAX_AGE:
                count = min(age, LIMIT)
                raise Fault(partial(endless.VersionsTooOld, shape.reads.version.span, (), count=count, most=MAX_AGE))
            yield version


def _drifts(beats: Sequence[_Beat], shape: Shape) -> Iterator[Diagnostic]:
    """Yields a mistake for each clock that grows at another rate than the first clock.

    At a clock that does not grow, yields a mistake for this one and stops.
    """
    variable = shape.stages.variable.text
    clocked = [(beat, beat.clock.rate) for beat in beats if beat.clock]
    for beat, rate in clocked:
        span, (other, other_rate) = beat.span, clocked[0]
        instance = shape.instance((variable, beat.stage))
        if rate <= 0:
            yield endless.ClockStands(span, (), instance, str(rate))
            return
        if rate != other_rate:
            first = other.stage, str(other_rate), other.span
            yield endless.LanesDrift(span, (), instance, beat.stage, str(rate), *first)
