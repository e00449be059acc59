"""Turns: what a worker does over and over in a scheme without a flush.

A turn takes ``period`` micro-batches. Its instructions count micro-batches from the first one of the turn, and versions
of the weights from the one that the updates before the turn have made; earlier ones are negative. From each turn to the
next, micro-batches move on by ``period``, and versions by the updates of a turn. The receives over an edge between
stages take the slots of this edge (its shelf) one after another, in a circle. A lane for a number of updates has the
instructions about their micro-batches and versions, no others. So warm-up and drain are turns with some instructions
left out:

    a turn of worker 1:                    two updates:
      step s1 v                              recv m0 s0->s1 from w0 into 0   (of turn -1)
      F m s1 v                               F m0 s1 v0                      (turn 0, without its step to version 0)
      recv m+1 s0->s1 from w0 into 1 of 2    recv m1 s0->s1 from w0 into 1
      B m s1 v                               B m0 s1 v0
                                             step s1 v1                      (turn 1, without its receive of m2)
                                             F m1 s1 v1
                                             B m1 s1 v1
                                             step s1 v2                      (of turn 2)
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple, assert_never

from chimera_ir.ir import ops
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Micro, Slot, Version, WeightGroup

Shelf = ops.Crossing
"""A shelf: all slots of a worker for the messages over one edge. It is named by the edge: two stages and a value."""


class Ring(NamedTuple):
    """A ring of receive slots of a worker, ``first`` .. ``first + slots - 1``, which receives take in a circle.

    In each pass of a loop's body, such as a turn, a receive takes the slot ``step`` further on.
    """

    step: int
    slots: int
    first: int = 0

    def later(self, slot: Slot, number: int) -> Slot:
        """The slot of a receive when it comes again for the ``number``-th time; now it has ``slot``."""
        return Slot(self.first + (slot - self.first + number * self.step) % self.slots)


class Extent(NamedTuple):
    """The lowest and highest micro-batch of an instruction or, with ``of_updates``, its update, twice."""

    first: int
    last: int
    of_updates: bool


class Initial(NamedTuple):
    """Two versions of a weight group, 0 or less, whose stash and drop lines also serve for its initial weights.

    The first micro-batches read version 0 where later turns read versions below 0. Where one of those is kept longer
    than version 0 is in the steady state, a lane stashes the initial weights where turns stash version ``stash``, and
    drops them where turns drop version ``drop``.
    """

    stash: int
    drop: int


@dataclass(frozen=True)
class Turn:
    """A worker's turn; ``slots`` has pairs of a shelf (all slots for one edge between stages) and its size."""

    instructions: tuple[ops.Instruction, ...]
    slots: tuple[tuple[Shelf, int], ...] = ()

    @cached_property
    def rings(self) -> Mapping[Shelf, Ring]:
        """The ring of each shelf, of all its slots; its step is the number of receives of a turn."""
        received = Counter(shelf(line.message) for line in self.instructions if isinstance(line, ops.Recv))
        slots = dict(self.slots)
        return {key: Ring(messages, slots[key]) for key, messages in received.items()}


_TALK = (ops.Send, ops.Recv, ops.WaitSend, ops.WaitRecv)


def extent(instruction: ops.Instruction) -> Extent:
    """Subject of an instruction; the lane of some updates has it only if all of that belongs to them."""
    if isinstance(instruction, _TALK):
        micros = instruction.message.micros
    elif isinstance(instruction, ops.Compute | ops.WaitMove):
        micros = instruction.micros
    elif isinstance(instruction, ops.Pair):
        micros = (*instruction.forward.micros, *instruction.backward.micros)
    elif isinstance(instruction, ops.Stash | ops.Drop):
        return Extent(instruction.version, instruction.version, of_updates=True)
    else:
        return Extent((instruction.version or 0) - 1, (instruction.version or 0) - 1, of_updates=True)
    first = micros[0]
    return Extent(first, first, False) if len(micros) == 1 else Extent(min(micros), max(micros), False)


def unroll(header: Header, turn: Turn, updates: int) -> Iterator[ops.Instruction]:
    """The lane of the first ``updates`` updates: all turns, without what is about others; no version is below 0."""
    return (instruction for _, instruction in by_turn(header, turn, updates))


def by_turn(header: Header, turn: Turn, updates: int) -> Iterator[tuple[int, ops.Instruction]]:
    """Yields the instructions of `unroll`, each with the number of its turn."""
    per_turn = header.per_turn
    for number, instruction in _by_turn(header, turn, updates):
        micros, versions = number * header.period, number * per_turn
        if isinstance(instruction, ops.Compute):  # most are, and this is several times as fast
            line: ops.Instruction = _computed(instruction, micros, versions)
        else:
            line = _shown(turn, shifted(instruction, micros, versions), number)
        # The origin of a line of text gets the micro-batch and version that m and v stand for, which messages name.
        of_text = instruction.origin.turn
        named = micros // header.slices, versions
        yield number, replace(line, origin=line.origin._replace(turn=named)) if of_text else line


def _by_turn(header: Header, turn: Turn, updates: int) -> Iterator[tuple[int, ops.Instruction]]:
    """As `by_turn`, but with the numbers of the turn, which count from its start."""
    per_turn, micro_batches = header.per_turn, updates * header.per_update
    initials = initial(header, turn)
    listed = [(instruction, *extent(instruction), lowest(initials, instruction)) for instruction in turn.instructions]
    for number in turns_of(header, turn, updates, initials):
        micros, versions = number * header.period, number * per_turn
        for instruction, first, last, of_updates, least in listed:
            # In the lane if all that it is about is within the updates, or belongs to the initial weights.
            offset, end = (versions, updates) if of_updates else (micros, micro_batches)
            if (first + offset > 0 or first + offset == least) and last + offset < end:
                yield number, instruction


def lines_before(header: Header, turn: Turn, number: int, updates: int) -> int:
    """The number of instructions before turn ``number`` in the lane of the first ``updates`` updates."""
    return sum(1 for _ in takewhile(lambda line: line[0] < number, _by_turn(header, turn, updates)))


def initial(header: Header, turn: Turn) -> dict[WeightGroup, Initial]:
    """Maps each group whose initial weights are kept longer than version 0 is in the steady state to its `Initial`."""
    # The steps, stashes and drops of the turn: the version of each, and its place.
    per_turn = header.per_turn
    places = {
        (type(instruction), instruction.group, instruction.version % per_turn): (instruction.version, place)
        for place, instruction in enumerate(turn.instructions)
        if isinstance(instruction, ops.Step | ops.Stash | ops.Drop) and instruction.version is not None
    }

    def at(kind: type[ops.Step | ops.Stash | ops.Drop], group: WeightGroup, version: int) -> tuple[int, int] | None:
        """The turn in which the line about a version is, and the line's place in it; None without such a line."""
        line = places.get((kind, group, version % per_turn))
        return None if line is None else ((version - line[0]) // per_turn, line[1])

    # Versions 0 or below that a micro-batch from 0 on reads after the step to version 1, with the turn and the place of
    # their drop. For these the initial weights have to be kept: from the newest such version to the last drop.
    lasts: dict[WeightGroup, dict[int, tuple[int, int]]] = {}
    for place, instruction in enumerate(turn.instructions):
        if not isinstance(instruction, ops.Compute) or instruction.version is None:
            continue
        turns_ago = range(-(-instruction.version // per_turn), min(instruction.micros) // header.period + 1)
        for group in header.groups_with[instruction.stage]:
            step = at(ops.Step, group, 1)
            for ago in turns_ago:
                version = instruction.version - ago * per_turn
                dropped = at(ops.Drop, group, version)
                if step is not None and dropped is not None and step < (-ago, place):
                    lasts.setdefault(group, {})[version] = dropped
    initials = {
        group: Initial(max(versions), max(versions, key=versions.__getitem__)) for group, versions in lasts.items()
    }
    return {group: versions for group, versions in initials.items() if versions.drop}


def lowest(initials: Mapping[WeightGroup, Initial], instruction: ops.Instruction) -> int:
    """The lowest micro-batch or update for which a lane has an instruction of the turn, 0 or less.

    Only stashes and drops have one below 0, by ``initials``: for this version, and for versions from 1 on.
    """
    if not isinstance(instruction, ops.Stash | ops.Drop) or instruction.group not in initials:
        return 0
    versions = initials[instruction.group]
    return versions.stash if isinstance(instruction, ops.Stash) else versions.drop


def turns_of(header: Header, turn: Turn, updates: int, initials: Mapping[WeightGroup, Initial]) -> range:
    """The numbers of all turns with a line in the lane of ``updates``, from the warm-up (or below 0) to the drain."""
    starts, stops = list[int](), list[int]()
    for instruction in turn.instructions:
        first, last, of_updates = extent(instruction)
        step, end = (header.per_turn, updates) if of_updates else (header.period, updates * header.per_update)
        starts.append(-((first - lowest(initials, instruction)) // step))
        stops.append(-((last - end) // step))
    start = min(starts, default=0)
    return range(start, max(start, *stops)) if stops else range(0)


def later(header: Header, instruction: ops.Instruction, turns: int) -> ops.Instruction:
    """The instruction as it stands ``turns`` turns later, with its slot unchanged."""
    return shifted(instruction, turns * header.period, turns * header.per_turn)


def turn_number(header: Header, instruction: ops.Instruction) -> int:
    """The turn to which the first micro-batch or the update of an instruction belongs."""
    if isinstance(instruction, ops.Compute):
        return min(instruction.micros) // header.period
    first, _, of_updates = extent(instruction)
    return first // (header.per_turn if of_updates else header.period)


def served_update(header: Header, instruction: ops.Instruction) -> int:
    """The update, counted from the start of the lane or turn, of an instruction or of its first micro-batch."""
    first, _, of_updates = extent(instruction)
    return first if of_updates else first // header.per_update


def in_turn(header: Header, instruction: ops.Instruction) -> tuple[ops.Instruction, int]:
    """Returns the instruction of turn 0 that an instruction repeats, and the number of the turn that it is of.

    A receive has slot 0 and an operation no version, so that all repetitions of an instruction give the same result.
    """
    turn = turn_number(header, instruction)
    if isinstance(instruction, ops.Compute):
        return ops.Compute(instruction.kind, moved(instruction.micros, -turn * header.period), instruction.stage), turn
    placed = later(header, instruction, -turn)
    return (replace(placed, slot=Slot(0)) if isinstance(placed, ops.Recv) else placed), turn


def _computed(operation: ops.Compute, micros: int, versions: int) -> ops.Compute:
    """As `shifted`, for a lane, where versions below 0 become 0."""
    read = operation.version
    version = None if read is None else Version(max(read + versions, 0))
    return ops.Compute(operation.kind, moved(operation.micros, micros), operation.stage, operation.origin, version)


def _shown(turn: Turn, instruction: ops.Instruction, number: int) -> ops.Instruction:
    """An instruction as the lane has it in turn ``number``, with its slot; versions below 0 become 0."""
    if isinstance(instruction, ops.Stash | ops.Drop) and instruction.version < 0:
        return replace(instruction, version=Version(0))
    return in_slot(turn.rings, instruction, number)


def in_slot(rings: Mapping[Shelf, Ring], instruction: ops.Instruction, number: int) -> ops.Instruction:
    """A receive with the slot that it has ``number`` turns later; any other instruction as it is."""
    if not isinstance(instruction, ops.Recv):
        return instruction
    message, source, slot, origin = instruction.message, instruction.source, instruction.slot, instruction.origin
    return ops.Recv(message, source, rings[shelf(message)].later(slot, number), origin)


def shelf(message: ops.Message) -> Shelf:
    """Returns the shelf of a message: a key for the slots of the receiver that messages over the same edge share."""
    return message[1:]


def shifted(instruction: ops.Instruction, micros: int, updates: int = 0) -> ops.Instruction:
    """An instruction with ``micros`` and ``updates`` added to its micro-batches and versions, in the same slot."""
    return renumbered(instruction, lambda numbers: moved(numbers, micros), updates)


def renumbered(
    instruction: ops.Instruction, micros: Callable[[tuple[Micro, ...]], tuple[Micro, ...]], updates: int = 0
) -> ops.Instruction:
    """An instruction on other micro-batches, in the same slot; ``updates`` are added to its version."""
    match instruction:
        case ops.Compute():
            read = None if instruction.version is None else Version(instruction.version + updates)
            return ops.Compute(
                instruction.kind, micros(instruction.micros), instruction.stage, instruction.origin, read
            )
        case ops.Pair(forward, backward, origin):
            first, second = renumbered(forward, micros, updates), renumbered(backward, micros, updates)
            assert isinstance(first, ops.Compute)
            assert isinstance(second, ops.Compute)
            return ops.Pair(first, second, origin)
        case ops.Send(message, to, origin):
            return ops.Send(ops.Message(micros(message.micros), *message.edge), to, origin)
        case ops.Recv(message, source, slot, origin):
            return ops.Recv(ops.Message(micros(message.micros), *message.edge), source, slot, origin)
        case ops.WaitSend(message, origin) | ops.WaitRecv(message, origin):
            return type(instruction)(ops.Message(micros(message.micros), *message.edge), origin)
        case ops.WaitMove(kind, numbers, stage, origin):
            return ops.WaitMove(kind, micros(numbers), stage, origin)
        case (
            ops.AllReduce(group, origin, version)
            | ops.WaitAllReduce(group, origin, version)
            | ops.Step(group, origin, version)
        ):
            return type(instruction)(group, origin, Version((version or 0) + updates))
        case ops.Stash(group, version, origin) | ops.Drop(group, version, origin):
            return type(instruction)(group, Version(version + updates), origin)
        case _:
            assert_never(instruction)


def moved(micros: tuple[Micro, ...], by: int) -> tuple[Micro, ...]:
    """Micro-batches with ``by`` added to their numbers."""
    return tuple([Micro(micro + by) for micro in micros]) if len(micros) > 1 else (Micro(micros[0] + by),)
