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

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from chimera_ir.flow.net import Net
from chimera_ir.ir.ids import Slot
from chimera_ir.ir.levels import Schedule
from chimera_ir.ir.sharing import Communicators
from chimera_ir.ir.streams import ProgramStream, ScheduleStream
from chimera_ir.ir.turns import Shelf, Turn, later, lines_before
from chimera_ir.lower.buffers import rings
from chimera_ir.lower.comm import AHEAD, Traffic, communicate
from chimera_ir.lower.insertion import with_inserted
from chimera_ir.lower.sync import Duration, Insertions
from chimera_ir.lower.updates import update


def lower_stream(
    stream: ScheduleStream, net: Net, ahead: int, duration: Duration, communicators: Communicators
) -> ProgramStream:
    """The program without end that runs a schedule without end; other arguments as in `lower.lower`.

    ``net`` is that of a view in whose middle is a turn of the steady state. Only that turn is put together.
    """
    traffics = communicate(net.schedule, ahead, communicators=communicators)
    number = net.schedule.header.updates // stream.header.per_turn // 2
    turns = _middle_turns(stream, net.schedule, traffics, list(update(net, duration)))
    return ProgramStream(
        stream.header,
        tuple(
            Turn(tuple(later(stream.header, line, -number) for line in turn.instructions), turn.slots) for turn in turns
        ),
    )


def with_messages(stream: ScheduleStream, schedule: Schedule) -> ProgramStream:
    """The stream with messages but without sums and steps, for its memory; ``schedule`` is a view as in `lower_stream`.

    It takes less time than the whole program. Micro-batches have the numbers of the view's middle turn.
    """
    traffics = communicate(schedule, AHEAD)
    turns = _middle_turns(stream, schedule, traffics, [Insertions({}, {})] * len(stream.turns))
    return ProgramStream(stream.header, tuple(turns))


def _middle_turns(
    stream: ScheduleStream, schedule: Schedule, traffics: Iterable[Traffic], inserted: Iterable[Insertions]
) -> Iterator[Turn]:
    """Yields the turn in the middle of each lane of a view, with the numbers of the view."""
    for lane, middle, insertions in zip(schedule.lanes, _middles(stream, schedule, traffics), inserted, strict=True):
        lines = with_inserted(lane, middle.places, middle.traffic, middle.slots, insertions)
        yield Turn(tuple(lines), middle.sizes)


class _Middle(NamedTuple):
    """The turn in the middle of a lane, by places, with the traffic of the lane; slots are as `rings` gives them."""

    places: range
    traffic: Traffic
    slots: tuple[Slot, ...]
    sizes: tuple[tuple[Shelf, int], ...]


def _middles(stream: ScheduleStream, schedule: Schedule, traffics: Iterable[Traffic]) -> Iterator[_Middle]:
    """Yields the turn in the middle of each lane of a schedule, which is a view of the stream."""
    header, updates = stream.header, schedule.header.updates
    number = updates // header.per_turn // 2
    for turn, traffic in zip(stream.turns, traffics, strict=True):
        before = lines_before(header, turn, number, updates)
        places = range(before, before + len(turn.instructions))
        yield _Middle(places, traffic, *rings(traffic.postings, places, number * header.period, header.period))
