"""What staging needs of a GPU, and no more: streams, events, copies, pinned memory.

A stream works off what was put into it in order; two streams know nothing of each other but by events. In tests a model
of this stands in for a GPU, and runs streams as early or as late as their events allow.
"""

from typing import Any, Protocol

import torch


class Accelerator(Protocol):
    """A GPU and its streams. Nothing but `synchronise` and `pinned` blocks the host."""

    def enter(self) -> None:
        """A further thread begins to work with it."""

    @property
    def computing(self) -> Any:
        """The stream that this thread's operations of torch go to."""

    def stream(self) -> Any:
        """A stream that waits for no other one of itself."""

    def record(self, stream: Any) -> Any:
        """An event: it is over when all that is in a stream by now is."""

    def wait(self, stream: Any, event: Any) -> None:
        """What is put into a stream from now on waits for an event."""

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Puts a copy between the GPU and pinned memory into a stream."""

    def pinned(self, size: int) -> torch.Tensor:
        """So many bytes of the host's memory that the GPU copies from and to while the host goes on."""

    def is_over(self, event: Any) -> bool:
        """Whether an event is over by now."""

    def synchronise(self, event: Any) -> None:
        """Returns when an event is over."""


class Cuda:
    """An `Accelerator` by torch.cuda. It has not run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter(self) -> None:
        """Without this the thread would begin with a context on the first GPU, which takes memory there."""
        torch.cuda.set_device(self._device)

    @property
    def computing(self) -> torch.cuda.Stream:
        """That of the thread that asks: a loop may compute in a stream of its own."""
        return torch.cuda.current_stream(self._device)

    def stream(self) -> torch.cuda.Stream:
        """One that does not wait for torch's default stream."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event for which a thread of the host waits asleep."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """The host goes on at once."""
        stream.wait_event(event)

    def copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Asynchronous, and no part of a graph of gradients."""
        with torch.cuda.stream(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)

    def pinned(self, size: int) -> torch.Tensor:
        """Bytes that torch may hand out again later, and does not give back."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def is_over(self, event: torch.cuda.Event) -> bool:
        """Asks, and does not wait."""
        return bool(event.query())  # type: ignore[no-untyped-call]

    def synchronise(self, event: torch.cuda.Event) -> None:
        """The thread sleeps: that is what its events are made for."""
        event.synchronize()
