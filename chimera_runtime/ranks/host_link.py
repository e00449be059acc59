"""Link between a device and its host: copies of memory that run while the device computes.

             computing                         link                        host
to host      .., event                         wait event, copy, event'
wait         wait event', memory is free
to device    memory is taken, .., event        wait event, copy, event'
wait         wait event', ..                                               memory may be used again

The copies of a link have a CUDA stream of their own: they run one after the other, in the order in which they are
launched, and the host never waits for them. Memory of the device is free when the computing stream has come to the
wait: whatever is computed in it later comes after the copy. Pinned memory may be used again as soon as the copy back is
launched: whatever is copied into it later comes after that in the same stream.

On the CPU a launch copies, and a wait has nothing to wait for.
"""

from collections.abc import Sequence
from typing import Any

import torch

from chimera_runtime.ranks.accelerator import Accelerator
from chimera_runtime.ranks.staging import Room, Rooms


class LinkToHost:
    """The link of a rank, and the host memory that its copies are in.

    ``held`` are the bytes that are on the host now, copies under way included, ``peak`` is the most that there were.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.held = self.peak = 0
        self._accelerator = accelerator
        self._rooms = Rooms(accelerator)
        self._stream = accelerator.stream()

    @property
    def pinned(self) -> int:
        """Bytes of host memory that the link has taken so far; it uses them again and frees none."""
        return self._rooms.size

    def to_host(self, memories: Sequence[torch.Tensor]) -> tuple[list[Room], Any]:
        """Launches copies of pieces of memory to the host; returns where they go, and the event of their end.

        The memory must neither be written nor be freed before `wait`.
        """
        rooms = [self._rooms.take(memory) for memory in memories]
        self.held += _bytes(rooms)
        self.peak = max(self.peak, self.held)
        return rooms, self._copied([(room.tensor, memory) for room, memory in zip(rooms, memories, strict=True)])

    def to_device(self, memories: Sequence[torch.Tensor], rooms: Sequence[Room]) -> Any:
        """Launches copies from the host into pieces of memory; returns the event of their end."""
        return self._copied([(memory, room.tensor) for memory, room in zip(memories, rooms, strict=True)])

    def _copied(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        accelerator, stream = self._accelerator, self._stream
        accelerator.wait(stream, accelerator.record(accelerator.computing))
        for target, source in pairs:
            accelerator.copy(stream, target, source)
        return accelerator.record(stream)

    def wait(self, copied: Any) -> None:
        """Makes later operations of the device wait for copies; ``copied`` is the event of their end."""
        self._accelerator.wait(self._accelerator.computing, copied)

    def free(self, rooms: Sequence[Room]) -> None:
        """Gives back memory of the host, from which copies to the device have been launched."""
        self.held -= _bytes(rooms)
        for room in rooms:
            self._rooms.give(room)


def _bytes(rooms: Sequence[Room]) -> int:
    return sum(room.tensor.nbytes for room in rooms)
