"""The names and numbers in scripts: absolute where a lane is written out, relative to the round in a loop.

A name says what it holds: ``x_m0_s1`` is what stage 1 receives of micro-batch 0, ``y_m0_m1_s1`` is what it hands on of
micro-batches 0 and 1. In a lane with loops these are entries of dictionaries by their first micro-batch: ``x_s1[0]``,
and ``y2_s1[0]`` for two micro-batches at once; in a loop over m, ``x_s1[m]``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from chimera_ir.ir.ids import Micro, Slot, Stage, Version
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Message
from chimera_ir.ir.turns import Initial, Ring, Shelf, shelf


class Notation(Protocol):
    """Python expressions for the parts of an instruction."""

    def name(self, prefix: str, micros: Sequence[int], stage: int) -> str:
        """The variable or entry for a value of some micro-batches on a stage."""

    def sum(self, stage: Stage, version: Version | None) -> str:
        """The variable or entry for a sum of gradients under way."""

    def last(self, name: str) -> str:
        """The expression for the last use of a name."""

    def gone(self, name: str) -> tuple[str, ...]:
        """The names to delete after the last use of a name, if that use was not `last`."""

    def micro(self, micro: Micro) -> str:
        """The number of a micro-batch."""

    def tag(self, header: Header, message: Message) -> str:
        """A number that no other message has; runtime.py turns it back into the message for its errors."""

    def slot(self, message: Message, slot: Slot) -> str:
        """The number of a receive buffer."""

    def stage(self, stage: Stage, version: Version | None) -> str:
        """A stage at the version of its weights that is read."""

    def version(self, version: Version) -> str:
        """A version of weights."""

    def kept(self, stage: Stage, version: Version) -> str:
        """The number of a version that is stashed or dropped."""


class WrittenOut:
    """The notation of a lane that is written out, without loops."""

    def name(self, prefix: str, micros: Sequence[int], stage: int) -> str:
        """A variable, as in ``f_m0_s1``."""
        return "_".join([prefix, *(f"m{micro}" for micro in micros), f"s{stage}"])

    def sum(self, stage: Stage, version: Version | None) -> str:
        """A variable for each stage, as in ``sum_s1``."""
        return f"sum_s{stage}"

    def last(self, name: str) -> str:
        """The variable, which ends with the function whoever reads it last."""
        return name

    def gone(self, name: str) -> tuple[str, ...]:
        """No names: variables end with the function."""
        return ()

    def micro(self, micro: Micro) -> str:
        """The micro-batch, by its number in the instance."""
        return str(micro)

    def tag(self, header: Header, message: Message) -> str:
        """The tag of a message, by its number."""
        return str(_tag(header, message))

    def slot(self, message: Message, slot: Slot) -> str:
        """The slot, by its number."""
        return str(slot)

    def stage(self, stage: Stage, version: Version | None) -> str:
        """The stage; there is only one version."""
        return f"stage{stage}"

    def version(self, version: Version) -> str:
        """The version, by its number."""
        return str(version)

    def kept(self, stage: Stage, version: Version) -> str:
        """The kept version, by its number."""
        return str(version)


@dataclass(frozen=True, slots=True)
class Round:
    """A round of a loop, to which all numbers are relative: there ``variable`` is ``micro``, and the update ``update``.

    The variable grows by ``step`` from round to round. ``rings`` decide the slots; ``initial`` says where the initial
    weights take the place of other versions.
    """

    micro: int
    step: int
    rings: Mapping[Shelf, Ring]
    update: int = 0
    variable: str = "m"
    initial: Mapping[Stage, Initial] = field(default_factory=dict)


class InTables:
    """The notation of a lane with loops: values are entries of dictionaries as in ``f_s1[0]``.

    The names of the dictionaries are added to ``names``. With ``rounds``, in a loop, numbers are relative as in
    ``f_s1[m - 3]``, and ``counter`` is the variable that counts updates: k, or m if every micro-batch is an update.
    """

    def __init__(self, names: set[str], rounds: Round | None = None, counter: str = "k") -> None:
        self.names = names
        self.counter = counter
        self._round = rounds

    def name(self, prefix: str, micros: Sequence[int], stage: int) -> str:
        """An entry of a dictionary, as in ``f_s1[m - 3]``; groups of each size have another dictionary."""
        dictionary = f"{prefix}{len(micros) if len(micros) > 1 else ''}_s{stage}"
        self.names.add(dictionary)
        return f"{dictionary}[{self.micro(Micro(micros[0]))}]"

    def sum(self, stage: Stage, version: Version | None) -> str:
        """An entry by its update, as in ``sum_s1[k]``; a variable in a program without versions."""
        if version is None:
            return f"sum_s{stage}"
        self.names.add(f"sum_s{stage}")
        return f"sum_s{stage}[{self.version(Version(version - 1))}]"

    def last(self, name: str) -> str:
        """The entry, taken out of its dictionary."""
        if "[" not in name:
            return name
        dictionary, _, key = name.removesuffix("]").partition("[")
        return f"{dictionary}.pop({key})"

    def gone(self, name: str) -> tuple[str, ...]:
        """The entry."""
        return (name,)

    def micro(self, micro: Micro) -> str:
        """The number; in a loop relative to the round, as in ``m - 3``."""
        return str(micro) if self._round is None else _offset(self._round.variable, micro - self._round.micro)

    def tag(self, header: Header, message: Message) -> str:
        """The number; in a loop relative to the round, as in ``8 * m + 3``."""
        tag = _tag(header, message)
        if self._round is None:
            return str(tag)
        tags = 2 * header.stages
        return _offset(f"{tags} * {self._round.variable}", tag - tags * self._round.micro)

    def slot(self, message: Message, slot: Slot) -> str:
        """The number; in a loop relative to the round, as in ``(m + 1) % 4``."""
        if self._round is None:
            return str(slot)
        messages, slots = self._round.rings[shelf(message)]
        if messages % slots == 0:
            return str(slot)
        step, number = self._round.step, self._round.variable
        if messages == step:
            start = (slot - self._round.micro) % slots
        else:
            start = (slot - self._round.micro // step * messages) % slots
            number += (f" // {step}" if step > 1 else "") + (f" * {messages}" if messages > 1 else "")
        return f"{number} % {slots}" if start == 0 else f"({_offset(number, start)}) % {slots}"

    def stage(self, stage: Stage, version: Version | None) -> str:
        """The stage at a version of its weights, which is 0 before the first update."""
        if version is None:
            return f"stage{stage}"
        text = self.version(version)
        made = self._round is not None and version >= self._round.update
        return f"stage{stage}.at({text if made else f'max(0, {text})'})"

    def version(self, version: Version) -> str:
        """The number, in a loop from that of the round, as in ``k - 1``."""
        return str(version) if self._round is None else _offset(self.counter, version - self._round.update)

    def kept(self, stage: Stage, version: Version) -> str:
        """The number as in `version`, at least 0 where the initial weights take the place of negative versions."""
        replaced = self._round is not None and stage in self._round.initial
        return f"max(0, {self.version(version)})" if replaced else self.version(version)


def _offset(name: str, by: int) -> str:
    if by == 0:
        return name
    return f"{name} + {by}" if by > 0 else f"{name} - {-by}"


def _tag(header: Header, message: Message) -> int:
    return (message.micros[0] * header.stages + message.source) * 2 + (message.source > message.target)
