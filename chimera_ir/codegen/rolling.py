"""Search for the stretches of a lane that repeat, so that each can be a loop.

A stretch repeats if every instruction is the same as the one a fixed number of lines before, with micro-batches a fixed
number later and the next slots of the same ring. The search knows nothing of schemes: it takes the stretch that saves
most lines, then searches the rest of the lane on both sides.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from chimera_ir.ir.ids import Slot
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import (
    AllReduce,
    Compute,
    Drop,
    Instruction,
    Pair,
    Recv,
    Send,
    Stash,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
)
from chimera_ir.ir.turns import Ring, Shelf, moved, shelf

_ROUNDS, _SAVED = 4, 12
"""The fewest rounds of a loop, and the fewest lines that it has to save."""

_CANDIDATES = 24
"""The most distances to a next instruction of the same kind that are tried."""


@dataclass(frozen=True, slots=True)
class Straight:
    """Instructions one after the other."""

    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """Instructions ``rounds`` times: as they are in the first round, each round about micro-batches ``step`` later."""

    instructions: tuple[Instruction, ...]
    rounds: int
    step: int
    rings: Mapping[Shelf, Ring]


Piece = Straight | Loop


def roll(header: Header, lane: Sequence[Instruction]) -> tuple[Piece, ...]:
    """A lane as stretches that repeat and stretches that do not; unrolled, it is the same lane.

    A stretch stays within an update, and reads one version of the weights.
    """
    return tuple(_pieces(_Lane(lane, header.per_update), 0, len(lane)))


def unrolled(piece: Piece) -> Iterator[Instruction]:
    """The instructions of a piece, one after the other."""
    if isinstance(piece, Straight):
        yield from piece.instructions
        return
    for number in range(piece.rounds):
        for instruction in piece.instructions:
            later = moved(instruction, number * piece.step)
            if isinstance(later, Recv):
                ring = piece.rings[shelf(later.message)]
                later = replace(later, slot=Slot((later.slot + number * ring.messages) % ring.slots))
            yield later


@dataclass(frozen=True, slots=True)
class _Stretch:
    """``rounds`` times ``length`` lines from ``start``, each round ``step`` micro-batches after the one before."""

    start: int
    length: int
    rounds: int
    step: int

    @property
    def end(self) -> int:
        """The place after the last line."""
        return self.start + self.length * self.rounds

    @property
    def saved(self) -> int:
        """The lines that a loop saves."""
        return self.length * (self.rounds - 1)


class _Lane:
    """A lane as numbers: the kind and the first micro-batch of the instruction at each place, and slots by shelf."""

    def __init__(self, lane: Sequence[Instruction], per_update: int) -> None:
        kinds: dict[object, int] = {}
        self.instructions = lane
        self.kinds: list[int] = []
        self.micros: list[int] = []
        self.slots: dict[Shelf, int] = {}
        for place, instruction in enumerate(lane):
            kind, micro = _kind(instruction)
            known = -1 - place if micro is None else kinds.setdefault((kind, micro // per_update), len(kinds))
            self.kinds.append(known)
            self.micros.append(micro or 0)
            if isinstance(instruction, Recv):
                self.slots[shelf(instruction.message)] = max(
                    self.slots.get(shelf(instruction.message), 0), instruction.slot + 1
                )

    def stretch(self, anchor: int, length: int, low: int, high: int) -> _Stretch | None:
        """The longest stretch through a place that repeats after ``length`` lines, between ``low`` and ``high``."""
        step = self.micros[anchor + length] - self.micros[anchor]
        if step <= 0:
            return None
        rings = self.rings(anchor, length)
        start = anchor
        while start > low and self._again(start - 1, length, step, rings):
            start -= 1
        end = anchor
        while end + length < high and self._again(end, length, step, rings):
            end += 1
        rounds = (end + length - start) // length
        stretch = _Stretch(start, length, rounds, step)
        return stretch if rounds >= _ROUNDS and stretch.saved >= _SAVED else None

    def rings(self, start: int, length: int) -> dict[Shelf, Ring]:
        """The rings of the shelves that ``length`` lines receive into."""
        rings: dict[Shelf, Ring] = {}
        for instruction in self.instructions[start : start + length]:
            if isinstance(instruction, Recv):
                key = shelf(instruction.message)
                count = rings[key].messages if key in rings else 0
                rings[key] = Ring(count + 1, self.slots[key])
        return rings

    def _again(self, place: int, length: int, step: int, rings: Mapping[Shelf, Ring]) -> bool:
        """Whether the line ``length`` lines after a place repeats the line at that place."""
        later = place + length
        if self.kinds[place] != self.kinds[later] or self.micros[later] - self.micros[place] != step:
            return False
        first, second = self.instructions[place], self.instructions[later]
        if not (isinstance(first, Recv) and isinstance(second, Recv)):
            return True
        ring = rings.get(shelf(first.message))
        return ring is not None and (first.slot + ring.messages) % ring.slots == second.slot


def _kind(instruction: Instruction) -> tuple[object, int | None]:
    """What must be equal in all rounds, and the first micro-batch; None for instructions that never repeat."""
    match instruction:
        case Compute(kind, micros, stage, version=version):
            return (kind, stage, _pattern(micros), version), micros[0]
        case Pair(forward, backward):
            apart = tuple(micro - forward.micros[0] for micro in backward.micros)
            return (Pair, forward.stage, _pattern(forward.micros), backward.stage, apart), forward.micros[0]
        case Send(message, to):
            return (Send, message.source, message.target, _pattern(message.micros), to), message.micros[0]
        case Recv(message, source):
            return (Recv, message.source, message.target, _pattern(message.micros), source), message.micros[0]
        case WaitSend(message) | WaitRecv(message):
            key = (type(instruction), message.source, message.target, _pattern(message.micros))
            return key, message.micros[0]
        case AllReduce() | WaitAllReduce() | Step() | Stash() | Drop():
            return None, None
        case _:
            assert_never(instruction)


def _pattern(micros: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(micro - micros[0] for micro in micros)


def _pieces(lane: _Lane, low: int, high: int) -> Iterator[Piece]:
    best = _best(lane, low, high)
    if best is None:
        if high > low:
            yield Straight(tuple(lane.instructions[low:high]))
        return
    yield from _pieces(lane, low, best.start)
    body = tuple(lane.instructions[best.start : best.start + best.length])
    yield Loop(body, best.rounds, best.step, lane.rings(best.start, best.length))
    yield from _pieces(lane, best.end, high)


def _best(lane: _Lane, low: int, high: int) -> _Stretch | None:
    """The stretch that saves most lines among those through a few places."""
    best: _Stretch | None = None
    for part in (2, 1, 3):
        anchor = low + (high - low) * part // 4
        for length in _lengths(lane, anchor, high):
            stretch = lane.stretch(anchor, length, low, high)
            if stretch is not None and (best is None or stretch.saved > best.saved):
                best = stretch
        if best is not None and best.saved > (high - low) // 2:
            break
    return best


def _lengths(lane: _Lane, anchor: int, high: int) -> Iterator[int]:
    """The distances from a place to the next ones with the same kind of instruction."""
    count = 0
    for place in range(anchor + 1, high):
        if lane.kinds[place] == lane.kinds[anchor]:
            yield place - anchor
            count += 1
            if count == _CANDIDATES:
                return
