"""The clocks by which ``--trace`` times calls, and how far the clocks of two ranks are apart.

On a GPU the clock is made of events in the CUDA stream in which the rank computes. A call only puts work into the
stream, so the host's clock would measure how long that took. An event before and one after each call give the times at
which the GPU began and ended the work, or was held up by a wait for a message.

Ranks are compared because the monotonic clocks of two machines have nothing to do with each other.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

import torch

from chimera_runtime.ranks.control_group import ControlGroup

_NANOSECONDS = 10**6
"""Nanoseconds in a millisecond."""


class HostClock:
    """Clock of operations on the CPU: the host's monotonic clock, in nanoseconds.

    ``now`` returns a time, which `read` converts. A recorder keeps at most ``most`` operations before it writes them.
    """

    now: Callable[[], int] = staticmethod(monotonic_ns)
    most = 2**16

    def read(self, times: list[int]) -> list[int]:
        """Converts times to nanoseconds. Call it with the times in their order."""
        return times


class EventClock(HostClock):
    """Clock of operations on a GPU: ``now`` returns the number of an event, from which `read` finds the time.

    ``new_event`` puts an event into the stream in which the GPU computes, behind all work that is there.
    """

    most = 2**12

    def __init__(self, new_event: Callable[[], torch.cuda.Event], clock: Callable[[], int] = monotonic_ns) -> None:
        self._new_event = new_event
        self._lock = threading.Lock()
        self._base = new_event()
        self._base.synchronize()
        self._at_base = clock()
        self._events: list[Any] = []
        self._first = 0
        self.now = self._mark

    def _mark(self) -> int:
        with self._lock:
            self._events.append(self._new_event())
            return self._first + len(self._events) - 1

    def read(self, times: list[int]) -> list[int]:
        """Converts times to nanoseconds, like `HostClock`; then forgets the events."""
        with self._lock:
            events, first = self._events, self._first
            self._events, self._first = [], first + len(events)
        if not events:
            return [self._at_base for _ in times]
        events[-1].synchronize()
        # torch has such times with 24 bits, so they are measured from an event that is not far back.
        passed = [self._base.elapsed_time(event) for event in events]
        nanoseconds = [self._at_base + round(elapsed * _NANOSECONDS) for elapsed in passed]
        before, self._base, self._at_base = self._at_base, events[-1], nanoseconds[-1]
        return [nanoseconds[time - first] if time >= first else before for time in times]


def clock_of(device: torch.device) -> HostClock:
    """Makes the clock for operations on a device. The clock for a GPU has not been tried on a GPU."""

    def new_event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    return EventClock(new_event) if device.type == "cuda" else HostClock()


ROUNDS = 16


@dataclass(frozen=True)
class OffsetEstimate:
    """Rank 0's clock minus this rank's clock, at the time ``at`` of this rank's clock, in nanoseconds.

    The true difference is within ``uncertainty`` of ``offset``.
    """

    at: int
    offset: int
    uncertainty: int


def estimate(ask: Callable[[], int], clock: Callable[[], int], rounds: int = ROUNDS) -> OffsetEstimate:
    """Estimates the offset of another clock as NTP does: from the shortest of ``rounds`` exchanges.

    ``ask`` asks for the time of the other clock, ``clock`` reads this rank's. The other clock was read at some moment
    of the exchange; it is taken to be the middle, which is wrong by half of the exchange at most.
    """
    answers = []
    for _ in range(rounds):
        sent = clock()
        theirs = ask()
        answers.append((clock() - sent, sent, theirs))
    length, sent, theirs = min(answers)
    middle = sent + length // 2
    return OffsetEstimate(middle, theirs - middle, length - length // 2)


def compare(control_group: ControlGroup) -> OffsetEstimate:
    """Measures the offset to rank 0; every rank calls it, and rank 0 answers one rank after the other.

    Raises `PeerLost` if another rank does not answer within the time-out.
    """
    token = torch.zeros(1, dtype=torch.int64)
    if control_group.place.rank == 0:
        for rank in control_group.place.ranks[1:]:
            for _ in range(ROUNDS):
                control_group.recv(token, rank, "for a question about the time")
                control_group.send(torch.tensor([time.monotonic_ns()]), rank, "an answer about the time")
        return OffsetEstimate(time.monotonic_ns(), 0, 0)

    def ask() -> int:
        control_group.send(token, 0, "a question about the time")
        control_group.recv(token, 0, "for an answer about the time")
        return int(token.item())

    return estimate(ask, time.monotonic_ns)
