"""The accelerator: the CUDA streams, events, copies and pinned memory of a GPU that staging and off-loading use.

A stream runs its operations in order; two streams wait for each other by events alone.
"""

from typing import Any

import torch


class Accelerator:
    """A GPU and its streams. Only `synchronise` and `pinned` block the host.

    In tests a model of an accelerator takes its place, and runs streams as early or as late as their events allow.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter(self) -> None:
        """Selects the device: by default the thread would make a context on the first GPU, which takes memory there."""
        torch.cuda.set_device(self._device)

    @property
    def computing(self) -> torch.cuda.Stream:
        """The stream of the calling thread's torch operations: a training loop may compute in a stream of its own."""
        return torch.cuda.current_stream(self._device)

    def stream(self) -> torch.cuda.Stream:
        """Makes a stream that does not wait for torch's default stream."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Returns an event that is over once all operations that are in a stream now are over."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Makes later operations of a stream wait for an event; the host does not wait."""
        stream.wait_event(event)

    def copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Puts a copy between the GPU and pinned memory into a stream, without autograd."""
        with torch.cuda.stream(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)

    def pinned(self, size: int) -> torch.Tensor:
        """Allocates ``size`` bytes of pinned host memory, which torch caches and never frees."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def is_over(self, event: torch.cuda.Event) -> bool:
        """Whether an event is over, without a wait."""
        return bool(event.query())  # type: ignore[no-untyped-call]

    def synchronise(self, event: torch.cuda.Event) -> None:
        """Returns when an event is over; the calling thread sleeps until then."""
        event.synchronize()


class CpuAccelerator(Accelerator):
    """A CPU in the place of an accelerator: it does everything at once, so that every event is over."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def enter(self) -> None:
        """Does nothing: threads have no device to select."""

    @property
    def computing(self) -> Any:
        """None: a CPU has no streams, and does everything in the order of the calls."""
        return None

    def stream(self) -> Any:
        """Returns None, as `computing` does."""
        return None

    def record(self, stream: Any) -> Any:
        """Returns None, which stands for an event that is over."""
        return None

    def wait(self, stream: Any, event: Any) -> None:
        """Does nothing: the event is over."""

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies, without autograd."""
        with torch.no_grad():
            target.copy_(source)

    def pinned(self, size: int) -> torch.Tensor:
        """Allocates ``size`` bytes."""
        return torch.empty(size, dtype=torch.uint8)

    def is_over(self, event: Any) -> bool:
        """Every event is over."""
        return True

    def synchronise(self, event: Any) -> None:
        """Does nothing: the event is over."""


def accelerator_of(device: torch.device) -> Accelerator:
    """Makes the accelerator of a device."""
    return Accelerator(device) if device.type == "cuda" else CpuAccelerator()
