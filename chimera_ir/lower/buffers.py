"""Gives each receive of a lane a buffer (a slot), such that there are only as many slots as are ever in use at once.

recv m0 s0->s1               recv m0 s0->s1 into 0
F m0 s1                      F m0 s1
recv m1 s0->s1               recv m1 s0->s1 into 1     (slot 0 is in use until B m0 s1 is over)
B m0 s1                      B m0 s1
F m1 s1                      F m1 s1
recv m2 s0->s1               recv m2 s0->s1 into 0
B m1 s1                      B m1 s1
F m2 s1                      F m2 s1
B m2 s1                      B m2 s1
"""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

from chimera_ir.ir.ids import Slot
from chimera_ir.ir.turns import Shelf, shelf
from chimera_ir.lower.comm import Posting


def slots(postings: Iterable[Posting]) -> tuple[Slot, ...]:
    """Returns the slot of each receive of a lane.

    All messages over one edge between stages share as few slots as possible. They take the slots in a circle if that
    needs no further slot, because then the lane repeats as its operations do.

    Activations stay in their slot until the backward of the same micro-batch and stage is over: the forward reads them,
    and may keep or send on the same memory. (That send is over by then, because the gradients that answer it have been
    waited for.) Gradients stay until the backward that reads them is over. Without backwards, activations stay until
    everything that is made from them on this worker is used and sent (`comm`).
    """
    shelves: dict[Shelf, list[tuple[int, int]]] = defaultdict(list)
    keys: list[Shelf] = []
    for before, transfer in postings:
        keys.append(shelf(transfer.message))
        shelves[keys[-1]].append((before, transfer.over))
    slots_of = {key: iter(_few(uses)) for key, uses in shelves.items()}
    return tuple([next(slots_of[key]) for key in keys])


def _few(uses: list[tuple[int, int]]) -> Sequence[Slot]:
    """Returns the slot of each message of a shelf, with as few slots as possible (a shelf: all slots for one edge).

    ``uses`` has for each message the place before which its receive is posted, and the place of its last use.
    """
    slots = _longest_free(uses)
    # The number of slots that the shelf needs if they are used round and round.
    posted = [before for before, _ in uses]
    size = max(bisect_right(posted, last_use) - number for number, (_, last_use) in enumerate(uses))
    return [Slot(number % size) for number in range(len(uses))] if size == max(slots) + 1 else _in_rings(slots)


def _longest_free(uses: list[tuple[int, int]]) -> list[Slot]:
    """Returns a slot for each message, always the one that has been free for longest.

    ``uses`` has for each message the place before which its receive is posted, and the place of its last use. A slot is
    free after the last use of its message. If ``uses`` repeats, the order in which slots are taken repeats as well.
    """
    free: deque[Slot] = deque()
    busy: list[tuple[int, Slot]] = []
    slots: list[Slot] = []
    for before, last_use in uses:
        while busy and busy[0][0] < before:
            free.append(heappop(busy)[1])
        slot = free.popleft() if free else Slot(len(busy))
        heappush(busy, (last_use, slot))
        slots.append(slot)
    return slots


def _in_rings(slots: Sequence[Slot]) -> Sequence[Slot]:
    """Renumbers the slots so that messages that come again in every period go round slots with successive numbers.

    If messages repeat with a period, each message is followed, a period later, by one in another slot. The slots that
    follow one another in this way are a ring, and get successive numbers. The period is found in the middle half of the
    messages; if there is none, the slots keep their numbers.
    """
    # How many messages ago each slot was taken before: this does not depend on the slots' numbers.
    latest: dict[Slot, int] = {}
    ago: list[int] = []
    for number, slot in enumerate(slots):
        ago.append(number - latest.get(slot, number))
        latest[slot] = number
    quarter = len(slots) // 4
    middle, end = range(quarter, len(slots) - quarter), len(slots) - quarter
    period = next(
        (p for p in range(1, quarter) if all(ago[n] == ago[n + p] for n in range(quarter, end - p))),
        None,
    )
    if period is None:
        return slots
    # The slot that each is followed by in the next period.
    following = {slots[number]: slots[number + period] for number in middle}
    if len({*following.values()}) < len(following) or len(following) <= max(slots):
        return slots
    numbers: dict[Slot, Slot] = {}
    for slot in sorted(following):
        while slot not in numbers:
            numbers[slot] = Slot(len(numbers))
            slot = following[slot]
    return [numbers[slot] for slot in slots]


def rings(
    postings: Iterable[Posting], length: int, period: int
) -> tuple[tuple[Slot, ...], tuple[tuple[Shelf, int], ...]]:
    """Returns the slot of each receive in turn 0 of a stream, and pairs of a shelf and its number of slots.

    A shelf is all slots of a worker for one edge between stages. Receives take its slots in a circle, so the slot
    follows from the message's number among those over the edge. Slot 0 goes to the first message about a micro-batch of
    turn 0 or later. From the posting of a message to its last use, a number of receives are posted, its own included; a
    shelf has as many slots as the largest such number.

    ``postings`` has the receives of turn 0, and may have others. The turn has ``length`` operations and ``period``
    micro-batches.
    """
    receives: dict[Shelf, list[Posting]] = defaultdict(list)
    keys: list[Shelf] = []
    for posting in postings:
        if 0 <= posting.before < length:
            keys.append(shelf(posting.transfer.message))
            receives[keys[-1]].append(posting)
    slots_of: dict[Shelf, Iterator[Slot]] = {}
    sizes: list[tuple[Shelf, int]] = []
    for key, messages in receives.items():
        # The receives posted from the posting of a message to its last use; each receive of a turn comes in every turn.
        size = max(
            sum((transfer.over - before) // length + 1 for before, _ in messages[number:])
            + sum((transfer.over - before) // length for before, _ in messages[:number])
            for number, (_, transfer) in enumerate(messages)
        )
        # The number, counted from the turn's first receive, of the message that gets slot 0.
        first = min(
            -(transfer.message.micros[0] // period) * len(messages) + number
            for number, (_, transfer) in enumerate(messages)
        )
        slots_of[key] = iter([Slot((number - first) % size) for number in range(len(messages))])
        sizes.append((key, size))
    return tuple(next(slots_of[key]) for key in keys), tuple(sizes)
