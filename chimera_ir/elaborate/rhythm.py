"""The rhythm of an endless pipe: when it repeats, by the laws of its formulas.

A pipe has a rhythm if the clocks of all its operations grow at the same rate, so that its lanes stay together:

    F(m, s) @ 3*m + s            rate 3 clocks per micro-batch, for every operation
    B(m, s) @ 3*m + m%2 + 4      the law of this clock repeats after 2 micro-batches: period 2, which is 6 clocks
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import ceil, lcm

from chimera_ir.diagnostics.catalogue import endless as say
from chimera_ir.diagnostics.model import Diagnostic, Rejected
from chimera_ir.elaborate.affine import ALWAYS, Law, eventual_law, law, limited
from chimera_ir.elaborate.evaluate import LIMIT, Fault
from chimera_ir.elaborate.pipes import Shape
from chimera_ir.ir.levels import MAX_AGE
from chimera_ir.syntax import ast
from chimera_ir.syntax.formatter import show_expression


@dataclass(frozen=True, slots=True)
class _Beat:
    """An operation line on one stage: the laws of its clock and guard, and a common period of all its formulas."""

    line: ast.Operation
    stage: int
    clock: Law
    guard: Law
    period: int


@dataclass(frozen=True, slots=True)
class Rhythm:
    """The rate of a pipe, the period after which it repeats, and the laws of its numbers and versions.

    Attributes
    ----------
    rate
        Clocks per micro-batch, the same for every operation, above 0.
    period
        Micro-batches after which everything repeats, ``rate * period`` clocks later; a multiple of the step.
    first, last
        The first and the last clock of an operation on the first ``period`` micro-batches.
    number
        The law of the global numbers.
    versions
        For each of the stages, the law of the version that micro-batches read in the long run.
    """

    rate: Fraction
    period: int
    first: int
    last: int
    number: Law
    versions: tuple[Law, ...]


def rhythm_of(shape: Shape, stages: Sequence[int], most: int) -> Rhythm:
    """The rhythm of a pipe on some of its stages, with periods of at most ``most`` micro-batches.

    Raises `Rejected` with all reasons why there is none.
    """
    # The laws of all formulas. Rates are compared only if there are no other failures.
    failed: list[Diagnostic] = []
    beats = [beat for line in shape.operations for beat in _beats(line, shape, stages, most, failed)]
    number = _number(shape, most, failed)
    versions = _versions(shape, stages, most, failed)
    failed = failed or [*_drifts(beats, shape)]
    if failed or number is None:
        raise Rejected(failed)
    laws = (number, *versions)
    # The period of the pipe is the shortest one that all laws share.
    try:
        shared = lcm(shape.steps.step, *(part.period for part in laws), *(part.period for part in beats))
        period = limited(shared, most, shape.micros.span)
    except Fault as fault:
        raise Rejected([fault.diagnostic(shape.instance())]) from None
    clocks = list(_clocks(beats, shape.lengthened(period).steps)) or [0]
    rate = beats[0].clock.rate if beats else Fraction(1)
    return Rhythm(rate, period, min(clocks), max(clocks), number, versions)


def _beats(
    line: ast.Operation, shape: Shape, stages: Sequence[int], most: int, failed: list[Diagnostic]
) -> Iterator[_Beat]:
    """The beats of a line on the stages on which it has operations, up to its first failure."""
    variable = shape.stages.variable.text
    for stage in stages:
        scope = shape.scope.with_value(variable, stage)
        laws = partial(law, scope=scope, variable=shape.micros.variable.text, most=most)
        try:
            guard = ALWAYS if line.guard is None else laws(line.guard)
            if any(guard.values):
                (subject,) = line.subjects  # a stream has no pairs: see clauses.check_updates
                places, clock = _places(subject, shape, guard, laws, most), laws(line.clock)
                yield _Beat(line, stage, clock, guard, lcm(places, clock.period, guard.period))
        except Fault as fault:
            failed.append(fault.diagnostic(shape.instance((variable, stage))))
            return


def _places(subject: ast.Subject, shape: Shape, guard: Law, laws: Callable[[ast.Expression], Law], most: int) -> int:
    """The common period of the stage and the micro-batch in an operation line.

    The stage has to repeat, and the micro-batch has to stay within a step of the micro-batch variable.
    """
    place = laws(subject.stage)
    if place.increment:
        raise Fault(partial(say.StageDrifts, subject.stage.span, (), rate=str(place.rate)))
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
            raise Fault(partial(say.MicroStrays, subject.micro.span, (), micro=text, variable=variable, step=step))
    return lcm(place.period, *(end.period for end in ends))


def _number(shape: Shape, most: int, failed: list[Diagnostic]) -> Law | None:
    """The law of the global numbers; without ``as`` they count from the start of the pipe."""
    if shape.micros.number is None:
        return Law((-shape.micro_range.start,), 1)
    try:
        return law(shape.micros.number, shape.scope, shape.micros.variable.text, most)
    except Fault as fault:
        failed.append(fault.diagnostic(shape.instance()))
        return None


def _versions(shape: Shape, stages: Sequence[int], most: int, failed: list[Diagnostic]) -> tuple[Law, ...]:
    """The laws of the versions, stage by stage, up to the first failure."""
    assert shape.reads is not None, "a pipe without end reads versions, see clauses.check_updates"
    variable, versions = shape.stages.variable.text, []
    for stage in stages:
        scope = shape.scope.with_value(variable, stage)
        try:
            version = eventual_law(shape.reads.version, scope, shape.micros.variable.text, most)
            age = ceil((version.since - shape.micro_range.start) * version.rate)
            if age > MAX_AGE:
                count = min(age, LIMIT)
                raise Fault(partial(say.VersionsTooOld, shape.reads.version.span, (), count=count, most=MAX_AGE))
            versions.append(version)
        except Fault as fault:
            failed.append(fault.diagnostic(shape.instance((variable, stage))))
            break
    return tuple(versions)


def _drifts(beats: Sequence[_Beat], shape: Shape) -> Iterator[Diagnostic]:
    """Yields a mistake for the first clock that does not grow, or for each line at another rate than the first line."""
    variable, drifting = shape.stages.variable.text, set()
    for beat in beats:
        span, rate = beat.line.clock.span, beat.clock.rate
        instance = shape.instance((variable, beat.stage))
        if rate <= 0:
            yield say.ClockStands(span, (), instance, str(rate))
            return
        if rate != beats[0].clock.rate and span not in drifting:
            drifting.add(span)
            first = beats[0].stage, str(beats[0].clock.rate), beats[0].line.clock.span
            yield say.LanesDrift(span, (), instance, beat.stage, str(rate), *first)


def _clocks(beats: Sequence[_Beat], steps: range) -> Iterator[int]:
    for beat in beats:
        yield from (beat.clock.at(m) for m in steps if beat.guard.at(m))
