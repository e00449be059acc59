"""Words that several rules share: for messages, sums and workers."""

from collections.abc import Sequence

from chimera_ir.ir.ids import Micro, Worker
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Message
from chimera_ir.ir.text.printer import group_name
from chimera_ir.plural import listed
from chimera_ir.verify.index import Synchronisation


def content(header: Header, message: Message) -> str:
    """The content of a message: ``the activations of micro-batch 0 from stage 0``."""
    return f"the {message.value.noun} of {micro_batches(header, message.micros)} from stage {message.source}"


def micro_batches(header: Header, micros: Sequence[Micro]) -> str:
    """Micro-batches in words: ``micro-batch 0``, ``micro-batches 0, 1``, or ``slice 2 of micro-batch 0``."""
    if header.slices > 1:
        return f"slice {micros[0] % header.slices} of micro-batch {micros[0] // header.slices}"
    plural = "es" if len(micros) > 1 else ""
    return f"micro-batch{plural} {', '.join(map(str, micros))}"


def summed(instruction: Synchronisation) -> str:
    """The group of a sum or a step, with its version: ``stage 1``, or ``stage 1 for version 3``."""
    return group_name(instruction.group) + (
        "" if instruction.version is None else f" for version {instruction.version}"
    )


def workers(numbers: tuple[Worker, ...]) -> str:
    """Workers in words: ``worker 1``, or ``workers 0 and 3``."""
    return f"worker{'s' if len(numbers) > 1 else ''} {listed(numbers)}"
