"""Replay of a program event by event, with the times of one copy of the workers, on a cluster or with free messages.

All copies run in the same way, so only one is replayed; the others make its sums take longer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from chimera_ir.cost.durations import Durations, Unit, weighing
from chimera_ir.flow.engine import ends, ordered
from chimera_ir.garbage import uncollected
from chimera_ir.ir.levels import Header, OneLine, Program
from chimera_ir.ir.ops import Instruction, WaitAllReduce, WaitMove, WaitRecv, WaitSend, Worker
from chimera_ir.plural import counted
from chimera_ir.predict.events import Events, Role, events_of, with_shared_ports
from chimera_ir.predict.setting import Charges, Setting, operations_alone
from chimera_ir.predict.steady import longer_by, period, turn_of


class Event(NamedTuple):
    """An event with its times in seconds: an operation, step, post, wait, message (with its send), sum or notice.

    ``posted`` is the time at which both ends of a message, or all members of a sum, have posted it. Of a wait it is
    that of what it waits for, or its start if that is later; of any other event its start.
    """

    role: Role
    instruction: Instruction
    workers: tuple[Worker, ...]
    posted: float
    start: float
    end: float


@dataclass(frozen=True, slots=True, repr=False)
class Replay(OneLine):
    """All events of a program with their times from the start, in seconds or in the unit of the costs.

    ``conditions`` are the copies, the micro-batch size and the cluster, or the costs, in a few words. ``span`` is the
    end of the last event, ``seconds`` the time of an update: with a flush the span, without one that of the steady
    state.

    ``lanes`` has for each worker its computes, steps, posts and waits, one after another without a gap. ``messages``
    (from the first byte sent to the last byte received), ``sums`` over several ranks and ``moves`` are sorted by start.
    ``critical`` is the critical path: its events fill the time from 0 to the end, and each waits for the one before; of
    a message or a notice it has only the part that the next event waits for. ``events`` has all events with their
    waits; there a wire on a shared link has the seconds that it would take alone.
    """

    header: Header
    unit: Unit
    conditions: str
    seconds: float
    span: float
    lanes: tuple[tuple[Event, ...], ...]
    messages: tuple[Event, ...]
    sums: tuple[Event, ...]
    moves: tuple[Event, ...]
    critical: tuple[Event, ...]
    events: Events


def replay(program: Program, setting: Setting) -> Replay:
    """Replay of one copy of a verified program, in time linear in its instructions.

    Raises `ValueError` if the setting has another number of stages, or the program does not finish.
    """
    conditions = f"W={setting.copies} B={setting.micro_batch_size} on {setting.cluster.name}"
    with uncollected():
        return _replay(program.header, _events(program, setting), Unit.SECOND, conditions)


def free_replay(program: Program, durations: Durations) -> Replay:
    """Replay of a verified program whose operations take ``durations``; messages, sums and steps take no time."""
    header = program.header
    kinds = {operation.kind.letter for parts in program.parts for operation in parts.computes.lines}
    conditions = f"{durations.summary(header, kinds)}{weighing(header)}, free messages"
    with uncollected():
        return _replay(header, events_of(program, operations_alone(header, durations)), durations.unit, conditions)


def pace(program: Program, setting: Setting) -> float:
    """Seconds from an update to the next in the long run, where updates follow one another without a barrier.

    At most the seconds of a replay, and equal if one lane begins first and ends last. Errors as in `replay`.
    """
    with uncollected():
        events = with_shared_ports(_events(program, setting))
        return period(turn_of(program.header, events, _times(events).order))


def expected(program: Program, setting: Setting) -> float:
    """Mean seconds of an update in the long run, where operations and steps scatter as they did in the profile.

    It is `pace` plus the seconds that noise adds (`longer_by`). Errors as in `replay`.
    """
    with uncollected():
        events, charges = with_shared_ports(_events(program, setting)), Charges(program.header, setting)
        turn = turn_of(program.header, events, _times(events).order)
        nodes = [events.nodes[number] for number in turn.events]
        noise = [charges.noise(node.instruction) if node.seconds else 0.0 for node in nodes]
        joint = [node.role is Role.SUM for node in nodes]
        return period(turn) + (longer_by(turn, noise, joint, setting.copies) if any(noise) else 0.0)


def _events(program: Program, setting: Setting) -> Events:
    if len(setting.stages) != program.header.stages:
        raise ValueError(
            f"costs are given of {counted(len(setting.stages), 'stage')}, and the program has {program.header.stages}"
        )
    return events_of(program, Charges(program.header, setting))


def _replay(header: Header, alone: Events, unit: Unit, conditions: str) -> Replay:
    events = with_shared_ports(alone)
    times = _times(events)
    span = max(times.ends, default=0.0)
    timed = [_event(events, times, number) for number in range(len(events.nodes))]
    return Replay(
        header=header,
        unit=unit,
        conditions=conditions,
        seconds=period(turn_of(header, events, times.order)) if header.asynchronous else span,
        span=span,
        lanes=tuple(tuple(timed[number] for number in lane[1:]) for lane in events.lanes),
        messages=_by_start(_whole(wire, flight) for wire, flight in pairwise(timed) if wire.role is Role.WIRE),
        sums=_by_start(event for event in timed if event.role is Role.SUM),
        moves=_by_start(event for event in timed if event.role is Role.MOVE),
        critical=tuple(_critical(timed, times)),
        events=alone,
    )


class _EventTimes(NamedTuple):
    """Starts and ends of all events; event n begins when ``decided[n]`` ends, or waits for nothing if that is n.

    ``order`` has every event after all that it waits for.
    """

    starts: Sequence[float]
    ends: Sequence[float]
    decided: Sequence[int]
    order: Sequence[int]


def _times(events: Events) -> _EventTimes:
    before, order = events.before, ordered(events.before)
    if len(order) < len(before):
        raise ValueError("the program does not finish; only a verified one can be replayed")
    # An event begins when the last of the events that it waits for ends, which therefore decides its start.
    ended = ends(order, before, [node.seconds for node in events.nodes])
    decided = [max(needs, key=ended.__getitem__) if needs else number for number, needs in enumerate(before)]
    starts = [ended[last] if needs else 0.0 for last, needs in zip(decided, before, strict=True)]
    return _EventTimes(starts, ended, decided, order)


def _event(events: Events, times: _EventTimes, number: int) -> Event:
    """Event ``number`` with its times; a wait begins when the event before it on its lane ends."""
    role, instruction, workers, _ = events.nodes[number]
    start, end = times.starts[number], times.ends[number]
    posted = max((times.ends[other] for other in events.posted.get(number, ())), default=start)
    if role is Role.WAIT:
        start = times.ends[events.before[number][0]]
        posted = max(start, posted)
    return Event(role, instruction, workers, posted, start, end)


def _by_start(events: Iterable[Event]) -> tuple[Event, ...]:
    return tuple(sorted(events, key=lambda event: (event.start, event.workers)))


def _whole(wire: Event, flight: Event) -> Event:
    return wire._replace(end=flight.end)


def _critical(events: Sequence[Event], times: _EventTimes) -> list[Event]:
    """The critical events from 0 to the end of the last one, without waits; a wire and its flight are one event."""
    if not events:
        return []
    # Back from the event that ends last, always to the event that decides the start.
    number = max(range(len(events)), key=times.ends.__getitem__)
    path = [number]
    while times.decided[number] != number:
        number = times.decided[number]
        path.append(number)
    critical: list[Event] = []
    for event in (events[number]._replace(start=times.starts[number]) for number in reversed(path)):
        last = critical[-1] if critical else event
        if last.role is Role.WIRE and event.role is Role.FLIGHT and last.instruction == event.instruction:
            event = _whole(critical.pop(), event)
        if event.end > event.start:
            critical.append(event)
    return critical


# Idle time of workers in a replay, by cause.


class Cause(Enum):
    """Cause of a worker's idle time.

    ``BUBBLE``: another worker has not yet posted its end of a message, launched a sum, or finished. ``MESSAGE`` and
    ``SUM``: all have, and it is under way. ``MOVE``: the link to the host is busy with a move of the worker.
    """

    BUBBLE = "bubble"
    MESSAGE = "waiting for a message"
    SUM = "waiting for a sum"
    MOVE = "waiting for the host"


_CAUSES: dict[type[Instruction], Cause] = {
    WaitSend: Cause.MESSAGE,
    WaitRecv: Cause.MESSAGE,
    WaitAllReduce: Cause.SUM,
    WaitMove: Cause.MOVE,
}
"""The cause of idle time by the instruction that waits, from when all participants have posted what it waits for."""


class Stretch(NamedTuple):
    """A stretch of idle time of a worker, in seconds from the start."""

    cause: Cause
    start: float
    end: float


def idle(replay: Replay) -> tuple[tuple[Stretch, ...], ...]:
    """Idle times of each worker in order, between its operations and after the last of them."""
    return tuple(tuple(_idle(lane, replay.span)) for lane in replay.lanes)


def _idle(lane: tuple[Event, ...], span: float) -> Iterator[Stretch]:
    for event in lane:
        if event.role is Role.WAIT:
            cause = _CAUSES[type(event.instruction)]
            yield from _stretches((Cause.BUBBLE, event.start, event.posted), (cause, event.posted, event.end))
    yield from _stretches((Cause.BUBBLE, lane[-1].end if lane else 0.0, span))


def _stretches(*parts: tuple[Cause, float, float]) -> Iterator[Stretch]:
    yield from (Stretch(cause, start, end) for cause, start, end in parts if end > start)
