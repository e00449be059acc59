"""What decides how long an update takes: the critical path of a synchronous schedule, the critical cycle of another."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from chimera_ir.cost.cycles import NO_CYCLE, critical
from chimera_ir.cost.precedence import Precedence
from chimera_ir.cost.turn import Turn
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Backward, Compute, Forward
from chimera_ir.ir.turns import updates_a_turn


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Operations that follow one another without a gap, each needing the one before.

    From time 0 to the end; or, in an asynchronous schedule, from the steady state's one turn into another, over and
    over. ``length`` is that of one update, in ticks; ``forwards`` and ``backwards`` are C_f and C_b of section 3.4,
    counted in micro-batches per update.
    """

    operations: tuple[Compute, ...]
    length: Fraction
    forwards: Fraction
    backwards: Fraction


def critical_path(
    header: Header, precedence: Precedence, durations: Sequence[int], turn: Turn | None
) -> tuple[CriticalPath, list[int]]:
    """Of the critical paths one with the most backward passes: durations are positive, so that also fixes the others.

    And when each operation ends if it starts as early as it may. ``turn`` is that of an asynchronous schedule.

    Raises
    ------
    ValueError
        If an asynchronous schedule shows no turn of its steady state: it was not verified.
    """
    if not precedence.operations:
        return CriticalPath((), Fraction(0), Fraction(0), Fraction(0)), []
    if turn is not None:
        return _cycle(header, precedence, durations, turn), earliest_ends(precedence, durations)
    return _path(header, precedence, durations)


def update_length(header: Header, precedence: Precedence, durations: Sequence[int], turn: Turn | None) -> Fraction:
    """The length of `critical_path`, sooner."""
    if turn is None:
        return Fraction(max(earliest_ends(precedence, durations), default=0))
    return critical(turn.waits, [durations[number] for number in turn.numbers]).cycle.ratio / updates_a_turn(header)


def earliest_ends(precedence: Precedence, durations: Sequence[int]) -> list[int]:
    """When each operation ends if each starts with the end of its last predecessor, the first ones at 0."""
    ends = [0] * len(durations)
    predecessors = precedence.predecessors
    for number in precedence.order:
        start = 0
        for before in predecessors[number]:
            if ends[before] > start:
                start = ends[before]
        ends[number] = start + durations[number]
    return ends


def _path(header: Header, precedence: Precedence, durations: Sequence[int]) -> tuple[CriticalPath, list[int]]:
    """Times and backwards as one number, so that of two paths as long the one with more backwards is longer."""
    backwards = [_backwards(operation) for operation in precedence.operations]
    unit = 1 + sum(backwards)
    lengths = [duration * unit + more for duration, more in zip(durations, backwards, strict=True)]
    ends = earliest_ends(precedence, lengths)
    number = max(range(len(ends)), key=ends.__getitem__)
    path = [number]
    while (start := ends[number] - lengths[number]) > 0:
        number = next(before for before in precedence.predecessors[number] if ends[before] == start)
        path.append(number)
    times = [end // unit for end in ends]
    return _told(header, precedence, reversed(path), Fraction(max(times)), 1), times


def _cycle(header: Header, precedence: Precedence, durations: Sequence[int], turn: Turn) -> CriticalPath:
    found = critical(turn.waits, [durations[number] for number in turn.numbers])
    if found.cycle == NO_CYCLE:
        raise ValueError("the schedule is too short to show a steady state; only a verified schedule has one")
    most = critical(found.tight, [_backwards(precedence.operations[number]) for number in turn.numbers]).cycle
    cycle = found.cycle if most == NO_CYCLE else most
    path = [turn.numbers[node] for node in cycle.nodes]
    updates = updates_a_turn(header)
    return _told(header, precedence, path, found.cycle.ratio / updates, cycle.turns * updates)


def _told(header: Header, precedence: Precedence, path: Iterable[int], length: Fraction, updates: int) -> CriticalPath:
    """A path that spans so many updates; a micro-batch of its operations is one of the header's ``parts``."""
    operations = tuple(precedence.operations[number] for number in path)
    whole = header.parts * updates
    forwards = sum(len(each.micros) for each in operations if isinstance(each, Forward))
    backwards = sum(map(_backwards, operations))
    return CriticalPath(operations, length, Fraction(forwards, whole), Fraction(backwards, whole))


def _backwards(operation: Compute) -> int:
    return len(operation.micros) if isinstance(operation, Backward) else 0
