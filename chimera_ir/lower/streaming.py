"""The pass from a schedule without end to a program without end: one turn is lowered, among others.

worker 0:                     worker 0:
  F m s0 v-1                    recv m-1 s1->s0 from w1 into 0 of 1
  B m-1 s0 v-2                  wait all_reduce s0 v-1
                                stash s0 v-2
                                step s0 v-1
                                F m s0 v-1
                                send m s0->s1 to w1
                                wait recv m-1 s1->s0
                                wait send m-1 s0->s1
                                B m-1 s0 v-2
                                drop s0 v-2
                                all_reduce s0 v

It is the turn in the middle of the view that is verified, because that turn is one of the steady state.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import gcd
from operator import itemgetter
from typing import NamedTuple

from chimera_ir.flow.net import Net
from chimera_ir.ir.ids import Slot
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.ops import Message
from chimera_ir.ir.sharing import Communicators
from chimera_ir.ir.streams import ProgramStream, ScheduleStream
from chimera_ir.ir.turns import Shelf, Turn, later, lines_before, shelf, updates_a_turn
from chimera_ir.lower.buffers import rings
from chimera_ir.lower.comm import AHEAD, Traffic, communicate
from chimera_ir.lower.insertion import with_inserted
from chimera_ir.lower.sync import Duration
from chimera_ir.lower.updates import update


def lower_stream(
    stream: ScheduleStream, net: Net, ahead: int, duration: Duration, communicators: Communicators
) -> ProgramStream:
    """The program without end that runs a schedule without end; other arguments as in `lower.lower`.

    ``net`` is that of a view in whose middle is a turn of the steady state. Only that turn is put together.
    """
    schedule = net.schedule
    number = schedule.header.updates // updates_a_turn(stream.header) // 2
    middles = _middles(stream, schedule, communicate(schedule, ahead, communicators=communicators))
    turns: list[Turn] = []
    for lane, middle, insertions in zip(schedule.lanes, middles, list(update(net, duration)), strict=True):
        lines = with_inserted(lane, middle.places, middle.traffic, middle.slots, insertions)
        turns.append(Turn(tuple(later(stream.header, line, -number) for line in lines), middle.sizes))
    return ProgramStream(stream.header, tuple(turns))


class Messages(NamedTuple):
    """The messages of a lane in a turn of the steady state.

    Attributes
    ----------
    end
        The place behind the turn in the lane.
    slots
        The slots of each shelf (stage and direction of receives): for each slot the most micro-batches of a message.
    under_way
        The micro-batches of messages that have been sent and not yet waited for, by shelf: first the number when the
        turn begins, then the changes within the turn, in order.
    """

    end: int
    slots: Sequence[tuple[Shelf, tuple[int, ...]]]
    under_way: Iterable[tuple[Shelf, int]]


def messages_of(stream: ScheduleStream, schedule: Schedule) -> Iterator[Messages]:
    """Yields the messages of each lane of a program, in less time than `lower_stream` takes.

    ``schedule`` is a view of the stream with as many updates as `elaborate` shows, so that the turn in its middle is
    one of the steady state.
    """
    for places, traffic, slots, sizes in _middles(stream, schedule, communicate(schedule, AHEAD)):
        turn = [posting.transfer.message for posting in traffic.postings if posting.before in places]
        yield Messages(places.stop, _largest(turn, slots, dict(sizes)), _under_way(traffic, places))


class _Middle(NamedTuple):
    """The turn in the middle of a lane, by places, with the traffic of the lane; slots are as `rings` gives them."""

    places: range
    traffic: Traffic
    slots: tuple[Slot, ...]
    sizes: tuple[tuple[Shelf, int], ...]


def _middles(stream: ScheduleStream, schedule: Schedule, traffics: Iterable[Traffic]) -> Iterator[_Middle]:
    """Yields the turn in the middle of each lane of a schedule, which is a view of the stream."""
    header, updates = stream.header, schedule.header.updates
    number = updates // updates_a_turn(header) // 2
    for turn, traffic in zip(stream.turns, traffics, strict=True):
        before = lines_before(header, Turn(turn), number, updates)
        places = range(before, before + len(turn))
        yield _Middle(places, traffic, *rings(traffic.postings, places, number * header.period, header.period))


def _largest(
    messages: Sequence[Message], slots: Sequence[Slot], sizes: Mapping[Shelf, int]
) -> list[tuple[Shelf, tuple[int, ...]]]:
    """Returns for each shelf the most micro-batches that a message has in each of its slots, in any turn.

    ``messages`` and ``slots`` are those of one turn, ``sizes`` the numbers of slots. The slots of a shelf are used
    round and round: with n messages a turn and k slots, the message in slot i has slot (i + n) % k in the next turn. In
    the long run it is in all slots whose number leaves the same remainder as i when divided by the greatest common
    divisor of n and k, and in no other.
    """
    counts = Counter(map(shelf, messages))
    steps = {key: gcd(counts[key], size) for key, size in sizes.items()}
    most: dict[tuple[Shelf, int], int] = defaultdict(int)
    for message, slot in zip(messages, slots, strict=True):
        key = shelf(message)
        residue = key, slot % steps[key]
        most[residue] = max(most[residue], len(message.micros))
    return [(key, tuple(most[key, slot % steps[key]] for slot in range(size))) for key, size in sizes.items()]


def _under_way(traffic: Traffic, turn: range) -> Iterator[tuple[Shelf, int]]:
    """Yields the number of micro-batches under way from a lane, by shelf: when ``turn`` begins, then changes in it."""
    changes = (
        (place, shelf(transfer.message), sign * len(transfer.message.micros))
        for sign, transfers in ((-1, traffic.retired), (1, traffic.sent))
        for place in transfers
        if place < turn.stop
        for transfer in transfers[place]
    )
    at_start: Counter[Shelf] = Counter()
    within: list[tuple[int, Shelf, int]] = []
    for place, key, change in changes:
        if place < turn.start:
            at_start[key] += change
        else:
            within.append((place, key, change))
    yield from at_start.items()
    yield from ((key, change) for _, key, change in sorted(within, key=itemgetter(0)))
