"""Asynchronous schemes: the period after which they repeat, and a finite part that shows the whole steady state.

Every pipe advances at a constant pace, so there is a *turn*: the shortest time, in clocks, in which each pipe advances
by a whole number of its periods and all pipes together by a whole number of updates. After a turn every lane repeats.
The finite part that is elaborated is some turns from the first micro-batch on, warm-up and drain included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

from chimera_ir.diagnostics.catalogue import endless as say
from chimera_ir.diagnostics.catalogue.values import Instance
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.elaborate.evaluate import LIMIT
from chimera_ir.elaborate.numbers import numbers
from chimera_ir.elaborate.paces import Pace, pace
from chimera_ir.elaborate.pipes import Shape, reject
from chimera_ir.elaborate.versions import check_versions
from chimera_ir.ir.streams import MARGIN

FEW = 1_000
"""Most formulas, counted once per stage, that are derived before the size of the scheme is estimated."""

LEAST_TURNS = 2 * MARGIN + 1
"""Fewest turns that are elaborated."""


@dataclass(frozen=True, slots=True)
class Part:
    """The pipes, each as long as it is elaborated, with the ``updates`` and the ``period`` of the header."""

    shapes: tuple[Shape, ...]
    updates: int = 1
    period: int = 0


@dataclass(frozen=True, slots=True)
class _Turn:
    """Clocks, micro-batches of each pipe, and updates of one turn."""

    clocks: int
    micros: tuple[int, ...]
    updates: int

    @property
    def period(self) -> int:
        """Micro-batches of all pipes together."""
        return sum(self.micros)


def unrolled(shapes: Sequence[Shape], per_update: int, limit: int) -> Part:
    """The finite part of an asynchronous scheme from which all of it follows.

    Parameters
    ----------
    found
        Pipes without end.
    per_update
        K, the micro-batches of an update.
    limit
        How many operations there may be.

    Raises
    ------
    Rejected
        If a formula is not quasi-affine; clocks, numbers, versions and updates do not keep pace with each other; the
        numbers are not 0, 1, 2, .., each once; or the part would have more operations than the limit.
    """
    reject(_unnumbered(shapes))
    stages = shapes[0].stage_range
    if len(stages) * sum(1 + len(shape.operations) for shape in shapes) > FEW:
        step = _Turn(1, tuple(shape.steps.step for shape in shapes), 1)
        reject(_too_many(shapes, step, LEAST_TURNS, limit, max(step.period, per_update)))
        _measured(shapes, sorted({stages[0], stages[-1]}), per_update, limit)
    paces, turn, turns = _measured(shapes, stages, per_update, limit)
    reject([*_numbers_drift(shapes, paces, turn), *_versions_drift(shapes, paces, turn)])
    failed: list[Diagnostic] = []
    numbers([shape.lengthened(count) for shape, count in zip(shapes, turn.micros, strict=True)], failed)
    for shape, measured in zip(shapes, paces, strict=True):
        failed += check_versions(shape, measured.versions)
    reject(failed)
    lengthened = tuple(shape.lengthened(turns * count) for shape, count in zip(shapes, turn.micros, strict=True))
    return Part(lengthened, turns * turn.updates, turn.period)


def _measured(
    shapes: Sequence[Shape], stages: Sequence[int], per_update: int, limit: int
) -> tuple[list[Pace], _Turn, int]:
    """The paces on some of the stages, and the turn and the number of turns of a scheme with only these stages.

    More stages only make turns longer: what is too large, or has no pace, on some stages is rejected at once.

    Raises
    ------
    Rejected
        If there is no pace, or too much to elaborate.
    """
    paces = _paces(shapes, stages, limit)
    turn = _turn(paces, per_update)
    turns = _turns(shapes, paces, turn)
    reject(_too_many(shapes, turn, turns, limit, turn.period))
    return paces, turn, turns


def _unnumbered(shapes: Sequence[Shape]) -> list[Diagnostic]:
    """Pipes without numbers in a scheme of several pipes."""
    if len(shapes) == 1:
        return []
    silent = [shape for shape in shapes if shape.micros.number is None]
    return [say.NumbersNeeded(shape.micros.span, (), shape.instance(), len(shapes)) for shape in silent]


def _paces(shapes: Sequence[Shape], stages: Sequence[int], limit: int) -> list[Pace]:
    """The paces of all pipes on some of their stages; periods are bounded by the limit on operations."""
    failed: list[Diagnostic] = []
    most = limit // (LEAST_TURNS * len(shapes[0].stage_range))
    paces = [pace(shape, stages, max(1, most // _density(shape)), failed) for shape in shapes]
    reject(failed)
    return [measured for measured in paces if measured is not None]


def _density(shape: Shape) -> int:
    """Operations per micro-batch and stage, rounded down; at least 1, as a micro-batch counts like an operation."""
    return max(1, len(shape.operations) // shape.steps.step)


def _turn(paces: Sequence[Pace], per_update: int) -> _Turn:
    """The turn of pipes with these paces."""
    clocks = lcm(*(int(measured.rate * measured.period) for measured in paces))
    micros = [int(clocks / measured.rate) for measured in paces]
    times = per_update // gcd(sum(micros), per_update)
    return _Turn(times * clocks, tuple(times * count for count in micros), times * sum(micros) // per_update)


def _numbers_drift(shapes: Sequence[Shape], paces: Sequence[Pace], turn: _Turn) -> list[Diagnostic]:
    """Pipes whose numbers grow in a turn by another count than the micro-batches of a turn."""
    failed: list[Diagnostic] = []
    for shape, measured, mine in zip(shapes, paces, turn.micros, strict=True):
        expected, text = Fraction(turn.period, mine), shape.micros.number or shape.micros.range
        if measured.number.rate != expected:
            rates, counts = (str(measured.number.rate), str(expected)), (expected.denominator, expected.numerator)
            failed.append(say.NumbersDrift(text.span, (), shape.instance(), *rates, *counts))
    return failed


def _versions_drift(shapes: Sequence[Shape], paces: Sequence[Pace], turn: _Turn) -> list[Diagnostic]:
    """For each pipe the first stage whose versions grow in a turn by another count than the updates of a turn."""
    failed: list[Diagnostic] = []
    for shape, measured, mine in zip(shapes, paces, turn.micros, strict=True):
        expected = Fraction(turn.updates, mine)
        stage = next((s for s, law in enumerate(measured.versions) if law.rate != expected), None)
        if stage is not None and shape.reads is not None:
            instance = shape.instance((shape.stages.variable.text, stage))
            rates = str(measured.versions[stage].rate), str(expected)
            failed.append(say.VersionsDrift(shape.reads.version.span, (), instance, stage, *rates))
    return failed


def _turns(shapes: Sequence[Shape], paces: Sequence[Pace], turn: _Turn) -> int:
    """The number of turns for which the turn in the middle is one of the steady state.

    Operations that run at the same time belong to micro-batches up to ``spread`` turns apart. All of these must be
    elaborated, and must read versions as the laws say, which hold after ``settled`` turns.
    """
    ends = (
        measured.last + measured.rate * (mine - measured.period)
        for measured, mine in zip(paces, turn.micros, strict=True)
    )
    spread = int(max(ends) - min(measured.first for measured in paces)) // turn.clocks
    settled = max(
        -(-(law.since - shape.micro_range.start) // mine)
        for shape, measured, mine in zip(shapes, paces, turn.micros, strict=True)
        for law in measured.versions
    )
    return 2 * (spread + max(MARGIN, settled)) + 1


def _too_many(shapes: Sequence[Shape], turn: _Turn, turns: int, limit: int, period: int) -> list[Diagnostic]:
    """The diagnostic of a scheme with more operations, or pairs of micro-batches and stages, than the limit.

    All are counted, not enumerated. ``turn``, ``turns`` and ``period`` may be lower bounds, from some stages only.
    """
    stages = len(shapes[0].stage_range)
    lines = sum(
        count // shape.steps.step * len(shape.operations) for shape, count in zip(shapes, turn.micros, strict=True)
    )
    count = turns * stages * max(lines, period)
    if count <= limit:
        return []
    shown = min(count, LIMIT), limit, stages, min(period, LIMIT)
    return [say.TooManyInTurns(shapes[0].micros.range.span, (), Instance(), *shown)]
