"""Which buffer a message is received into: interval colouring, so that there are as many buffers as are ever in use."""

from collections import defaultdict
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from chimera_ir.ir.ids import Micro, Slot, Stage
from chimera_ir.ir.ops import Backward, Compute
from chimera_ir.lower.comm import Posting


class _Shelf:
    """The slots of one receiving stage and direction; one is free after the last use of what it holds."""

    def __init__(self) -> None:
        self._slots = 0
        self._free: list[Slot] = []
        self._busy: list[tuple[int, Slot]] = []

    def take(self, before: int, last_use: int) -> Slot:
        """The lowest slot free before the operation at ``before``, kept until the one at ``last_use`` is done."""
        while self._busy and self._busy[0][0] < before:
            heappush(self._free, heappop(self._busy)[1])
        if not self._free:
            heappush(self._free, Slot(self._slots))
            self._slots += 1
        slot = heappop(self._free)
        heappush(self._busy, (last_use, slot))
        return slot


class _Key(NamedTuple):
    """Slots are counted per receiving stage and direction: the messages of one shelf have equal shapes."""

    source: Stage
    target: Stage


def slots(lane: tuple[Compute, ...], postings: Iterable[Posting]) -> tuple[Slot, ...]:
    """The slot of each posted receive of a lane.

    Activations stay until the backward of the same micro-batch and stage is done: the forward reads them, and what it
    keeps for the backward, or sends on, may be the same memory. (That send is over by then: the gradients that answer
    it have been waited for.) Gradients stay until the backward that reads them is done.
    """
    done: dict[tuple[Micro, Stage], int] = {}
    for place, operation in enumerate(lane):
        if isinstance(operation, Backward):
            done.update(((micro, operation.stage), place) for micro in operation.micros)
    shelves: dict[_Key, _Shelf] = defaultdict(_Shelf)
    taken: list[Slot] = []
    for before, transfer in postings:
        message = transfer.message
        last_use = max(done[micro, message.target] for micro in message.micros)
        taken.append(shelves[_Key(message.source, message.target)].take(before, last_use))
    return tuple(taken)
