"""How the rules speak of what they check."""

from chimera_ir.ir.ids import Worker
from chimera_ir.ir.ops import Backward, Compute, Forward, Message


def kind(operation: Compute) -> str:
    """The word for the direction of an operation."""
    return "forward" if isinstance(operation, Forward) else "backward"


def content(message: Message) -> str:
    """What a message holds: ``the activations of micro-batch 0 from stage 0``."""
    what = "activations" if message.source < message.target else "gradients"
    plural = "es" if len(message.micros) > 1 else ""
    micros = ", ".join(str(micro) for micro in message.micros)
    return f"the {what} of micro-batch{plural} {micros} from stage {message.source}"


def producer(message: Message) -> Compute:
    """The operation whose result a message holds."""
    if message.source < message.target:
        return Forward(message.micros, message.source)
    return Backward(message.micros, message.source)


def consumer(message: Message) -> Compute:
    """The operation that needs a message."""
    if message.source < message.target:
        return Forward(message.micros, message.target)
    return Backward(message.micros, message.target)


def workers(numbers: tuple[Worker, ...]) -> str:
    """``worker 1``, or ``workers 0 and 3``."""
    *most, last = [str(number) for number in numbers]
    return f"workers {', '.join(most)} and {last}" if most else f"worker {last}"
