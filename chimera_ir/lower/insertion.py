"""Puts the instructions that other passes have made around the compute operations of a lane."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from chimera_ir.ir.ids import Slot
from chimera_ir.ir.ops import Instruction, Operation, Recv, Send, WaitRecv, WaitSend
from chimera_ir.lower.comm import Traffic
from chimera_ir.lower.launched_moves import Moves
from chimera_ir.lower.sync import Insertions


def with_inserted(
    lane: Sequence[Operation],
    traffic: Traffic,
    slots: Iterable[Slot],
    insertions: Insertions,
    moves: Moves,
) -> list[Instruction]:
    """Returns the operations of a lane, or of turn 0 of a stream, with the instructions that other passes insert.

    ``traffic`` has the messages, ``slots`` the slot of each receive that is posted in the lane or turn, ``insertions``
    the sums and steps, and ``moves`` the instructions that move memory: they come first of those before an operation.
    An inserted instruction has the origin of the operation that it serves; in a stream that operation may be in another
    turn.
    """
    length = len(lane)
    posted: dict[int, list[Recv]] = defaultdict(list)
    postings = (posting for posting in traffic.postings if 0 <= posting.before < length)
    for (before, transfer), slot in zip(postings, slots, strict=True):
        posted[before].append(Recv(transfer.message, transfer.sender, slot, lane[transfer.used % length].origin))
    lines: list[Instruction] = []
    for place, operation in enumerate(lane):
        lines += moves.get(place, ())
        lines += posted.get(place, ())
        lines += insertions.before.get(place, ())
        for transfer in traffic.received.get(place, ()):
            lines.append(WaitRecv(transfer.message, operation.origin))
        for transfer in traffic.retired.get(place, ()):
            lines.append(WaitSend(transfer.message, lane[transfer.produced % length].origin))
        lines.append(operation)
        for transfer in traffic.sent.get(place, ()):
            lines.append(Send(transfer.message, transfer.receiver, operation.origin))
        lines += insertions.after.get(place, ())
    return [*lines, *moves.get(length, ())]
