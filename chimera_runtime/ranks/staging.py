"""Staging: messages and sums of a GPU by gloo, which is on the host, through pinned memory and two more CUDA streams.

         computing    outgoing                    incoming                host
send     .., event    wait event, copy, event'                            a thread: wait event', post to gloo
recv     .., event                                                        post to gloo
wait                                              wait event, copy,       wait for gloo
         wait event''                             event''
sum      as a send, then as the wait of a receive

The thread that computes never waits for the GPU: it waits for gloo alone. A receive is posted to gloo at once, so a
receive that the lane posts ahead is early. The event of a receive is recorded when it is posted: by then the last use
of its slot is in the computing stream.

A tensor that is sent stays untouched until the send has been waited for. By then gloo has sent the copy, so the copy is
over, and the memory may go back to torch. Pinned memory is used again when gloo has sent it; after a receive, when an
event says that it was copied to the GPU.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.ranks.accelerator import Accelerator
from chimera_runtime.ranks.messages import Pending, unrecorded

_SMALLEST = 512
"""Smallest piece of pinned memory, in bytes."""

_LONGEST_END = 1.0
"""Seconds to wait for the end of the thread, which may itself wait for a device that has failed."""

_SHORTEST = timedelta(milliseconds=1)
"""Shortest time-out for gloo, which takes a shorter one for no limit."""

Post = Callable[[torch.Tensor], Pending]
"""Posts a tensor of the host to gloo."""


@dataclass(frozen=True)
class Room:
    """Pinned memory, and its used part in the shape of a tensor; it is free when the event ``after`` is over."""

    memory: torch.Tensor
    tensor: torch.Tensor
    after: Any = None


class Rooms:
    """Pool of pinned memory, of ``size`` bytes so far. A piece has a power of two bytes, as torch gives it anyway."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._free: dict[int, list[Room]] = defaultdict(list)
        self.size = 0

    def take(self, like: torch.Tensor) -> Room:
        """Takes room for a tensor from the pool, or allocates it if all is in use."""
        size = max(_SMALLEST, 1 << (like.nbytes - 1).bit_length())
        free = self._free[size]
        place = next((i for i, room in enumerate(free) if self._is_free(room)), None)
        memory = self._pinned(size) if place is None else free.pop(place).memory
        return Room(memory, memory[: like.nbytes].view(like.dtype).view(like.shape))

    def _pinned(self, size: int) -> torch.Tensor:
        self.size += size
        return self._accelerator.pinned(size)

    def _is_free(self, room: Room) -> bool:
        return room.after is None or self._accelerator.is_over(room.after)

    def give(self, room: Room, after: Any = None) -> None:
        """Returns a room to the pool; it is free when the event ``after`` is over, if there is one."""
        self._free[room.memory.nbytes].append(Room(room.memory, room.memory, after))


@dataclass(frozen=True)
class DeferredPost:
    """An operation of gloo that must wait for the GPU: the staging thread calls ``post`` once ``event`` is over."""

    event: Any
    post: Callable[[], Pending]
    posted: Future[Pending] = field(default_factory=Future)

    def run(self, accelerator: Accelerator) -> None:
        """Waits for the event and posts, in the staging thread; `wait` raises the errors of both."""
        try:
            accelerator.synchronise(self.event)
            self.posted.set_result(self.post())
        except Exception as error:
            self.posted.set_exception(error)

    def wait(self, timeout: timedelta) -> None:
        """Returns when the operation of gloo is over. Raises `RuntimeError` if it fails, or after the time-out."""
        seconds, start = timeout.total_seconds(), time.monotonic()
        try:
            work = self.posted.result(seconds)
        except TimeoutError:
            raise RuntimeError(f"the device of this rank has not computed it within {seconds:g} s (timeout)") from None
        except Exception as error:
            raise RuntimeError(str(error)) from error
        work.wait(max(_SHORTEST, timeout - timedelta(seconds=time.monotonic() - start)))


@dataclass(frozen=True)
class StagedTensor:
    """A tensor of a GPU under way through gloo.

    ``content`` is the tensor on the host: for a sum it is the result, valid after `wait` and until the next tensor is
    staged. ``finish`` is called when gloo is done; after it, later operations of the GPU see what was received.
    """

    content: torch.Tensor
    work: Pending
    finish: Callable[[], None]

    def wait(self, timeout: timedelta, /) -> None:
        """Returns when gloo is done; errors as in `DeferredPost.wait`."""
        self.work.wait(timeout)
        self.finish()


class Staging:
    """Two CUDA streams of a rank for copies, its pinned memory, and the thread that posts to gloo.

    The thread posts in the order in which messages are staged, so that messages to a rank keep their order.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.rooms = Rooms(accelerator)
        self.outgoing = accelerator.stream()
        self.incoming = accelerator.stream()
        self._deferred: SimpleQueue[DeferredPost | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._post, daemon=True, name="staging")
        self._thread.start()

    def send(self, tensor: torch.Tensor, post: Post) -> StagedTensor:
        """Copies a tensor to host memory and sends the copy; ``post`` posts it to gloo."""
        room = self.rooms.take(tensor)
        work = self.hand_over(room.tensor, tensor, lambda: post(room.tensor))
        return StagedTensor(room.tensor, work, lambda: self.rooms.give(room))

    def receive(self, tensor: torch.Tensor, post: Post) -> StagedTensor:
        """Receives into a tensor, which the GPU may still read: it is written after all earlier operations."""
        accelerator, room = self.accelerator, self.rooms.take(tensor)
        free = accelerator.record(accelerator.computing)

        def finish() -> None:
            accelerator.wait(self.incoming, free)
            self.bring_in(tensor, room)

        return StagedTensor(room.tensor, post(room.tensor), finish)

    def collect(self, tensor: torch.Tensor, part: slice, post: Post) -> StagedTensor:
        """Replaces a tensor by the result of a collective operation, to which this rank gives a ``part`` of the tensor.

        ``post`` posts the operation to gloo. The tensor is written without waiting for an event: gloo works on a copy,
        and nothing else reads the tensor.
        """
        room = self.rooms.take(tensor)
        work = self.hand_over(room.tensor[part], tensor[part], lambda: post(room.tensor))
        return StagedTensor(room.tensor, work, lambda: self.bring_in(tensor, room))

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> StagedTensor:
        """Posts the sum of a tensor over the ranks of a communicator."""

        def post(summed: torch.Tensor) -> Pending:
            return _posted(unrecorded(dist.all_reduce, summed, group=group, async_op=True))

        return self.collect(tensor, slice(None), post)

    def all_gather(self, rows: torch.Tensor, mine: int, group: dist.ProcessGroup | None) -> StagedTensor:
        """Posts the gathering of one row from each rank of a communicator; ``mine`` is the row of this rank."""

        def post(gathered: torch.Tensor) -> Pending:
            rooms = list(gathered.unbind())
            return _posted(unrecorded(dist.all_gather, rooms, rooms[mine], group=group, async_op=True))

        return self.collect(rows, slice(mine, mine + 1), post)

    def hand_over(self, room: torch.Tensor, tensor: torch.Tensor, post: Callable[[], Pending]) -> DeferredPost:
        """Launches the copy of a tensor into ``room``, on the host, after all earlier operations of the GPU.

        When the copy is over, the staging thread calls ``post``, which posts the message to gloo. The method ``wait``
        of the result returns when gloo is done.
        """
        accelerator = self.accelerator
        accelerator.wait(self.outgoing, accelerator.record(accelerator.computing))
        accelerator.copy(self.outgoing, room, tensor)
        deferred = DeferredPost(accelerator.record(self.outgoing), post)
        self._deferred.put(deferred)
        return deferred

    def bring_in(self, tensor: torch.Tensor, room: Room) -> None:
        """Copies the received content of a room to the GPU; later operations of the GPU wait for the copy."""
        accelerator = self.accelerator
        accelerator.copy(self.incoming, tensor, room.tensor)
        copied = accelerator.record(self.incoming)
        accelerator.wait(accelerator.computing, copied)
        self.rooms.give(room, copied)

    def close(self) -> None:
        """Ends the thread, after what it has still to post; no call may follow."""
        self._deferred.put(None)
        self._thread.join(_LONGEST_END)

    def _post(self) -> None:
        self.accelerator.enter()
        while (deferred := self._deferred.get()) is not None:
            deferred.run(self.accelerator)


class StagedGroup:
    """Stands in for a communicator of gloo: takes tensors of a GPU, and posts copies of them on the host."""

    def __init__(self, staging: Staging, group: Any) -> None:
        self._staging = staging
        self._group = group

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> StagedTensor:
        """Posts the sending of a tensor."""
        return self._staging.send(tensors[0], lambda room: unrecorded(self._group.send, [room], target, tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> StagedTensor:
        """Posts the receipt of a tensor."""
        return self._staging.receive(tensors[0], lambda room: unrecorded(self._group.recv, [room], source, tag))


def _posted(work: dist.Work | None) -> Pending:
    assert work is not None, "a rank posts to communicators that it is in"
    return work
