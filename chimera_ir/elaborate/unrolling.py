"""Finds the turn after which a scheme without a flush repeats, and how many turns show the whole steady state.

Each pipe advances at a constant rate, its rhythm. So there is a *turn*: the shortest time, in clocks, in which each
pipe advances by a whole number of its periods and all pipes together by a whole number of updates. After a turn, lanes
repeat. For example, 1F1B without a flush on D stages, where each micro-batch is an update:

    F(m, s) @ 2*m + s                   rhythm: 2 clocks per micro-batch, period 1
    B(m, s) @ 2*m + 2*D-1 - s           turn: 2 clocks, 1 micro-batch, 1 update
    reads version max(0, m - (D-1 - s))

One turn is elaborated. A plan, timeline or picture shows several turns, from the first micro-batch on, with warm-up and
drain; the turn in the middle is one of the steady state.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import NamedTuple

from chimera_ir.diagnostics.catalogue import values as say
from chimera_ir.diagnostics.catalogue.values import Instance
from chimera_ir.diagnostics.model import Diagnostic, made_of, reject
from chimera_ir.elaborate.evaluate import LIMIT
from chimera_ir.elaborate.operations import Rhythm, check_versions, rhythm_of
from chimera_ir.elaborate.pipes import Shape
from chimera_ir.ir.streams import LONGEST_TURN, MARGIN

FEW = 1_000
"""The most formulas, one per line and stage, whose laws are derived before the size of the scheme is estimated."""

LEAST_TURNS = 2 * MARGIN + 1
"""The fewest turns that are shown."""


class TurnSize(NamedTuple):
    """The length of a turn: how many clocks it takes, how many micro-batches of each pipe, and how many updates."""

    clocks: int
    micros: tuple[int, ...]
    updates: int

    @property
    def period(self) -> int:
        """The number of micro-batches of a turn in all pipes together."""
        return sum(self.micros)


class EndlessPipes(NamedTuple):
    """Pipes without end: their rhythms, their turn, and how many turns show the whole steady state."""

    rhythms: Sequence[Rhythm]
    turn: TurnSize
    turns: int


def endless(shapes: Sequence[Shape], per_update: int, limit: int) -> EndlessPipes:
    """Finds the rhythms and the turn of pipes without end; ``per_update`` micro-batches make an update.

    Raises `Rejected` in three cases: a formula is not quasi-affine (see `affine`); clocks, numbers, versions and
    updates grow at rates that do not fit together; the turns to show have more operations than ``limit``.
    """
    unnumbered = [shape for shape in shapes if shape.micros.number is None] if len(shapes) > 1 else []
    reject(say.NumbersNeeded(shape.micros.span, (), shape.instance(), len(shapes)) for shape in unnumbered)
    stages = shapes[0].stage_range
    # A scheme that is much too large is found out from two of its stages, before thousands of formulas are derived.
    if len(stages) * sum(1 + len(shape.operations) for shape in shapes) > FEW:
        step = TurnSize(1, tuple(shape.step for shape in shapes), 1)
        reject(_too_many(shapes, step, LEAST_TURNS, limit, max(step.period, per_update)))
        _measured(shapes, sorted({stages[0], stages[-1]}), per_update, limit)
    # All formulas grow by what a turn advances.
    pipes = _measured(shapes, stages, per_update, limit)
    rhythms, turn = pipes.rhythms, pipes.turn
    reject([*_numbers_drift(shapes, rhythms, turn), *_versions_drift(shapes, rhythms, turn)])
    # Versions follow their laws from the start.
    made_of(zip(shapes, rhythms, strict=True), lambda pipe: check_versions(pipe[0], pipe[1].versions))
    return pipes


def _measured(shapes: Sequence[Shape], stages: Sequence[int], per_update: int, limit: int) -> EndlessPipes:
    """The rhythms of the pipes on ``stages`` only, and the turn that follows from these.

    On more stages a turn can only be longer: a scheme that fails on some stages fails on all.
    """

    def rhythm(shape: Shape) -> Rhythm:
        # The limit on operations bounds the period. A micro-batch counts as one operation if it has fewer on a stage.
        by_micro = max(1, len(shape.operations) * shape.slices // shape.step)
        return rhythm_of(shape, stages, max(1, limit // (LEAST_TURNS * len(shapes[0].stage_range)) // by_micro))

    rhythms = made_of(shapes, rhythm)
    turn = _turn(rhythms, per_update)
    turns = _turns(shapes, rhythms, turn)
    reject(_too_many(shapes, turn, turns, limit, turn.period))
    return EndlessPipes(rhythms, turn, turns)


def _turn(rhythms: Sequence[Rhythm], per_update: int) -> TurnSize:
    clocks = lcm(*(int(rhythm.rate * rhythm.period) for rhythm in rhythms))
    micros = [int(clocks / rhythm.rate) for rhythm in rhythms]
    times = per_update // gcd(sum(micros), per_update)
    return TurnSize(times * clocks, tuple(times * count for count in micros), times * sum(micros) // per_update)


def _numbers_drift(shapes: Sequence[Shape], rhythms: Sequence[Rhythm], turn: TurnSize) -> Iterator[Diagnostic]:
    """In a turn the numbers after ``as`` must grow by the number of micro-batches of all pipes together."""
    for shape, rhythm, count in zip(shapes, rhythms, turn.micros, strict=True):
        expected, text = Fraction(turn.period, count), shape.micros.number or shape.micros.range
        if rhythm.number.rate != expected:
            rates, counts = (str(rhythm.number.rate), str(expected)), (expected.denominator, expected.numerator)
            yield say.NumbersDrift(text.span, (), shape.instance(), *rates, *counts)


def _versions_drift(shapes: Sequence[Shape], rhythms: Sequence[Rhythm], turn: TurnSize) -> Iterator[Diagnostic]:
    """In a turn versions must grow by the number of updates of a turn."""
    for shape, rhythm, count in zip(shapes, rhythms, turn.micros, strict=True):
        expected = Fraction(turn.updates, count)
        stage = next((s for s, law in enumerate(rhythm.versions) if law.rate != expected), None)
        if stage is not None and shape.reads is not None:
            instance = shape.instance((shape.stages.variable.text, stage))
            rates = str(rhythm.versions[stage].rate), str(expected)
            yield say.VersionsDrift(shape.reads.version.span, (), instance, stage, *rates)


def _turns(shapes: Sequence[Shape], rhythms: Sequence[Rhythm], turn: TurnSize) -> int:
    """Returns how many turns to show, so that the turn in the middle is one of the steady state.

    Operations that run at the same time are up to ``spread`` turns apart; the laws of versions hold after ``settled``.
    """
    ends = (
        rhythm.last + rhythm.rate * (count - rhythm.period) for rhythm, count in zip(rhythms, turn.micros, strict=True)
    )
    spread = int(max(ends) - min(rhythm.first for rhythm in rhythms)) // turn.clocks
    settled = max(
        -(-(law.since - shape.start) // count)
        for shape, rhythm, count in zip(shapes, rhythms, turn.micros, strict=True)
        for law in rhythm.versions
    )
    # The order of operations without clocks is found in what is shown: its turns may be longer, and begin later.
    unclocked = any(line.clock is None for shape in shapes for line in shape.operations)
    turns_of_lists = 3 * LONGEST_TURN + 2 * len(shapes[0].stage_range) if unclocked else 0
    return 2 * (spread + max(MARGIN, settled)) + 1 + turns_of_lists


def _too_many(shapes: Sequence[Shape], turn: TurnSize, turns: int, limit: int, period: int) -> list[Diagnostic]:
    """A diagnostic if more than ``limit`` operations, or micro-batches of a turn, would be shown: a lower bound."""
    stages = len(shapes[0].stage_range)
    longest = max(turn.micros)
    lines = sum(shape.work(count, longest) for shape, count in zip(shapes, turn.micros, strict=True))
    count = turns * stages * max(lines, period * shapes[0].slices)
    if count <= limit:
        return []
    shown = min(count, LIMIT), limit, stages, min(period, LIMIT)
    return [say.TooManyInTurns(shapes[0].micros.range.span, (), Instance(), *shown)]
