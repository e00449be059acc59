"""Finds which micro-batches operations take together, and so what each message is about.

F m0,m1 s0      makes y of m0 and of m1, which F m0 s1 and F m1 s1 read: two messages
B m0 s1
B m1 s1
B m0,m1 s0      reads dx of m0 and of m1, which are two messages as well
"""

from collections.abc import Iterable
from itertools import groupby

from chimera_ir.ir.kinds import Value
from chimera_ir.ir.ops import Message, Micro, Operation, Stage


class Blocks:
    """The micro-batches that operations make values of together, and read values of together.

    A message is about micro-batches that one operation makes together and another reads together. Without operations
    all are read as they are made.
    """

    def __init__(self, operations: Iterable[Operation] = ()) -> None:
        self._together: dict[tuple[Value, Stage, Micro, bool], tuple[Micro, ...]] = {}
        for part in (part for operation in operations for part in operation.parts):
            if len(part.micros) > 1:
                made = ((value, True) for value in part.kind.hands_on)
                read = ((value, False) for value in part.kind.reads if value.crosses)
                keys = ((value, is_made, micro) for value, is_made in (*made, *read) for micro in part.micros)
                self._together |= {(value, part.stage, micro, is_made): part.micros for value, is_made, micro in keys}

    def of(self, micros: tuple[Micro, ...], value: Value, source: Stage, target: Stage) -> list[tuple[Micro, ...]]:
        """The micro-batches of the messages that are about ``micros``, which one end of an edge makes, or reads."""
        if len(micros) == 1 or not self._together:
            return [micros]

        def ends(micro: Micro) -> tuple[tuple[Micro, ...], tuple[Micro, ...]]:
            made, read = (
                self._together.get((value, source, micro, True)),
                self._together.get((value, target, micro, False)),
            )
            return made or (micro,), read or (micro,)

        return [tuple(together) for _, together in groupby(micros, ends)]

    def made_with(self, message: Message) -> tuple[Micro, ...]:
        """The micro-batches that are made together with those of a message."""
        micros, source, _, value = message
        return self._together.get((value, source, micros[0], True), micros)

    def read_with(self, message: Message) -> tuple[Micro, ...]:
        """The micro-batches that are read together with those of a message."""
        micros, _, target, value = message
        return self._together.get((value, target, micros[0], False), micros)
