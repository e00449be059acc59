"""``--trace`` on a GPU: times by events, as its computing stream comes to them.

A call only puts work into the stream, so that what the host's clock says is how long that took. An event before and one
after each call say when the GPU began and ended what was put there; a wait for a message is how long it was held up.
"""

import threading
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Protocol

import torch

_NANOSECONDS = 10**6
"""Of a millisecond."""


class OperationClock(Protocol):
    """Events of a GPU that have a time."""

    def mark(self) -> Any:
        """An event in the computing stream, behind all that is there."""

    def synchronise(self, event: Any) -> None:
        """Returns when the stream has come to an event."""

    def milliseconds(self, start: Any, end: Any) -> float:
        """The time from an event to a later one."""


class CudaTiming:
    """`OperationClock` by torch.cuda. It has not run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """One with a time, in torch's current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def synchronise(self, event: torch.cuda.Event) -> None:
        """Blocks the host, as only a reading does."""
        event.synchronize()

    def milliseconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """As in `OperationClock`: a number of 24 bits, so that ``start`` should not lie far back."""
        return float(start.elapsed_time(end))


class HostClock:
    """Nanoseconds of the host's monotonic clock: on the CPU, when things happen.

    Attributes
    ----------
    now
        A time: what `read` makes nanoseconds of.
    most
        How many operations may be kept before they are written.
    """

    now: Callable[[], int] = staticmethod(monotonic_ns)
    most = 2**16

    def read(self, times: list[int]) -> list[int]:
        """The times in nanoseconds; those of later calls are later ones."""
        return times


class EventClock(HostClock):
    """The same of a GPU, where a time is the number of an event until it is read; reading waits for the GPU."""

    most = 2**12

    def __init__(self, timing: OperationClock, clock: Callable[[], int] = monotonic_ns) -> None:
        self._timing = timing
        self._lock = threading.Lock()
        self._base = timing.mark()
        timing.synchronise(self._base)
        self._at_base = clock()
        self._events: list[Any] = []
        self._first = 0
        self.now = self._mark

    def _mark(self) -> int:
        with self._lock:
            self._events.append(self._timing.mark())
            return self._first + len(self._events) - 1

    def read(self, times: list[int]) -> list[int]:
        """As in `HostClock`; the events are forgotten."""
        with self._lock:
            events, first = self._events, self._first
            self._events, self._first = [], first + len(events)
        if not events:
            return [self._at_base for _ in times]
        self._timing.synchronise(events[-1])
        passed = [self._timing.milliseconds(self._base, event) for event in events]
        nanoseconds = [self._at_base + round(elapsed * _NANOSECONDS) for elapsed in passed]
        before, self._base, self._at_base = self._at_base, events[-1], nanoseconds[-1]
        return [nanoseconds[time - first] if time >= first else before for time in times]


def clock_of(device: torch.device) -> HostClock:
    """What times operations on a device."""
    return EventClock(CudaTiming(device)) if device.type == "cuda" else HostClock()
