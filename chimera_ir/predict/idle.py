"""Idle time of workers in a replay, by cause."""

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from chimera_ir.ir.ops import Instruction, WaitAllReduce, WaitMove, WaitRecv, WaitSend
from chimera_ir.predict.events import Role
from chimera_ir.predict.replay import Event, Replay


class Cause(Enum):
    """Cause of a worker's idle time.

    ``BUBBLE``: another worker has not yet posted its end of a message, launched a sum, or finished. ``MESSAGE``: both
    ends have posted the message, and it is on its way. ``SUM``: all members have launched the sum, and it is running.
    ``MOVE``: the link to the host is busy with the move that the worker waits for, or with an earlier move of the
    worker.
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


def shares(replay: Replay) -> dict[Cause, float]:
    """Idle time of each cause, as a share of the time of all workers."""
    total = replay.span * len(replay.lanes)
    share_of = dict.fromkeys(Cause, 0.0)
    for lane in idle(replay):
        for cause, start, end in lane:
            share_of[cause] += (end - start) / total
    return share_of


def _idle(lane: tuple[Event, ...], span: float) -> Iterator[Stretch]:
    for event in lane:
        if event.role is Role.WAIT:
            cause = _CAUSES[type(event.instruction)]
            yield from _stretches((Cause.BUBBLE, event.start, event.posted), (cause, event.posted, event.end))
    yield from _stretches((Cause.BUBBLE, lane[-1].end if lane else 0.0, span))


def _stretches(*parts: tuple[Cause, float, float]) -> Iterator[Stretch]:
    yield from (Stretch(cause, start, end) for cause, start, end in parts if end > start)
