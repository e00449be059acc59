"""Words for messages, sums and workers, which several rules use in diagnostics."""

from chimera_ir.ir.ids import Worker
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Message
from chimera_ir.ir.text.printer import group_name, micros_name
from chimera_ir.plural import listed
from chimera_ir.verify.index import Synchronisation


def content(header: Header, message: Message) -> str:
    """The content of a message: ``the activations of micro-batch 0 from stage 0``."""
    return f"the {message.value.noun} of {micros_name(message.micros, header.slices)} from stage {message.source}"


def summed(instruction: Synchronisation) -> str:
    """The group of a sum or a step, with its version: ``stage 1``, or ``stage 1 for version 3``."""
    return group_name(instruction.group) + (
        "" if instruction.version is None else f" for version {instruction.version}"
    )


def workers(numbers: tuple[Worker, ...]) -> str:
    """Workers in words: ``worker 1``, or ``workers 0 and 3``."""
    return f"worker{'s' if len(numbers) > 1 else ''} {listed(numbers)}"
