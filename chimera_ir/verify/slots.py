"""Rule "slots", a part of "messages": a receive is posted into a buffer only when its old content is not needed.

A receive may write from the moment it is posted. A slot with activations is free after two events: the last backward of
the same micro-batches and stage, which needs what the forward kept, and the end of the send of the forward's result,
which may be in the same memory. If the next stage is on the same worker, its result may be there, too, and so on. A
slot with gradients is free after the backward that reads them.
"""

from collections import Counter
from collections.abc import Iterator

from chimera_ir.diagnostics.catalogue.program import SlotInUse, SlotTooHigh
from chimera_ir.diagnostics.model import Diagnostic
from chimera_ir.flow.flow import Flow
from chimera_ir.ir.ids import Slot, Worker
from chimera_ir.ir.kinds import Readers
from chimera_ir.ir.levels import Header, Program
from chimera_ir.ir.ops import Crossing, Message, Recv
from chimera_ir.ir.text.printer import line
from chimera_ir.verify.index import key
from chimera_ir.verify.messages import MessagePlaces
from chimera_ir.verify.wording import content


def slots(program: Program, cells: Flow, places: MessagePlaces) -> Iterator[Diagnostic]:
    """Yields diagnostics of receives into a slot that is in use, or whose number is not below the number of messages.

    The program has no errors by the rule "messages". ``cells`` is its data flow (`index.cells`); ``places`` are the
    places of its messages (`messages.places`).
    """
    for number, parts in enumerate(program.parts):
        worker = Worker(number)
        edges = [recv.message.edge for recv in parts.recvs.lines]
        received = Counter(edges)
        held: dict[tuple[Crossing, Slot], tuple[Recv, int]] = {}
        for (place, recv), edge in zip(parts.recvs, edges, strict=True):
            messages = received[edge]
            if not 0 <= recv.slot < messages:
                yield SlotTooHigh(recv.origin, worker, line(recv, program.header), recv.slot, messages - 1)
            shelf = (edge, recv.slot)
            before = held.get(shelf)
            if before is not None and before[1] >= place:
                yield _in_use(program, worker, recv, *before)
            held[shelf] = (recv, _last_use(program.header, worker, cells, places, recv.message))


def _last_use(header: Header, worker: Worker, cells: Flow, places: MessagePlaces, message: Message) -> int:
    """Returns the last place in the receiver's lane at which the content of a message is still needed in its slot."""
    last = cells.last_use(message)
    if message.value.readers is not Readers.FED:
        return last
    # Forwards on the same worker may pass the same memory on: follow it to the stages that send.
    workers, stages = header.pipe_of[message.micros[0]].workers, [message.target]
    for stage in stages:
        for target in header.readers(message.value, stage):
            made = Message(message.micros, stage, target, message.value)
            if workers[target] == worker:
                stages.append(target)
                last = max(last, cells.consumer(made))
            else:
                last = max(last, places.retired[key(header, made)])
    return last


def _in_use(program: Program, worker: Worker, recv: Recv, before: Recv, last_use: int) -> Diagnostic:
    last = program.lanes[worker][last_use]
    return SlotInUse(
        span=recv.origin,
        worker=worker,
        line=line(recv, program.header),
        slot=recv.slot,
        content=content(program.header, before.message),
        last_use=line(last, program.header),
        last_use_span=last.origin,
        first_use_span=before.origin,
    )
