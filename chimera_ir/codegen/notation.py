"""Writes the numbers in scripts: as they are where a lane is written out, relative to the round in a loop.

In a loop over m, ``m - 3`` is the third micro-batch before that of the round; slots and versions are written likewise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chimera_ir.ir.ids import Micro, Slot, Version
from chimera_ir.ir.ops import Message
from chimera_ir.ir.turns import Ring


@dataclass(frozen=True, slots=True)
class Notation:
    """Writes the numbers of an instruction as Python expressions: micro-batches, versions, slots.

    In a loop the expressions are relative to the round. ``variable`` is the name of the loop's variable; in the round
    that the instruction is taken from, its value stands for micro-batch ``micro``, and it grows by ``step`` from round
    to round. ``counter`` is the name of the variable of the turn, which stands for update ``update`` there. ``rings``
    has, by its message, the circle of slots of each receive. Without ``variable`` the numbers are written as they are.
    """

    micro: int = 0
    step: int = 1
    rings: Mapping[Message, Ring] = field(default_factory=dict)
    variable: str = ""
    counter: str = ""
    update: int = 0

    def micros(self, micros: Sequence[Micro]) -> str:
        """The expression for one micro-batch, as in ``m - 3``, or a tuple for several."""
        texts = [_offset(self.variable, micro - self.micro) for micro in micros]
        return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"

    def version(self, version: Version | None) -> str:
        """The expression for a version, as in ``k - 1``; empty if the instruction names no version."""
        return "" if version is None else _offset(self.counter, version - self.update)

    def slot(self, message: Message, slot: Slot) -> str:
        """The expression for the slot that a message is received into, as in ``(m + 1) % 4``."""
        if not self.variable:
            return str(slot)
        ring = self.rings[message]
        step, micro = ring.step % ring.slots, self.micro
        if not step:
            return str(slot)
        # The variable is the number of the round, times a step; the slot is ``first`` plus a remainder by the slots.
        number = self.variable
        if step != self.step % ring.slots:
            micro = micro // self.step * step
            number += (f" // {self.step}" if self.step > 1 else "") + (f" * {step}" if step > 1 else "")
        start = (slot - ring.first - micro) % ring.slots
        place = f"{number} % {ring.slots}" if start == 0 else f"({_offset(number, start)}) % {ring.slots}"
        return f"{ring.first} + {place}" if ring.first else place


def _offset(name: str, by: int) -> str:
    if not name:
        return str(by)
    if by == 0:
        return name
    return f"{name} + {by}" if by > 0 else f"{name} - {-by}"
