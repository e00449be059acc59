"""How scripts call what a lane speaks of: written out, by number; in a loop, relative to its turn.

A name tells what it holds: ``x_m0_s1`` is what stage 1 receives of micro-batch 0, ``y_m0_m1_s1`` what it hands on of
micro-batches 0 and 1. In a loop that is ``x_s1[m]``, an entry of a dictionary by the first of the micro-batches, where
``m`` is the first micro-batch of the turn and ``k`` its update.
"""

from collections.abc import Sequence
from typing import Protocol

from chimera_ir.ir.ids import Micro, Slot, Stage, Version
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Message
from chimera_ir.ir.turns import Body, shelf, updates_a_turn


class Notation(Protocol):
    """Python expressions for the parts of an instruction."""

    def name(self, prefix: str, micros: Sequence[int], stage: int) -> str:
        """What holds a value of some micro-batches on a stage."""

    def last(self, name: str) -> str:
        """The name, where it is used for the last time."""

    def gone(self, name: str) -> tuple[str, ...]:
        """What must be let go of after the last use of a name that was used as it is."""

    def micro(self, micro: Micro) -> str:
        """The number of a micro-batch."""

    def tag(self, header: Header, message: Message) -> str:
        """A number that no other message has; runtime.py reads it backwards for its error messages."""

    def slot(self, message: Message, slot: Slot) -> str:
        """The number of a receive buffer."""

    def stage(self, stage: Stage, version: Version | None) -> str:
        """A stage, with the version of its weights that is to be read."""

    def version(self, version: Version) -> str:
        """A version of weights."""


class WrittenOut:
    """The notation of a lane whose every instruction is a statement of its own."""

    def name(self, prefix: str, micros: Sequence[int], stage: int) -> str:
        """A variable, as in ``f_m0_s1``."""
        return "_".join([prefix, *(f"m{micro}" for micro in micros), f"s{stage}"])

    def last(self, name: str) -> str:
        """The variable."""
        return name

    def gone(self, name: str) -> tuple[str, ...]:
        """Nothing: the variable ends with the function."""
        return ()

    def micro(self, micro: Micro) -> str:
        """The number."""
        return str(micro)

    def tag(self, header: Header, message: Message) -> str:
        """The number."""
        return str(_tag(header, message))

    def slot(self, message: Message, slot: Slot) -> str:
        """The number."""
        return str(slot)

    def stage(self, stage: Stage, version: Version | None) -> str:
        """The stage; there is one version."""
        return f"stage{stage}"

    def version(self, version: Version) -> str:
        """The number."""
        return str(version)


class InLoop:
    """The notation of a turn in a loop over ``k``, with ``m``, or over ``m`` alone where they are equal."""

    def __init__(self, header: Header, turn: Body) -> None:
        self._header = header
        self._turn = turn
        self._first = turn.turn * header.period
        self.update = turn.turn * updates_a_turn(header)
        self.counter = "m" if header.per_update == 1 else "k"
        self.names: dict[str, None] = {}

    def name(self, prefix: str, micros: Sequence[int], stage: int) -> str:
        """An entry of a dictionary, as in ``f_s1[m - 3]``; groups have dictionaries of their own."""
        dictionary = f"{prefix}{len(micros) if len(micros) > 1 else ''}_s{stage}"
        self.names[dictionary] = None
        return f"{dictionary}[{self.micro(Micro(micros[0]))}]"

    def last(self, name: str) -> str:
        """The entry, which leaves the dictionary."""
        dictionary, _, key = name.removesuffix("]").partition("[")
        return f"{dictionary}.pop({key})"

    def gone(self, name: str) -> tuple[str, ...]:
        """The entry."""
        return (name,)

    def micro(self, micro: Micro) -> str:
        """The number from that of the turn, as in ``m - 3``."""
        return _offset("m", micro - self._first)

    def tag(self, header: Header, message: Message) -> str:
        """The number from that of the turn, as in ``8 * m + 3``."""
        each = _tag(header, Message((Micro(1),), message.source, message.target)) - _tag(
            header, Message((Micro(0),), message.source, message.target)
        )
        return _offset(f"{each} * m", _tag(header, message) - each * self._first)

    def slot(self, message: Message, slot: Slot) -> str:
        """The number from that of the turn, as in ``(m + 1) % 4``."""
        messages, slots = self._turn.rings[shelf(message)]
        start = (slot - self._turn.turn * messages) % slots
        if messages % slots == 0:
            return str(start)
        number = "m" if messages == self._header.period else f"m // {self._header.period} * {messages}"
        return f"{number} % {slots}" if start == 0 else f"({_offset(number, start)}) % {slots}"

    def stage(self, stage: Stage, version: Version | None) -> str:
        """The stage at a version of its weights."""
        return f"stage{stage}" if version is None else f"stage{stage}.at({self._clipped(version)})"

    def version(self, version: Version) -> str:
        """The number from that of the turn, as in ``k - 1``."""
        return _offset(self.counter, version - self.update)

    def _clipped(self, version: Version) -> str:
        """The same, and 0 as long as there were no updates; one that the turn itself makes is never below 0."""
        text = self.version(version)
        return text if version >= self.update else f"max(0, {text})"

    def update_of(self, micro: Micro) -> int:
        """The update of a micro-batch, from the turn's first."""
        return micro // self._header.per_update - self.update


def _offset(name: str, by: int) -> str:
    if by == 0:
        return name
    return f"{name} + {by}" if by > 0 else f"{name} - {-by}"


def _tag(header: Header, message: Message) -> int:
    return (message.micros[0] * header.stages + message.source) * 2 + (message.source > message.target)
