"""Numbers for the messages and sums of a program, for use as indices of lists, and the data flow of its operations."""

from itertools import chain

from chimera_ir.flow.flow import Flow
from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import AllReduce, Message, Step, WaitAllReduce

Synchronisation = AllReduce | WaitAllReduce | Step


def cells(program: Program) -> Flow:
    """Returns the data flow of a complete and placed program: the place in a lane where each value is made or taken."""
    return Flow(program.header, chain.from_iterable(parts.computes for parts in program.parts))


def key(header: Header, message: Message) -> int:
    """The index of a message, from 0 to ``len(edges) * micro_batches - 1``; its edge must be one of the header.

    No two messages of a program share it, as each micro-batch is in one message of each value and edge.
    """
    return header.edges[message[1:]] + message[0][0]


def update_of(instruction: Synchronisation) -> int:
    """The update that a sum or a step belongs to, counted from 0."""
    return (instruction.version or 1) - 1


def sum_key(header: Header, instruction: Synchronisation) -> int:
    """The index of the sum that a line is about, from 0 to ``len(groups) * updates - 1``; the group must exist."""
    return header.group_numbers[instruction.group] * header.updates + update_of(instruction)


def sender(header: Header, message: Message) -> Worker:
    """The worker that sends a message."""
    return header.worker(message.micros[0], message.source)


def receiver(header: Header, message: Message) -> Worker:
    """The worker that receives a message."""
    return header.worker(message.micros[0], message.target)
