"""The accelerator: the CUDA streams, events, copies and pinned memory of a GPU that staging uses.

A stream runs its operations in order; two streams wait for each other by events alone. In tests a model of an
accelerator takes the place of a GPU, and runs streams as early or as late as their events allow.
"""

from typing import Any, Protocol

import torch


class Accelerator(Protocol):
    """A GPU and its streams. Only `synchronise` and `pinned` block the host."""

    def enter(self) -> None:
        """Prepares the calling thread to use the GPU."""

    @property
    def computing(self) -> Any:
        """The stream of this thread's torch operations."""

    def stream(self) -> Any:
        """Makes a stream that waits for no other stream by default."""

    def record(self, stream: Any) -> Any:
        """Returns an event that is over once all operations that are in a stream now are over."""

    def wait(self, stream: Any, event: Any) -> None:
        """Makes later operations of a stream wait for an event."""

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Puts a copy between the GPU and pinned memory into a stream."""

    def pinned(self, size: int) -> torch.Tensor:
        """Allocates ``size`` bytes of host memory for copies that do not block the host."""

    def is_over(self, event: Any) -> bool:
        """Whether an event is over."""

    def synchronise(self, event: Any) -> None:
        """Returns when an event is over."""


class Cuda:
    """An `Accelerator` by torch.cuda. It has not run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter(self) -> None:
        """Selects the device: by default the thread would make a context on the first GPU, which takes memory there."""
        torch.cuda.set_device(self._device)

    @property
    def computing(self) -> torch.cuda.Stream:
        """The calling thread's stream: a training loop may compute in its own stream."""
        return torch.cuda.current_stream(self._device)

    def stream(self) -> torch.cuda.Stream:
        """Makes a stream that does not wait for torch's default stream."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Returns an event; a thread of the host that waits for it sleeps."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Makes the stream wait, not the host."""
        stream.wait_event(event)

    def copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies asynchronously and without autograd."""
        with torch.cuda.stream(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)

    def pinned(self, size: int) -> torch.Tensor:
        """Allocates pinned memory, which torch caches and never frees."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def is_over(self, event: torch.cuda.Event) -> bool:
        """Queries the event without a wait."""
        return bool(event.query())  # type: ignore[no-untyped-call]

    def synchronise(self, event: torch.cuda.Event) -> None:
        """Sleeps until the event is over."""
        event.synchronize()
