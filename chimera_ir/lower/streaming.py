"""The pass from a schedule without end to a program without end: a turn is lowered among turns like it, and cut out.

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

Before the turn and after it there are more than twice as many turns as are under way at once, so it is one of the
steady state.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import gcd
from operator import itemgetter
from typing import NamedTuple

from chimera_ir.ir.ids import Slot
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.ops import Compute, Message
from chimera_ir.ir.sharing import Communicators
from chimera_ir.ir.streams import ProgramStream, ScheduleStream
from chimera_ir.ir.turns import Shelf, Turn, later, lines_before, shelf, updates_a_turn
from chimera_ir.lower.buffers import rings
from chimera_ir.lower.comm import AHEAD, Traffic, communicate
from chimera_ir.lower.insertion import with_inserted
from chimera_ir.lower.sync import Duration, Insertions
from chimera_ir.lower.updates import update


def lower_stream(stream: ScheduleStream, ahead: int, duration: Duration, communicators: Communicators) -> ProgramStream:
    """The program without end that runs a schedule without end; arguments as in `lower.lower`.

    ``duration`` is called with operations of many turns, and gives the same in each.
    """
    # The first and last turns lack messages and updates. So the schedule is made long enough for the turn in its middle
    # to have all of them; then only that turn is put together.
    turn = 2 * _span(stream) + 2
    wide = _Wide(stream, stream.view((2 * turn + 1) * updates_a_turn(stream.header)), turn)
    traffics = communicate(wide.schedule, ahead, communicators=communicators)
    return wide.lowered(traffics, list(update(wide.schedule, duration)))


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
    return _Wide(stream, schedule, schedule.header.micro_batches // schedule.header.period // 2).messages()


class _Wide:
    """A schedule of a stream that is long enough for its middle turn, number ``turn``, to be in the steady state."""

    def __init__(self, stream: ScheduleStream, schedule: Schedule, turn: int) -> None:
        self._header = stream.header
        self.schedule, self._turn = schedule, turn
        self._places = [self._middle(turn) for turn in stream.turns]

    def lowered(self, traffics: Iterable[Traffic], insertions: Iterable[Insertions]) -> ProgramStream:
        """The program of which the turn in the middle, with messages and insertions, is the first turn."""
        lanes = zip(self.schedule.lanes, self._places, traffics, insertions, strict=True)
        turns: list[Turn] = []
        for lane, places, traffic, inserted in lanes:
            slots, sizes = self._rings(traffic, places)
            instructions = with_inserted(lane, places, traffic, slots, inserted)
            turns.append(Turn(tuple(later(self._header, line, -self._turn) for line in instructions), sizes))
        return ProgramStream(self._header, tuple(turns))

    def messages(self) -> Iterator[Messages]:
        """Yields the messages of each lane, from its start to the end of the turn in the middle."""
        for places, traffic in zip(self._places, communicate(self.schedule, AHEAD), strict=True):
            slots, sizes = self._rings(traffic, places)
            turn = [posting.transfer.message for posting in traffic.postings if posting.before in places]
            yield Messages(places.stop, _largest(turn, slots, dict(sizes)), _under_way(traffic, places))

    def _rings(self, traffic: Traffic, places: range) -> tuple[tuple[Slot, ...], tuple[tuple[Shelf, int], ...]]:
        """The slots of the turn in the middle of a lane, as `rings` gives them."""
        return rings(traffic.postings, places, self._turn * self._header.period, self._header.period)

    def _middle(self, turn: tuple[Compute, ...]) -> range:
        """The places of the turn in the middle of a lane."""
        before = lines_before(self._header, Turn(turn), self._turn, self.schedule.header.updates)
        return range(before, before + len(turn))


def _span(stream: ScheduleStream) -> int:
    """The number of turns over which the micro-batches and versions in one turn of all lanes spread."""
    period, per_turn = stream.header.period, updates_a_turn(stream.header)
    operations = [operation for turn in stream.turns for operation in turn]
    turns = [micro // period for operation in operations for micro in operation.micros]
    turns += [(operation.version or 0) // per_turn for operation in operations]
    return max(turns, default=0) - min(turns, default=0)


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
