"""A GPU that is a model: streams are lists of what is still to be done, and nothing is done before it has to be.

A lazy stream does nothing until a wait needs one of its events; an eager one does all that it can at once. Of a program
each choice of lazy streams is a way in which a GPU may run it, and the latest or the earliest moment for each copy.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch

STREAMS = ("computing", "outgoing", "incoming")


class ModelEvent:
    """Over as soon as its stream has come to the last of its records."""

    def __init__(self, stream: "ModelStream") -> None:
        self.stream = stream
        self._records = self._passed = 0

    @property
    def is_over(self) -> bool:
        return self._passed == self._records

    def record(self) -> Callable[[], None]:
        """What its stream is to do when it comes to the record."""
        self._records += 1
        return self._pass

    def _pass(self) -> None:
        self._passed += 1


class ModelStream:
    """What is to be done, in order."""

    def __init__(self, name: str, is_lazy: bool) -> None:
        self.name = name
        self.is_lazy = is_lazy
        self._waiting: deque[Callable[[], object]] = deque()

    def put(self, operation: Callable[[], object]) -> None:
        self._waiting.append(operation)
        if not self.is_lazy:
            self.run_until(lambda: False)

    def run_until(self, is_enough: Callable[[], bool]) -> None:
        while self._waiting and not is_enough():
            self._waiting.popleft()()


class ModelGpu:
    """An `Accelerator` whose tensors are on the CPU.

    Parameters
    ----------
    lazy
        The streams that do nothing before they have to.
    ignored
        A method that does nothing, or ``(method, stream)``: a program that waits for too little.

    Attributes
    ----------
    blocked
        How often the host has waited for the GPU, by the name of the thread.
    sizes
        The bytes of each piece of pinned memory.
    """

    def __init__(self, lazy: tuple[str, ...] = (), ignored: str | tuple[str, str] = "") -> None:
        self._lock = threading.RLock()
        self._ignored = ignored
        self.streams = {name: ModelStream(name, name in lazy) for name in STREAMS}
        self._names = iter(STREAMS[1:])
        self.blocked: Counter[str] = Counter()
        self.sizes: list[int] = []

    def enter(self) -> None:
        """Threads are all the same to it."""

    @property
    def computing(self) -> ModelStream:
        return self.streams["computing"]

    def stream(self) -> ModelStream:
        return self.streams[next(self._names)]

    def record(self, stream: ModelStream, event: ModelEvent | None = None) -> ModelEvent:
        event = ModelEvent(stream) if event is None else event
        self._put(stream, event.record())
        return event

    def wait(self, stream: ModelStream, event: ModelEvent) -> None:
        """As in `Accelerator`: when the stream comes to it, that of the event is run as far as it has to be."""
        if self._ignored not in ("wait", ("wait", stream.name)):
            self._put(stream, lambda: event.stream.run_until(lambda: event.is_over))

    def copy(self, stream: ModelStream, target: torch.Tensor, source: torch.Tensor) -> None:
        self._put(stream, lambda: target.copy_(source))

    def pinned(self, size: int) -> torch.Tensor:
        """Memory of which nobody can tell what is in it."""
        self.sizes.append(size)
        return torch.full((size,), 0x7F, dtype=torch.uint8)

    def is_over(self, event: ModelEvent) -> bool:
        """Whether it has happened; always so where that is not looked at."""
        return event.is_over or self._ignored == "is_over"

    def synchronise(self, event: ModelEvent) -> None:
        """Counted by thread; runs the stream of the event as far as it has to be."""
        if self._ignored != "synchronise":
            with self._lock:
                self.blocked[threading.current_thread().name] += 1
                event.stream.run_until(lambda: event.is_over)

    def compute(self, kernel: Callable[[], object]) -> None:
        self._put(self.computing, kernel)

    def finish(self) -> None:
        with self._lock:
            for stream in self.streams.values():
                stream.run_until(lambda: False)

    def _put(self, stream: Any, operation: Callable[[], object]) -> None:
        with self._lock:
            stream.put(operation)
