"""The buffer of each receive: interval colouring with the fewest slots, as many as are ever in use at the same time.

recv m0 s0->s1               recv m0 s0->s1 into 0
F m0 s1                      F m0 s1
recv m1 s0->s1               recv m1 s0->s1 into 1     (slot 0 is in use until B m0 s1 is done)
B m0 s1                      B m0 s1
F m1 s1                      F m1 s1
recv m2 s0->s1               recv m2 s0->s1 into 0
B m1 s1                      B m1 s1
F m2 s1                      F m2 s1
B m2 s1                      B m2 s1
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from chimera_ir.ir.ids import Micro, Slot, Stage
from chimera_ir.lower.comm import Posting


class _Shelf:
    """The slots of one receiving stage and direction; a slot is free after the last use of its message."""

    def __init__(self) -> None:
        self._slots = 0
        self._free: list[Slot] = []
        self._busy: list[tuple[int, Slot]] = []

    @property
    def size(self) -> int:
        """The number of slots."""
        return self._slots

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
    """A receiving stage and a direction. Slots are counted per shelf, as all messages of a shelf have one shape."""

    source: Stage
    target: Stage


def slots(postings: Iterable[Posting]) -> tuple[Slot, ...]:
    """The slot of each posted receive of a lane, with the fewest slots per shelf.

    The slots of a shelf are used in turn where that takes no more slots, so that the lane repeats as its operations do.

    Activations stay until the backward of the same micro-batch and stage is done: the forward reads them, and the
    memory that it keeps for the backward, or sends on, may be the same. (The send is over by then, because the
    gradients that answer it have been waited for.) Gradients stay until the backward that reads them is done.
    """
    shelves: dict[_Key, list[tuple[int, int]]] = defaultdict(list)
    keys: list[_Key] = []
    for key, before, last_use in _uses(postings):
        keys.append(key)
        shelves[key].append((before, last_use))
    slots_of = {key: iter(_few(uses)) for key, uses in shelves.items()}
    return tuple([next(slots_of[key]) for key in keys])


def _few(uses: list[tuple[int, int]]) -> list[Slot]:
    """The slots of the messages of one shelf, in the order of their posting."""
    shelf = _Shelf()
    lowest = [shelf.take(before, last_use) for before, last_use in uses]
    size = _ring(uses)
    return [Slot(number % size) for number in range(len(uses))] if size == shelf.size else lowest


def rings(postings: Iterable[Posting], within: Callable[[Micro], bool]) -> tuple[Slot, ...]:
    """The slot of each posted receive of a lane that repeats: the slots of a shelf are used in turn.

    So the slot of a message follows from the number of the message in its shelf. The first message ``within`` the
    instance has slot 0. A shelf has as many slots as receives are posted from the posting of a message to its last use,
    its own included. Only messages within the instance count, because the margin ends in a drain of its own.
    """
    listed = list(postings)
    numbers: list[tuple[_Key, int]] = []
    count: Counter[_Key] = Counter()
    first: dict[_Key, int] = {}
    shelves: dict[_Key, list[tuple[int, int]]] = defaultdict(list)
    for (key, before, last_use), posting in zip(_uses(listed), listed, strict=True):
        if within(posting.transfer.message.micros[0]):
            first.setdefault(key, count[key])
            shelves[key].append((before, last_use))
        numbers.append((key, count[key]))
        count[key] += 1
    sizes = {key: _ring(uses) for key, uses in shelves.items()}
    return tuple(Slot((number - first.get(key, 0)) % sizes.get(key, 1)) for key, number in numbers)


def _ring(uses: list[tuple[int, int]]) -> int:
    """The number of slots that a shelf needs if they are used in turn; ``uses`` are in the order of the postings."""
    posted = [before for before, _ in uses]
    return max(bisect_right(posted, last_use) - number for number, (_, last_use) in enumerate(uses))


def _uses(postings: Iterable[Posting]) -> Iterator[tuple[_Key, int, int]]:
    """The shelf of each posted receive, the place before which it is posted, and the place of its last use."""
    for before, transfer in postings:
        _, source, target = transfer.message
        yield _Key(source, target), before, transfer.over
