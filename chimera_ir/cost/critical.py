"""The operations that decide how long an update takes: a critical path or, without a flush, a critical cycle."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from chimera_ir.flow.cycles import NO_CYCLE, Waits, critical
from chimera_ir.flow.net import Net, net_of
from chimera_ir.flow.turn_net import turn_net
from chimera_ir.ir.kinds import COSTED, KEPT, Kind, Pairing
from chimera_ir.ir.levels import Header, Schedule
from chimera_ir.ir.ops import Operation
from chimera_ir.ir.streams import stream_of
from chimera_ir.ir.turns import in_turn, turn_number


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Operations that follow one another without a gap, each waiting for the operation before it.

    With a flush they go from time 0 to the end. In a stream they are a cycle: from a turn of the steady state to the
    same place in a later turn. ``length`` is the time of one update, in ticks. ``counts`` has C_f and C_b of section
    3.4: by the letter of each kind in the schedule, the number of micro-batches, per update, on which operations of
    this kind on the path work. A slice or a half counts as its part of a micro-batch, and a micro-batch of weight 2
    counts twice.
    """

    operations: tuple[Operation, ...]
    length: Fraction
    counts: Mapping[str, Fraction]


@dataclass(frozen=True)
class Structure:
    """The part of a timeline that costs and recomputation do not change.

    ``net`` has the schedule's operations, numbered, and what each waits for. ``numbers`` are the numbers of those that
    can be on a critical path: all or, without a flush, those of one turn. Without a flush, ``waits[i]`` lists what the
    operation ``numbers[i]`` waits for, as pairs: the place of another operation in ``numbers``, and how many turns
    earlier that one runs. With a flush, ``waits`` is empty.
    """

    net: Net
    numbers: Sequence[int]
    waits: Waits

    @cached_property
    def preferred(self) -> Sequence[int]:
        """A number for each operation in ``numbers``, which decides between critical paths of equal length.

        The path with the largest sum of these numbers has the most backwards; of those with as many, the most pairs; of
        these, the most input gradients; and of these, if memory moves, the most operations other than moves.
        """
        operations = [self.net.operations[number] for number in self.numbers]
        # Each preference counts more than all operations together can sum up of the next one.
        header = self.net.schedule.header
        sizes = [int(header.weight(operation) * header.weight_unit) for operation in operations]
        unit = 1 + sum(sizes)

        def weight(kind: Kind | Pairing) -> int:
            if isinstance(kind, Pairing):
                return unit
            return (unit**2 if kind.sums else 1) * (KEPT in kind.reads)

        weights = {kind: weight(kind) for kind in {operation.kind for operation in operations}}
        if header.moves:
            weights = {kind: 0 if kind.moves else unit * number + 1 for kind, number in weights.items()}
        return [weights[operation.kind] * size for operation, size in zip(operations, sizes, strict=True)]


def structure_of(schedule: Schedule, net: Net | None = None) -> Structure:
    """Builds the structure of a verified schedule; ``net`` is its graph of operations and waits, if the caller has it.

    Raises `ValueError` for a cycle, and for a stream that shows no turn of its steady state.
    """
    header, net = schedule.header, net or net_of(schedule)
    if len(net.order) < len(net.operations):
        raise ValueError("the schedule closes a cycle; only a verified schedule has a timeline")
    return Structure(net, *_turn_in(net)) if header.asynchronous else Structure(net, range(len(net.operations)), ())


def _turn_in(net: Net) -> tuple[Sequence[int], Waits]:
    """Returns ``numbers`` and ``waits`` for the `Structure` of a stream.

    The operations are those on the micro-batches of turn 0, in an order in which the stream can run them.
    """
    turn, header = turn_net(stream_of(net.schedule)), net.schedule.header
    nodes = {in_turn(header, operation)[0]: node for node, operation in enumerate(turn.operations)}
    in_turns = ((number, *in_turn(header, net.operations[number])) for number in net.order)
    first = {nodes[operation]: number for number, operation, in_which in in_turns if in_which == 0}
    # Nodes count turns from that of their lane, these waits from that of the micro-batch.
    place, turns = {node: place for place, node in enumerate(first)}, [turn_number(header, o) for o in turn.operations]
    waits = [[(place[other], ago + turns[node] - turns[other]) for other, ago in turn.waits[node]] for node in first]
    return [*first.values()], [sorted(several, key=lambda wait: wait[1] > 0) for several in waits]


def critical_path(header: Header, structure: Structure, durations: Sequence[int]) -> tuple[CriticalPath, list[int]]:
    """Returns a critical path with the most backwards (`Structure.preferred`), and the end of each operation, in ticks.

    Operation n of the net takes ``durations[n]`` ticks, and starts as soon as all operations that it waits for are
    over.

    Without split backwards and pairs the number of backwards on a critical path fixes that of forwards, because
    durations are positive. So C_f and C_b are well defined.
    """
    net = structure.net
    if not net.operations:
        return _counted(header, net, (), Fraction(0), 1), []
    if structure.waits:
        return _cycle(header, structure, durations), net.ends(durations)
    return _path(header, net, durations, structure.preferred)


def update_length(header: Header, structure: Structure, durations: Sequence[int]) -> Fraction:
    """The time of one update in ticks: the ``length`` that `critical_path` gives, without building the path."""
    if not structure.waits:
        return Fraction(max(structure.net.ends(durations), default=0))
    return critical(structure.waits, [durations[number] for number in structure.numbers]).cycle.ratio / header.per_turn


def _path(
    header: Header, net: Net, durations: Sequence[int], preferred: Sequence[int]
) -> tuple[CriticalPath, list[int]]:
    """Returns the critical path with the largest sum of ``preferred`` numbers, and the ends of all operations in ticks.

    Both ``durations`` and ``preferred`` have a number for each operation of the net. One number joins the two: the
    duration in the high digits, the preferred number in the low ones. So the longest path in joined numbers is, of all
    paths that take longest, the one with the largest sum of ``preferred``.
    """
    unit = 1 + sum(preferred)
    lengths = [duration * unit + more for duration, more in zip(durations, preferred, strict=True)]
    ends = net.ends(lengths)
    number = max(range(len(ends)), key=ends.__getitem__)
    # Back from the operation that ends last, always to an operation that ends where this one starts.
    path = [number]
    while (start := ends[number] - lengths[number]) > 0:
        number = next(before for before in net.predecessors[number] if ends[before] == start)
        path.append(number)
    times = [end // unit for end in ends]
    return _counted(header, net, reversed(path), Fraction(max(times)), 1), times


def _cycle(header: Header, structure: Structure, durations: Sequence[int]) -> CriticalPath:
    # First the cycles that take longest, then among their waits the cycle that is preferred.
    longest = critical(structure.waits, [durations[number] for number in structure.numbers])
    most = critical(longest.tight, structure.preferred).cycle
    cycle = longest.cycle if most == NO_CYCLE else most
    path = [structure.numbers[node] for node in cycle.nodes]
    updates = header.per_turn
    return _counted(header, structure.net, path, longest.cycle.ratio / updates, cycle.turns * updates)


def _counted(header: Header, net: Net, path: Iterable[int], length: Fraction, updates: int) -> CriticalPath:
    """Makes a `CriticalPath` of the operations that have the numbers ``path`` in ``net``, and counts micro-batches.

    ``length`` is the time of one update; the path spans ``updates`` updates, by which the counts are divided.
    """
    operations = tuple(net.operations[number] for number in path)
    micros: dict[str, int | Fraction] = defaultdict(int)
    for operation in operations:
        micros[operation.kind.letter] += header.weight(operation)
    present = {kind.letter for kind in {operation.kind for operation in net.operations}}
    counts = {letter: Fraction(micros[letter], header.parts * updates) for letter in COSTED if letter in present}
    return CriticalPath(operations, length, counts)
