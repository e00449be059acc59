"""Idle time of workers in a replay, by cause."""

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from chimera_ir.ir.ids import Version, WeightGroup
from chimera_ir.ir.ops import AllReduce, Message, Send, WaitAllReduce, WaitRecv, WaitSend
from chimera_ir.predict.events import Role
from chimera_ir.predict.replay import Event, Replay


class Cause(Enum):
    """Cause of a worker's idle time.

    ``BUBBLE``: another worker has not yet posted its end of a message, launched a sum, or finished. ``MESSAGE``: both
    ends have posted the message, and it is on its way. ``SUM``: all members have launched the sum, and it is running.
    """

    BUBBLE = "bubble"
    MESSAGE = "waiting for a message"
    SUM = "waiting for a sum"


class Stretch(NamedTuple):
    """A stretch of idle time of a worker, in seconds from the start."""

    cause: Cause
    start: float
    end: float


def idle(replay: Replay) -> tuple[tuple[Stretch, ...], ...]:
    """Idle times of each worker in order: between its operations, and after the last of them."""
    sent = {event.instruction.message: event.posted for event in replay.messages if isinstance(event.instruction, Send)}
    launched = {
        (event.instruction.group, event.instruction.version): event.posted
        for event in replay.sums
        if isinstance(event.instruction, AllReduce)
    }
    return tuple(tuple(_idle(lane, sent, launched, replay.span)) for lane in replay.lanes)


def shares(replay: Replay) -> dict[Cause, float]:
    """Share of each cause in the time of all workers."""
    total = replay.span * len(replay.lanes)
    share_of = dict.fromkeys(Cause, 0.0)
    for lane in idle(replay):
        for cause, start, end in lane:
            share_of[cause] += (end - start) / total
    return share_of


_Sent = Mapping[Message, float]
_Launched = Mapping[tuple[WeightGroup, Version | None], float]


def _idle(lane: tuple[Event, ...], sent: _Sent, launched: _Launched, span: float) -> Iterator[Stretch]:
    for event in lane:
        if event.role is Role.WAIT and event.end > event.start:
            cause, since = _awaited(event, sent, launched)
            under_way = min(max(since, event.start), event.end)
            yield from _stretches((Cause.BUBBLE, event.start, under_way), (cause, under_way, event.end))
    yield from _stretches((Cause.BUBBLE, lane[-1].end if lane else 0.0, span))


def _awaited(wait: Event, sent: _Sent, launched: _Launched) -> tuple[Cause, float]:
    """Cause of a wait, and the time at which its message or sum began to be under way."""
    match wait.instruction:
        case WaitRecv(message) | WaitSend(message):
            return Cause.MESSAGE, sent[message]
        case WaitAllReduce(group, version=version):
            return Cause.SUM, launched[group, version]
        case _:
            raise ValueError(f"{wait.instruction} is no wait")


def _stretches(*parts: tuple[Cause, float, float]) -> Iterator[Stretch]:
    yield from (Stretch(cause, start, end) for cause, start, end in parts if end > start)
