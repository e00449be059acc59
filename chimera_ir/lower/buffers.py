"""Which buffer a message is received into: interval colouring, so that there are as many buffers as are ever in use."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from chimera_ir.ir.ids import Micro, Slot, Stage
from chimera_ir.lower.comm import Posting


class _Shelf:
    """The slots of one receiving stage and direction; one is free after the last use of what it holds."""

    def __init__(self) -> None:
        self._slots = 0
        self._free: list[Slot] = []
        self._busy: list[tuple[int, Slot]] = []

    @property
    def size(self) -> int:
        """How many slots there are."""
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
    """Slots are counted per receiving stage and direction: the messages of one shelf have equal shapes."""

    source: Stage
    target: Stage


def slots(postings: Iterable[Posting]) -> tuple[Slot, ...]:
    """The slot of each posted receive of a lane: as few of a shelf as are ever in use at the same time.

    They are used round and round where that takes no more of them, so that the lane repeats as its operations do.

    Activations stay until the backward of the same micro-batch and stage is done: the forward reads them, and what it
    keeps for the backward, or sends on, may be the same memory. (That send is over by then: the gradients that answer
    it have been waited for.) Gradients stay until the backward that reads them is done.
    """
    shelves: dict[_Key, list[tuple[int, int]]] = defaultdict(list)
    keys: list[_Key] = []
    for key, before, last_use in _uses(postings):
        keys.append(key)
        shelves[key].append((before, last_use))
    slots_of = {key: iter(_few(uses)) for key, uses in shelves.items()}
    return tuple([next(slots_of[key]) for key in keys])


def _few(uses: list[tuple[int, int]]) -> list[Slot]:
    """The slots of a shelf's messages."""
    shelf = _Shelf()
    lowest = [shelf.take(before, last_use) for before, last_use in uses]
    size = _ring(uses)
    return [Slot(number % size) for number in range(len(uses))] if size == shelf.size else lowest


def rings(postings: Iterable[Posting], within: Callable[[Micro], bool]) -> tuple[Slot, ...]:
    """The slot of each posted receive of a lane that repeats: the slots of a shelf are used one after the other.

    Round and round, so that the slot of a message follows from its number; slot 0 is that of the first one ``within``
    the instance. There are as many slots as are posted into while one of them is in use, that one included; only what
    lies within the instance counts, as the margin ends in a drain of its own.
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
    """How many slots a shelf needs, its messages in the order of their posting."""
    posted = [before for before, _ in uses]
    return max(bisect_right(posted, last_use) - number for number, (_, last_use) in enumerate(uses))


def _uses(postings: Iterable[Posting]) -> Iterator[tuple[_Key, int, int]]:
    """For each posted receive its shelf, the place before which it is posted and that of its last use."""
    for before, transfer in postings:
        _, source, target = transfer.message
        yield _Key(source, target), before, transfer.over
