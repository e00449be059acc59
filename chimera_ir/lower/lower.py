"""From a schedule to a program: the compute operations keep their order; all else is put in between.

    F m0 s1                     recv m0 s0->s1 from w0 into 0
    B m0 s1                     wait recv m0 s0->s1
                                F m0 s1
                                B m0 s1
                                send m0 s1->s0 to w0
                                all_reduce s1
                                wait send m0 s1->s0
                                wait all_reduce s1
                                step s1

The policies stand with the passes: `comm` (messages), `buffers` (slots), `sync` (gradients).
"""

from collections import defaultdict
from collections.abc import Iterator

from chimera_ir.ir.ids import Stage
from chimera_ir.ir.levels import Program, Schedule
from chimera_ir.ir.ops import (
    NOWHERE,
    AllReduce,
    Compute,
    Instruction,
    Recv,
    Send,
    Step,
    WaitAllReduce,
    WaitRecv,
    WaitSend,
)
from chimera_ir.lower.buffers import slots
from chimera_ir.lower.comm import Traffic, communicate
from chimera_ir.lower.sync import Duration, Launch, synchronise
from chimera_ir.source import Span


def _alike(_: Compute) -> int:
    return 1


def lower(schedule: Schedule, ahead: int = 1, duration: Duration = _alike) -> Program:
    """The program that runs a schedule.

    Afterwards every hand-over between workers is one message, sent, received and waited for at both ends, in a slot of
    its own while it is needed, and every held stage is summed and stepped once. What is added has the origin of the
    operation it serves.

    Parameters
    ----------
    schedule
        Complete, placed and acyclic (`verify_schedule`), one micro-batch per operation.
    ahead
        How many operations before its use a receive is posted, at least 0.
    duration
        How long operations take, in any unit: it decides where a bubble is (`sync`).

    Raises
    ------
    ValueError
        If ``ahead`` is negative.
    """
    if ahead < 0:
        raise ValueError("ahead must be at least 0")
    traffics = communicate(schedule, ahead)
    launches = synchronise(schedule, duration)
    lanes = zip(schedule.lanes, traffics, launches, strict=True)
    return Program(schedule.header, tuple(tuple(_lane(*lane)) for lane in lanes))


def _lane(lane: tuple[Compute, ...], traffic: Traffic, launches: tuple[Launch, ...]) -> Iterator[Instruction]:
    posted = _posted(lane, traffic)
    launched: dict[int, list[Stage]] = defaultdict(list)
    for launch in launches:
        launched[launch.after].append(launch.stage)
    origin = {operation.stage: operation.origin for operation in lane}

    yield from (AllReduce(stage, origin.get(stage, NOWHERE)) for stage in launched.get(-1, ()))
    for place, operation in enumerate(lane):
        yield from posted.get(place, ())
        if place in traffic.received:
            yield WaitRecv(traffic.received[place].message, operation.origin)
            yield from _taken(lane, traffic, place)
        yield operation
        if place in traffic.sent:
            sent = traffic.sent[place]
            yield Send(sent.message, sent.receiver, operation.origin)
        yield from (AllReduce(stage, origin.get(stage, NOWHERE)) for stage in launched.get(place, ()))
    for transfer in traffic.untold:
        yield WaitSend(transfer.message, lane[transfer.produced].origin)
    yield from _updates(launches, origin)


def _posted(lane: tuple[Compute, ...], traffic: Traffic) -> dict[int, list[Recv]]:
    """The receives to post before each operation."""
    posted: dict[int, list[Recv]] = defaultdict(list)
    for (before, transfer), slot in zip(traffic.postings, slots(lane, traffic.postings), strict=True):
        posted[before].append(Recv(transfer.message, transfer.sender, slot, lane[transfer.used].origin))
    return posted


def _taken(lane: tuple[Compute, ...], traffic: Traffic, place: int) -> Iterator[WaitSend]:
    for transfer in traffic.taken.get(place, ()):
        yield WaitSend(transfer.message, lane[transfer.produced].origin)


def _updates(launches: tuple[Launch, ...], origin: dict[Stage, Span]) -> Iterator[Instruction]:
    for launch in launches:
        where = origin.get(launch.stage, NOWHERE)
        yield WaitAllReduce(launch.stage, where)
        yield Step(launch.stage, where)
