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
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.ranks.accelerator import Accelerator
from chimera_runtime.ranks.messages import Pending, unrecorded

_SMALLEST = 512
"""Smallest piece of pinned memory, in bytes."""

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
    """Pool of pinned memory. Sizes are powers of two, to which torch rounds pinned memory as well."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._free: dict[int, list[Room]] = defaultdict(list)

    def take(self, like: torch.Tensor) -> Room:
        """Takes room for a tensor from the pool, or allocates it if all is in use."""
        size = max(_SMALLEST, 1 << (like.nbytes - 1).bit_length())
        free = self._free[size]
        place = next((i for i, room in enumerate(free) if self._is_free(room)), None)
        memory = self._accelerator.pinned(size) if place is None else free.pop(place).memory
        return Room(memory, memory[: like.nbytes].view(like.dtype).view(like.shape))

    def _is_free(self, room: Room) -> bool:
        return room.after is None or self._accelerator.is_over(room.after)

    def give(self, room: Room, after: Any = None) -> None:
        """Returns a room to the pool; it is free when the event ``after`` is over, if there is one."""
        self._free[room.memory.nbytes].append(Room(room.memory, room.memory, after))


class DeferredPost:
    """An operation that the staging thread posts to gloo when an event is over."""

    def __init__(self, event: Any, post: Callable[[], Pending]) -> None:
        self._event = event
        self._post = post
        self._is_posted = threading.Event()
        self._work: Pending | None = None
        self._error: Exception | None = None

    def run(self, accelerator: Accelerator) -> None:
        """Waits for the event and posts, in the staging thread; `wait` raises the errors of both."""
        try:
            accelerator.synchronise(self._event)
            self._work = self._post()
        except Exception as error:
            self._error = error
        self._is_posted.set()

    def wait(self, timeout: timedelta) -> None:
        """Returns when the operation of gloo is over.

        Raises `RuntimeError` if that takes longer than the time-out, or fails.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        if not self._is_posted.wait(timeout.total_seconds()):
            raise RuntimeError(
                f"the device of this rank has not computed it within {timeout.total_seconds():g} s (timeout)"
            )
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        assert self._work is not None
        self._work.wait(max(_SHORTEST, timedelta(seconds=deadline - time.monotonic())))


class StagedSend:
    """A message that leaves a GPU."""

    def __init__(self, staging: "Staging", tensor: torch.Tensor, post: Post) -> None:
        self._rooms = staging.rooms
        self._room = staging.rooms.take(tensor)
        self._deferred = staging.hand_over(self._room.tensor, tensor, lambda: post(self._room.tensor))

    def wait(self, timeout: timedelta, /) -> None:
        """Returns when gloo has sent the message; errors as in `DeferredPost.wait`."""
        self._deferred.wait(timeout)
        self._rooms.give(self._room)


class StagedReceive:
    """A message that comes to a GPU."""

    def __init__(self, staging: "Staging", tensor: torch.Tensor, post: Post) -> None:
        self._staging = staging
        self._tensor = tensor
        self._free = staging.accelerator.record(staging.accelerator.computing)
        self._room = staging.rooms.take(tensor)
        self._work = post(self._room.tensor)

    def wait(self, timeout: timedelta, /) -> None:
        """Returns when gloo has received the message; later operations of the GPU see it. Raises errors of gloo."""
        self._work.wait(timeout)
        staging = self._staging
        staging.accelerator.wait(staging.incoming, self._free)
        staging.bring_in(self._tensor, self._room, self._room.tensor)


class StagedSum:
    """A tensor of a GPU in a collective operation of gloo, which replaces its content.

    Attributes
    ----------
    summed
        The result on the host, valid after `wait` and until the next tensor is staged.
    """

    def __init__(self, staging: "Staging", tensor: torch.Tensor, part: slice, post: Post) -> None:
        self._staging = staging
        self._tensor = tensor
        self._room = staging.rooms.take(tensor)
        self.summed = self._room.tensor
        self._deferred = staging.hand_over(self.summed[part], tensor[part], lambda: post(self.summed))

    def wait(self, timeout: timedelta, /) -> None:
        """Returns when gloo has the sum; later operations of the GPU see it. Errors as in `DeferredPost.wait`.

        The tensor is written without waiting for an event: gloo works on a copy, and nothing else reads the tensor.
        """
        self._deferred.wait(timeout)
        self._staging.bring_in(self._tensor, self._room, self.summed)


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
        threading.Thread(target=self._post, daemon=True, name="staging").start()

    def staged(self, group: Any) -> "StagedGroup":
        """Wraps a communicator of gloo, for tensors of a GPU."""
        return StagedGroup(self, group)

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> StagedSum:
        """Posts the sum of a tensor over the ranks of a communicator."""

        def post(summed: torch.Tensor) -> Pending:
            return _posted(unrecorded(dist.all_reduce, summed, group=group, async_op=True))

        return StagedSum(self, tensor, slice(None), post)

    def all_gather(self, rows: torch.Tensor, mine: int, group: dist.ProcessGroup | None) -> StagedSum:
        """Posts the gathering of one row from each rank of a communicator; ``mine`` is the row of this rank."""

        def post(gathered: torch.Tensor) -> Pending:
            rooms = list(gathered.unbind())
            return _posted(unrecorded(dist.all_gather, rooms, rooms[mine], group=group, async_op=True))

        return StagedSum(self, rows, slice(mine, mine + 1), post)

    def hand_over(self, room: torch.Tensor, tensor: torch.Tensor, post: Callable[[], Pending]) -> DeferredPost:
        """Copies a tensor to the host, after all earlier operations of the GPU; the thread then posts it."""
        accelerator = self.accelerator
        accelerator.wait(self.outgoing, accelerator.record(accelerator.computing))
        accelerator.copy(self.outgoing, room, tensor)
        deferred = DeferredPost(accelerator.record(self.outgoing), post)
        self._deferred.put(deferred)
        return deferred

    def bring_in(self, tensor: torch.Tensor, room: Room, content: torch.Tensor) -> None:
        """Copies received content to the GPU; later operations of the GPU wait for the copy."""
        accelerator = self.accelerator
        accelerator.copy(self.incoming, tensor, content)
        copied = accelerator.record(self.incoming)
        accelerator.wait(accelerator.computing, copied)
        self.rooms.give(room, copied)

    def close(self) -> None:
        """Ends the thread; no call may follow."""
        self._deferred.put(None)

    def _post(self) -> None:
        self.accelerator.enter()
        while (deferred := self._deferred.get()) is not None:
            deferred.run(self.accelerator)


class StagedGroup:
    """A communicator of gloo to which tensors of a GPU are posted."""

    def __init__(self, staging: Staging, group: Any) -> None:
        self._staging = staging
        self._group = group

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> StagedSend:
        """Posts the sending of a tensor."""
        return StagedSend(self._staging, tensors[0], lambda room: unrecorded(self._group.send, [room], target, tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> StagedReceive:
        """Posts the receipt of a tensor."""
        return StagedReceive(self._staging, tensors[0], lambda room: unrecorded(self._group.recv, [room], source, tag))


def _posted(work: dist.Work | None) -> Pending:
    assert work is not None, "a rank posts to communicators that it is in"
    return work
