"""Where everything stands in the lanes of a program: arrays, filled in one walk, that the rules on messages share."""

from collections.abc import Iterable
from dataclasses import dataclass

from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import AllReduce, Forward, Message, Step, Talk, WaitAllReduce

ABSENT = -1

Synchronisation = AllReduce | WaitAllReduce | Step


@dataclass(frozen=True, slots=True)
class Cells:
    """The place of every compute operation in its lane; a cell is ``micro * stages + stage``."""

    header: Header
    forwards: list[int]
    backwards: list[int]

    def producer(self, message: Message) -> int:
        """The place, in the sender's lane, of the operation whose result the message holds."""
        places = self.forwards if message.source < message.target else self.backwards
        return places[message.micros[0] * self.header.stages + message.source]

    def consumer(self, message: Message) -> int:
        """The place, in the receiver's lane, of the operation that needs the message."""
        places = self.forwards if message.source < message.target else self.backwards
        return places[message.micros[0] * self.header.stages + message.target]


def cells(program: Program) -> Cells:
    """The places of the compute operations of a complete and placed program."""
    header = program.header
    stages = header.stages
    forwards = [ABSENT] * (stages * header.micro_batches)
    backwards = list(forwards)
    for parts in program.parts:
        for place, operation in parts.computes:
            places = forwards if isinstance(operation, Forward) else backwards
            for micro in operation.micros:
                places[micro * stages + operation.stage] = place
    return Cells(header, forwards, backwards)


def key(header: Header, message: Message) -> int:
    """A number for a message between neighbouring stages, from 0 to ``2 * stages * micro_batches - 1``.

    No two messages of a program share it, as each micro-batch is in one message of each stage and direction.
    """
    return 2 * (message.micros[0] * header.stages + message.source) + (message.source > message.target)


def keys(header: Header, lines: Iterable[Talk]) -> list[int]:
    """The `key` of each line's message."""
    stages = header.stages
    found = []
    for each in lines:
        micros, source, target = each.message
        found.append(2 * (micros[0] * stages + source) + (source > target))
    return found


def update_of(each: Synchronisation) -> int:
    """The update that a sum or a step belongs to, counted from 0."""
    return (each.version or 1) - 1


def sum_key(header: Header, each: Synchronisation) -> int:
    """A number for the sum that a line is about, from 0 to ``stages * updates - 1``."""
    return each.stage * header.updates + update_of(each)


def sender(header: Header, message: Message) -> Worker:
    """Where a message comes from."""
    return header.worker(message.micros[0], message.source)


def receiver(header: Header, message: Message) -> Worker:
    """Where a message goes."""
    return header.worker(message.micros[0], message.target)
