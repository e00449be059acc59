"""Readout of numbers such as losses from the device: the copy starts when they are computed, the host reads it later.

computing:  .., the last forward, its loss, copy, event, its backward, ..
host:       puts all of that in, goes on to the end of the update, waits for the event, reads

So the host waits for a forward that is past already, and not for all operations that it has put in since.
"""

from collections.abc import Callable, Sequence

import torch

from chimera_runtime.ranks.accelerator import Accelerator
from chimera_runtime.ranks.staging import Rooms

Numbers = Callable[[], list[float]]
"""Function that waits for the numbers and returns them. Call it once."""

Reader = Callable[[Sequence[torch.Tensor]], Numbers]
"""Function that starts to read tensors of one number each; calls come in the order of the computation."""


def from_host(tensors: Sequence[torch.Tensor]) -> Numbers:
    """Reads numbers from tensors of the CPU (a `Reader`). Copies them now: a later forward may overwrite them."""
    copies = [tensor.clone() for tensor in tensors]
    return lambda: [copy.item() for copy in copies]


class Readout:
    """Reads numbers from tensors of a GPU (a `Reader`), by way of pinned memory on the host."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._rooms = Rooms(accelerator)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Numbers:
        """Puts a copy of all numbers into the computing CUDA stream; returns the function that reads the copy."""
        numbers = torch.stack([tensor.reshape(()).double() for tensor in tensors])
        accelerator, room = self._accelerator, self._rooms.take(numbers)
        accelerator.copy(accelerator.computing, room.tensor, numbers)
        event = accelerator.record(accelerator.computing)

        def read() -> list[float]:
            if not accelerator.is_over(event):
                accelerator.synchronise(event)
            copied: list[float] = room.tensor.tolist()
            self._rooms.give(room)
            return copied

        return read
