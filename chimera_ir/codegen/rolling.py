"""Finds the stretches of a lane that repeat, so that each can be written as a loop.

A stretch repeats if every instruction is the same as the one a fixed number of lines before it, with two exceptions:
all micro-batches are later by the same number, and a receive takes the next slot of its ring, a circle of slots. The
search knows no schemes: it takes the stretch whose loop saves most lines, then searches the rest of the lane on both
sides.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, assert_never

from chimera_ir.codegen.statements import Notation, Scribe
from chimera_ir.ir import ops
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute, Instruction, Micro, Pair, Recv, Slot, WeightGroup, Worker, singles
from chimera_ir.ir.rolled import Loop, LoopedLane, Piece, SlotsLater, Straight, unrolled
from chimera_ir.ir.text.printer import Numbers, absolute, numbered_line, numbers_of
from chimera_ir.ir.turns import Initial, Ring, Shelf, Turn, extent, lowest, served_update, shelf

_ROUNDS, _SAVED = 4, 12
"""The fewest rounds of a loop, and the fewest lines that it has to save."""

_LONG = 64
"""The fewest lines of a part of a lane that, if `_best` finds no loop in it, is searched again in two halves."""

_CANDIDATES = 24
"""The most lengths of a round that are tried at a place; with slices, as many for each slice of a micro-batch."""


def roll(
    header: Header, lane: Sequence[ops.Instruction], slots: Iterable[tuple[Shelf, int]] | None = None
) -> tuple[Piece, ...]:
    """Returns a lane as loops and straight pieces, from which `unrolled` makes the same lane again.

    A loop stays within an update, reads one version of the weights, and talks to the same workers in every round.

    Parameters
    ----------
    header
        The header of the lane.
    lane
        Instructions of one worker: a whole lane, or a turn.
    slots
        The number of slots of each shelf (an edge between stages); a turn may use fewer. None if the lane uses all.
    """
    return tuple(_joined(_pieces(_NumberedLane(header, lane, slots), 0, len(lane))))


def roll_around(
    header: Header, lane: Sequence[ops.Instruction], start: int, end: int, later: SlotsLater
) -> LoopedLane | None:
    """Returns the pieces of a lane with a loop around a turn; None if nothing repeats there.

    The turn lies between two places, and ``later`` says how slots move on in it. Its loop is the one that `roll` finds
    if the lane has enough rounds of it, or has the turn as its round.
    """
    numbered = _NumberedLane(header, lane)
    numbered.turn = end - start, later
    lengths = (*_lengths(numbered, start, end + 1), end - start)
    stretches = (numbered.stretch(start, length, 0, len(lane), least=2) for length in lengths)
    best = next((found for found in stretches if found and found.start <= start and end <= found.end), None)
    if best is None:
        return None
    before = tuple(_joined(_pieces(numbered, 0, best.start)))
    after = _joined(_pieces(numbered, best.end, len(lane)))
    return LoopedLane((*before, _loop_of(numbered, best), *after), len(before))


class _Repetition(NamedTuple):
    """A stretch of a lane that could be a loop: ``rounds`` rounds of ``length`` lines each, from place ``start`` on.

    From round to round micro-batches are ``step`` later. ``rings`` has the ring of slots of each receive, by its place
    modulo ``length``.
    """

    start: int
    length: int
    rounds: int
    step: int
    rings: Mapping[int, Ring]

    @property
    def end(self) -> int:
        """The place after the last line."""
        return self.start + self.length * self.rounds

    @property
    def saved(self) -> int:
        """The number of lines that a loop saves."""
        return self.length * (self.rounds - 1)


class _NumberedLane:
    """A lane as lists of numbers, one for each line, which are quick to compare.

    Two lines may be the same line of two rounds of a loop only if they have equal ``kinds``. ``micros`` has the first
    micro-batch of each line. ``receives`` has the receives of the lane, by their places. ``slots`` has the number of
    slots of each shelf (the slots for messages along one edge).
    """

    def __init__(
        self, header: Header, lane: Sequence[ops.Instruction], slots: Iterable[tuple[Shelf, int]] | None = None
    ) -> None:
        self.turn: tuple[int, SlotsLater] = 0, {}  # the length of a turn, and how slots move on in it, if known
        kinds: dict[object, int] = {}
        self.instructions, self.candidates = lane, _CANDIDATES * header.slices
        self.kinds: list[int] = []
        self.micros: list[int] = []
        self.receives = {place: line for place, line in enumerate(lane) if isinstance(line, ops.Recv)}
        self.slots = dict(_used(self.receives.values()) if slots is None else slots)
        self.in_turn = _in_turn(self.receives.values(), self.slots)
        # Lines with equal numbers may repeat each other; a line that never repeats has a negative number of its own.
        per_update = header.per_update
        for place, instruction in enumerate(lane):
            kind, micro = _kind(header, instruction)
            number = -1 - place if micro is None else kinds.setdefault((kind, micro // per_update), len(kinds))
            self.kinds.append(number)
            self.micros.append(micro or 0)

    def stretch(self, anchor: int, length: int, low: int, high: int, least: int = _ROUNDS) -> _Repetition | None:
        """Returns the longest stretch around place ``anchor`` that repeats every ``length`` lines; None if too short.

        It lies between the places ``low`` and ``high``, and has at ``least`` so many rounds.
        """
        step = self.micros[anchor + length] - self.micros[anchor]
        if step <= 0:
            return None
        rings: dict[int, Ring] = {}

        def repeated(places: range) -> int:
            """How many of ``places``, from the first on, have their line again one round later."""
            kinds, micros, receives = self.kinds, self.micros, self.receives
            for count, place in enumerate(places):
                later = place + length
                if kinds[place] != kinds[later] or micros[later] - micros[place] != step:
                    return count
                if place in receives:
                    ring = rings.get(place % length) or self._ring(place, length, step)
                    if ring is None or ring.later(receives[place].slot, 1) != receives[later].slot:
                        return count
                    rings[place % length] = ring
            return len(places)

        start = anchor - repeated(range(anchor - 1, low - 1, -1))
        end = anchor + repeated(range(anchor, high - length))
        rounds = (end + length - start) // length
        stretch = _Repetition(start, length, rounds, step, rings)
        enough = rounds >= least and (least < _ROUNDS or stretch.saved >= _SAVED)
        return stretch if enough else None

    def _ring(self, place: int, length: int, step: int) -> Ring | None:
        """The ring of the receive at ``place``, if rounds of ``length`` lines make a loop; None if it has none."""
        key = shelf(self.receives[place].message)
        if key in self.in_turn:
            return Ring(self.receives[place + length].slot - self.receives[place].slot, self.slots[key])
        if self.turn[0] == length:
            return _ring(_orbit(self.receives[place].slot, self.turn[1][key]), True, self.slots[key])
        return _ring(*self._slots_around(place, length, step, self.slots[key]), self.slots[key])

    def _slots_around(self, place: int, length: int, step: int, most: int) -> tuple[list[Slot], bool]:
        """Returns the slots that a receive takes in the rounds around ``place``, and whether they are a circle.

        They are a circle if the receive has its slot at ``place`` again after at most ``most`` rounds. A round has
        ``length`` lines, and its micro-batches are ``step`` later than those of the round before.
        """
        slots = [self.receives[place].slot]
        for by in (length, -length):
            other = place + by
            while 0 <= other < len(self.kinds) and len(slots) <= most:
                apart = (self.micros[other] - self.micros[place]) * length, (other - place) * step
                if self.kinds[other] != self.kinds[place] or apart[0] != apart[1]:
                    break
                if (slot := self.receives[other].slot) == slots[0 if by > 0 else -1]:
                    return slots, True
                slots.insert(len(slots) if by > 0 else 0, slot)
                other += by
        return slots, False


def _orbit(slot: Slot, later: Mapping[Slot, Slot]) -> list[Slot]:
    """The slots that a receive takes one after another, until it has the first again."""
    slots = [slot]
    while (following := later[slots[-1]]) != slot:
        slots.append(following)
    return slots


def _ring(rounds: Sequence[Slot], circle: bool, slots: int) -> Ring | None:
    """Finds the ring, a circle of slots, on which a receive takes the slots ``rounds``, one in each round.

    ``slots`` is the number of slots of the receive's shelf. ``circle`` says whether the first slot of ``rounds`` comes
    again after the last one; then the ring may also have only some slots of the shelf: the lowest slot in ``rounds``
    and those above it at equal distances. Returns None if there is no such ring.
    """
    following = [*pairwise(rounds), *([(rounds[-1], rounds[0])] if circle else [])]
    step = rounds[1] - rounds[0] if len(rounds) > 1 else 0
    rings = [Ring(step, slots)]
    if circle and step:
        apart = max(1, (max(rounds) - min(rounds)) // (len(rounds) - 1))
        rings.append(Ring(step, apart * len(rounds), min(rounds)))
    return next((ring for ring in rings if all(ring.later(slot, 1) == after for slot, after in following)), None)


def _used(receives: Iterable[ops.Recv]) -> dict[Shelf, int]:
    """The number of slots that a lane receives into, by shelf."""
    slots: dict[Shelf, int] = {}
    for receive in receives:
        key = shelf(receive.message)
        slots[key] = max(slots.get(key, 0), receive.slot + 1)
    return slots


def _in_turn(receives: Iterable[ops.Recv], slots: Mapping[Shelf, int]) -> set[Shelf]:
    """Returns the shelves whose slots the receives of a lane take in a circle, one after the other.

    ``slots`` has the number of slots of each shelf.
    """
    latest: dict[Shelf, Slot] = {}
    others: set[Shelf] = set()
    for receive in receives:
        key, slot = shelf(receive.message), receive.slot
        if key in latest and (latest[key] + 1 - slot) % slots[key]:
            others.add(key)
        latest[key] = slot
    return {*latest} - others


_SENDING = ops.Send, ops.WaitSend
_TALK = *_SENDING, ops.Recv, ops.WaitRecv


def _kind(header: Header, instruction: ops.Instruction) -> tuple[object, int | None]:
    """Returns a key of a line that is the same in every round of a loop, and the first micro-batch of the line.

    The micro-batch is None if the line never repeats. The workers of neighbouring stages are in the key: with other
    workers an instruction uses other links.
    """
    # Most lines are about messages.
    if isinstance(instruction, _TALK):
        micros, source, target, value = instruction.message
        peer = header.worker(micros[0], target if isinstance(instruction, _SENDING) else source)
        return (type(instruction), source, target, value, _pattern(micros), peer), micros[0]
    match instruction:
        case ops.Compute(kind, micros, stage, version=version):
            return (kind, stage, _pattern(micros), version, _neighbours(header, instruction)), micros[0]
        case ops.Pair(forward, backward):
            apart = tuple(micro - forward.micros[0] for micro in backward.micros)
            ends = _neighbours(header, forward), _neighbours(header, backward)
            return (ops.Pair, forward.stage, _pattern(forward.micros), backward.stage, apart, ends), forward.micros[0]
        case ops.WaitMove(kind, micros, stage):
            return (ops.WaitMove, kind, stage, _pattern(micros)), micros[0]
        case ops.AllReduce() | ops.WaitAllReduce() | ops.Step() | ops.Stash() | ops.Drop():
            return None, None
        case _:
            assert_never(instruction)


def _neighbours(header: Header, operation: ops.Compute) -> tuple[Worker | None, ...]:
    """The workers of an operation's stage, of the stages that feed it, and of the stages that it feeds.

    A stage that does not have the micro-batch counts as None.
    """
    micro, stage = operation.micros[0], operation.stage
    stages = (stage, *header.feeding[stage], *header.fed[stage])
    return tuple([header.worker(micro, s) if header.has(micro, s) else None for s in stages])


def _pattern(micros: tuple[int, ...]) -> tuple[int, ...]:
    return (0,) if len(micros) == 1 else tuple([micro - micros[0] for micro in micros])


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The pieces, with consecutive straight pieces joined into one."""
    straight: list[ops.Instruction] = []
    for piece in pieces:
        if isinstance(piece, Straight):
            straight += piece.instructions
            continue
        if straight:
            yield Straight(tuple(straight))
            straight = []
        yield piece
    if straight:
        yield Straight(tuple(straight))


def _pieces(lane: _NumberedLane, low: int, high: int) -> Iterator[Piece]:
    """Yields the pieces of a lane from place ``low`` to ``high``: the best loop, with the pieces before and after it.

    If `_best` finds no loop, both halves of a long part are searched.
    """
    if low == high:
        return
    best = _best(lane, low, high)
    if best is not None:
        yield from _pieces(lane, low, best.start)
        yield _loop_of(lane, best)
        yield from _pieces(lane, best.end, high)
    elif high - low >= _LONG:
        middle = (low + high) // 2
        yield from _pieces(lane, low, middle)
        yield from _pieces(lane, middle, high)
    else:
        yield Straight(tuple(lane.instructions[low:high]))


def _loop_of(lane: _NumberedLane, found: _Repetition) -> Loop:
    body = tuple(lane.instructions[found.start : found.start + found.length])
    places = enumerate(body, found.start)
    rings = {line.message: found.rings[p % found.length] for p, line in places if isinstance(line, ops.Recv)}
    return Loop(body, found.rounds, found.step, rings)


def _best(lane: _NumberedLane, low: int, high: int) -> _Repetition | None:
    """Returns a loop that saves many lines of a lane between places ``low`` and ``high``; None if none is found.

    Loops are tried that contain the line in the middle, then a quarter, then three quarters of the way; the one that
    saves most lines is returned. A loop that saves more than half of the lines ends the search.
    """
    best: _Repetition | None = None
    for part in (2, 1, 3):
        anchor = low + (high - low) * part // 4
        for length in _lengths(lane, anchor, high):
            if best is not None and best.saved >= high - low - length:
                break  # no stretch of longer rounds saves more
            if best is not None and length % best.length == 0 and best.start <= anchor < best.end - best.length:
                continue  # several rounds of that loop as one round
            stretch = lane.stretch(anchor, length, low, high)
            if stretch is not None and (best is None or stretch.saved > best.saved):
                best = stretch
        if best is not None and best.saved > (high - low) // 2:
            break
    return best


def _lengths(lane: _NumberedLane, anchor: int, high: int) -> Iterator[int]:
    """Yields lengths of a round to try: how many lines after ``anchor`` a line comes that may repeat the line there.

    Only lines before place ``high`` count.
    """
    place = anchor
    with suppress(ValueError):  # from `index`, after the last one
        for _ in range(lane.candidates):
            place = lane.kinds.index(lane.kinds[anchor], place + 1, high)
            yield place - anchor


# Writes lanes with loops, so that instructions that repeat are written once.
#
# A script for a stream has one turn, which also serves warm-up and drain: its calls for updates outside the run do
# nothing. Other lanes consist of the pieces that `rolling` finds: a prologue, a loop over the steady state, an
# epilogue, or several of those.

_COLUMN = 74
"""The most characters of a statement whose comment is aligned with those of the other statements."""

_SCREEN = 120
"""The most characters of a line."""


def counter(header: Header) -> str:
    """Returns the name of the variable that counts the turns of a stream, by the first update of each.

    It is ``m`` if updates have one micro-batch, else ``k``.
    """
    return "m" if header.per_update == 1 else "k"


def turn_lines(scribe: Scribe, turn: Turn) -> Iterator[str]:
    """Yields the lines of a script for a turn, with numbers relative to its first update and micro-batch."""
    header = scribe.header
    rings = {line.message: turn.rings[shelf(line.message)] for line in turn.instructions if isinstance(line, Recv)}
    notation = Notation(step=header.period, rings=rings, variable="m", counter=counter(header))
    outer = replace(scribe, notation=notation)
    # The script is a function of the turn's number; a stretch that repeats within a turn is a loop inside it.
    for piece in roll(header, turn.instructions, turn.slots):
        if isinstance(piece, Straight) or not _in_step(piece, notation):
            yield from _commented(outer, unrolled(piece), numbers_of(header, turn))
            continue
        first = _first_micro(piece)
        end = first + piece.rounds * piece.step
        inner = replace(notation, micro=first, step=piece.step, rings=piece.rings, variable="n")
        start, stop = notation.micros([first]), notation.micros([Micro(end)])
        yield from _loop(replace(scribe, notation=inner), piece, start, stop)


def _in_step(loop: Loop, notation: Notation) -> bool:
    """Tells whether one formula (`Notation.slot`) gives the slot of each receive, in every round and every turn.

    There is such a formula if each receive either never changes its slot, or goes one step further in the same ring (a
    circle of slots) with each micro-batch, both from round to round and from turn to turn. ``notation`` has the rings
    of the turn, ``loop`` those from round to round.
    """

    def fits(ring: Ring, turn: Ring) -> bool:
        if ring.step % ring.slots == turn.step % turn.slots == 0:
            return True
        apart = (ring.step - loop.step) % ring.slots, (turn.step - notation.step) % turn.slots
        return ring[1:] == turn[1:] and apart == (0, 0)

    return all(fits(ring, notation.rings[message]) for message, ring in loop.rings.items())


def lane_lines(scribe: Scribe, pieces: Iterable[Piece]) -> Iterator[str]:
    """The lines of a script for the pieces of a lane."""
    for number, piece in enumerate(pieces):
        yield from [""] if number else []
        if isinstance(piece, Straight):
            yield from _commented(scribe, piece.instructions, absolute(scribe.header.slices))
            continue
        first = _first_micro(piece)
        notation = Notation(first, piece.step, piece.rings, "m")
        yield from _loop(replace(scribe, notation=notation), piece, str(first), str(first + piece.rounds * piece.step))


def _loop(scribe: Scribe, loop: Loop, start: str, stop: str) -> Iterator[str]:
    by = f", {loop.step}" if loop.step > 1 else ""
    yield f"for {scribe.notation.variable} in range({start}, {stop}{by}):"
    yield from (
        f"    {line}" for line in _commented(scribe, loop.instructions, _in_rounds(scribe.notation), indented=8)
    )


def _first_micro(loop: Loop) -> Micro:
    """Returns the micro-batch that the first round of a loop counts from: that of its first forward.

    Without a forward it is that of the first instruction.
    """
    computes = singles(line for line in loop.instructions if isinstance(line, Compute | Pair))
    forward = next((operation for operation in computes if operation.kind.opens), loop.instructions[0])
    return Micro(extent(forward).first)


def _commented(
    scribe: Scribe, instructions: Iterable[Instruction], numbers: Numbers, indented: int = 4
) -> Iterator[str]:
    """Yields the statements of instructions, each with a comment that shows the instruction as a line of the program.

    The comment is beside the statement or, if the line would be too long, above it. ``numbers`` are the functions that
    write micro-batches, versions and slots in comments. ``indented`` is how many blanks will stand before a line.
    """
    written = [(scribe.statement(line), numbered_line(line, numbers)) for line in instructions]
    width = max((len(code) for code, _ in written if len(code) <= _COLUMN), default=0)
    for code, comment in written:
        together = f"{code:<{width}}  # {comment}"
        yield from [together] if indented + len(together) <= _SCREEN else [f"# {comment}", code]


def _in_rounds(notation: Notation) -> Numbers:
    """Returns the functions that write micro-batches, versions and slots in comments, as ``m-3`` in ``B m-3 s0``.

    The numbers are relative to the round of a loop, as ``notation`` writes them in statements.
    """
    return Numbers(
        micro=lambda micro: notation.micros([micro]).replace(" ", ""),
        version=lambda version: f"v({notation.version(version)})".replace(" ", ""),
        slot=lambda recv: notation.slot(recv.message, recv.slot),
    )


def reach(header: Header, turn: Turn, initials: Mapping[WeightGroup, Initial]) -> tuple[int, int]:
    """Returns where the turns of a worker begin and end, so that every update of a run is complete.

    The result is ``(first, behind)``, in updates: for a run of U updates the turns begin at the updates ``range(first,
    U + behind, per_turn)``. ``initials`` is the result of `initial`.
    """
    step = header.per_turn
    served = [(served_update(header, line), lowest(initials, line)) for line in turn.instructions]
    ahead = max((update - least for update, least in served), default=0)
    return -(ahead // step) * step, -min((update for update, _ in served), default=0)
