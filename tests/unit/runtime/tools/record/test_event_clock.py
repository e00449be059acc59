"""Times by events: of a stream that is behind its host, in the nanoseconds of the host's clock."""

from typing import Any

import pytest
import torch

from chimera_runtime.tools.record.recorder import EventClock, HostClock, clock_of

START = 10**12
"""Time of the host's clock when the GPU comes to its first event, in nanoseconds."""


class Event:
    """Happens at a millisecond of the GPU's own clock, once the stream comes to it."""

    at: float | None = None

    def __init__(self, stream: "Stream") -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.stream.synchronise(self)

    def elapsed_time(self, end: "Event") -> float:
        """Time between two events that have happened."""
        assert self.at is not None
        assert end.at is not None, "it has not happened"
        return end.at - self.at


class Stream:
    """A GPU of which the host says what it does, and that does it when the host waits."""

    def __init__(self) -> None:
        self.waited = 0
        self._time = 7.0
        self._waiting: list[Any] = []

    def compute(self, milliseconds: float) -> None:
        """Puts a kernel into the stream."""
        self._waiting.append(milliseconds)

    def mark(self) -> Event:
        """Puts an event into it."""
        self._waiting.append(Event(self))
        return self._waiting[-1]

    def synchronise(self, event: Event) -> None:
        """Does all up to an event."""
        self.waited += 1
        while event.at is None:
            work = self._waiting.pop(0)
            if isinstance(work, Event):
                work.at = self._time
            else:
                self._time += work


def timed(clock: EventClock, stream: Stream, *durations: float) -> list[int]:
    """The times before and after each of some operations."""
    times = []
    for duration in durations:
        times.append(clock.now())
        stream.compute(duration)
        times.append(clock.now())
    return times


def test_times_are_when_the_gpu_began_and_ended_and_the_host_waits_only_to_read_them() -> None:
    stream = Stream()
    clock = EventClock(stream.mark, lambda: START)
    times = timed(clock, stream, 2.0, 0.5)
    assert stream.waited == 1, "at the start"
    assert clock.read(times) == [START, START + 2_000_000, START + 2_000_000, START + 2_500_000]
    assert stream.waited == 2


def test_after_they_were_read_time_goes_on() -> None:
    stream = Stream()
    clock = EventClock(stream.mark, lambda: START)
    assert clock.read(timed(clock, stream, 3.0))[-1] == START + 3_000_000
    stream.compute(4.0)
    assert clock.read(timed(clock, stream, 1.0)) == [START + 7_000_000, START + 8_000_000]
    assert clock._events == [], "and no event is kept"


def test_an_operation_that_begins_before_others_are_read_has_a_time() -> None:
    stream = Stream()
    clock = EventClock(stream.mark, lambda: START)
    begun = clock.now()
    clock.read(timed(clock, stream, 1.0))
    assert clock.read([begun, clock.now()]) == [START + 1_000_000] * 2
    assert clock.read([begun]) == [START + 1_000_000], "also where there is no further event"


def test_on_the_cpu_times_are_the_hosts() -> None:
    clock = clock_of(torch.device("cpu"))
    assert type(clock) is HostClock
    times = [clock.now(), clock.now()]
    assert clock.read(times) == sorted(times)


def test_on_a_gpu_they_are_of_events_of_torch_in_its_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Cuda:
        def __init__(self, **options: bool) -> None:
            made.append(options)

        def record(self, stream: Any) -> None:
            made.append(stream)

        def synchronize(self) -> None:
            made.append("synchronised")

        def elapsed_time(self, _end: Any) -> float:
            return 1.5

    monkeypatch.setattr(torch.cuda, "Event", Cuda)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the current one of {device}")
    clock = clock_of(torch.device("cuda", 1))
    assert isinstance(clock, EventClock)
    assert made == [{"enable_timing": True}, "the current one of cuda:1", "synchronised"]
    assert clock.read([clock.now()]) == [clock._at_base]
