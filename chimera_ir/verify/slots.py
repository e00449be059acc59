"""Rule "slots", a part of "messages": a receive is posted into a buffer only when nothing needs its content any more.

From the moment it is posted a receive may write. The slot of activations is free after the last backward of the same
micro-batches and stage, which works on what the forward kept of them, and after the end of the send of what that
forward made of them, which may be the same memory; the slot of gradients after the backward that reads them.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from chimera_ir.diagnostics.catalogue.program import SlotInUse, SlotTooHigh
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.ir.ids import Slot, Stage, Worker
from chimera_ir.ir.levels import Program
from chimera_ir.ir.ops import Message, Recv
from chimera_ir.ir.text.printer import line
from chimera_ir.verify.index import ABSENT, Cells, key, receiver
from chimera_ir.verify.messages import Places
from chimera_ir.verify.words import content


@dataclass(frozen=True, slots=True)
class _Content:
    posted: Recv
    last_use: int


def slots(program: Program, cells: Cells, places: Places) -> Iterator[Diagnostic]:
    """Receives into a slot that is in use, or that is numbered beyond all need.

    Parameters
    ----------
    program
        Without errors by the rule "messages".
    cells, places
        Its places.
    """
    for number, parts in enumerate(program.parts):
        worker = Worker(number)
        posted = [(place, each) for place, each in parts.messages if isinstance(each, Recv)]
        received = Counter((each.message.source, each.message.target) for _, each in posted)
        held: dict[tuple[Stage, Stage, Slot], _Content] = {}
        for place, each in posted:
            message = each.message
            shelf = (message.source, message.target, each.slot)
            messages = received[message.source, message.target]
            if not 0 <= each.slot < messages:
                yield SlotTooHigh(each.origin, worker, line(each), each.slot, messages)
            before = held.get(shelf)
            if before is not None and before.last_use >= place:
                yield _in_use(program, worker, each, before)
            held[shelf] = _Content(each, _last_use(program, cells, places, message))


def _last_use(program: Program, cells: Cells, places: Places, message: Message) -> int:
    """The place in the receiver's lane after which the content of a message may go."""
    header = program.header
    stage = message.target
    backward = max(cells.backward(micro, stage) for micro in message.micros)
    forwarded = Message(message.micros, stage, Stage(stage + 1))
    if message.source > stage or forwarded.target == header.stages or _stays(program, forwarded):
        return backward
    retired = places.retired[key(header, forwarded)]
    return backward if retired == ABSENT else max(backward, retired)


def _stays(program: Program, message: Message) -> bool:
    header = program.header
    return header.worker(message.micros[0], message.source) == receiver(header, message)


def _in_use(program: Program, worker: Worker, each: Recv, before: _Content) -> Diagnostic:
    last = program.lanes[worker][before.last_use]
    return SlotInUse(
        span=each.origin,
        worker=worker,
        line=line(each),
        slot=each.slot,
        content=content(before.posted.message),
        last_use=line(last),
        last_use_span=last.origin,
        taken=before.posted.origin,
    )
