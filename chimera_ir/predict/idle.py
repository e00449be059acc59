"""Why workers are idle in a replay, and for how long."""

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from chimera_ir.ir.ids import Stage, Version
from chimera_ir.ir.ops import AllReduce, Message, Send, WaitAllReduce, WaitRecv, WaitSend
from chimera_ir.predict.events import Role
from chimera_ir.predict.replay import Event, Replay


class Cause(Enum):
    """What an idle worker waits for.

    ``BUBBLE``: that others come so far as to post their end of a message or a sum, or to end. ``MESSAGE``: that one
    arrives which both ends have posted. ``SUM``: that one is over which all members have launched.
    """

    BUBBLE = "bubble"
    MESSAGE = "waiting for a message"
    SUM = "waiting for a sum"


class Stretch(NamedTuple):
    """Idle time of a worker, in seconds from the start."""

    cause: Cause
    start: float
    end: float


def idle(replay: Replay) -> tuple[tuple[Stretch, ...], ...]:
    """For each worker its idle time in order: what lies between its operations, and after them until all is over."""
    sent = {each.what.message: each.posted for each in replay.messages if isinstance(each.what, Send)}
    launched = {
        (each.what.stage, each.what.version): each.posted for each in replay.sums if isinstance(each.what, AllReduce)
    }
    return tuple(tuple(_idle(lane, sent, launched, replay.span)) for lane in replay.lanes)


def shares(replay: Replay) -> dict[Cause, float]:
    """Each cause's share of all workers' time."""
    total = replay.span * len(replay.lanes)
    found = dict.fromkeys(Cause, 0.0)
    for lane in idle(replay):
        for cause, start, end in lane:
            found[cause] += (end - start) / total
    return found


_Sent = Mapping[Message, float]
_Launched = Mapping[tuple[Stage, Version | None], float]


def _idle(lane: tuple[Event, ...], sent: _Sent, launched: _Launched, span: float) -> Iterator[Stretch]:
    for each in lane:
        if each.role is Role.WAIT and each.end > each.start:
            cause, since = _awaited(each, sent, launched)
            turn = min(max(since, each.start), each.end)
            yield from _stretches((Cause.BUBBLE, each.start, turn), (cause, turn, each.end))
    yield from _stretches((Cause.BUBBLE, lane[-1].end if lane else 0.0, span))


def _awaited(wait: Event, sent: _Sent, launched: _Launched) -> tuple[Cause, float]:
    """What a wait is for, and since when that was under way."""
    match wait.what:
        case WaitRecv(message) | WaitSend(message):
            return Cause.MESSAGE, sent[message]
        case WaitAllReduce(stage, version=version):
            return Cause.SUM, launched[stage, version]
        case _:
            raise ValueError(f"{wait.what} is no wait")


def _stretches(*parts: tuple[Cause, float, float]) -> Iterator[Stretch]:
    yield from (Stretch(cause, start, end) for cause, start, end in parts if end > start)
