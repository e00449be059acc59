"""Messages between workers: a `Peer` posts them, and a `MessageTransfer` waits for one."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C._autograd import _enable_record_function, _profiler_enabled

from chimera_runtime.blame import micro_text
from chimera_runtime.errors import PeerLost
from chimera_runtime.errors import start as mistakes
from chimera_runtime.program.numbering import Micros
from chimera_runtime.program.rank_facts import VALUES, implied
from chimera_runtime.ranks.devices import Accelerator
from chimera_runtime.ranks.parent_death import Launcher
from chimera_runtime.values.nested import Tensors

if TYPE_CHECKING:
    import torch.distributed as dist


_NUMBERS = {value: number for number, value in enumerate(VALUES)}
_TAGS = 2**30
"""Number of tags on the wire, after which they repeat: micro-batches may be counted over the whole run."""


def tag_of(micros: Micros, source: int, target: int, value: str, stages: int) -> int:
    """Returns the tag of a message, unique between two workers, from value, both stages and first micro-batch."""
    first = micros[0] if isinstance(micros, tuple) else micros
    return ((first * stages + source) * stages + target) * len(VALUES) + _NUMBERS[value]


def unrecorded(post: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Posts an operation that torch's profiler does not record.

    A recorded operation that is under way when the profiler stops would later write into memory that is freed by then.
    """
    if not _profiler_enabled():
        return post(*arguments, **options)
    _enable_record_function(False)
    try:
        return post(*arguments, **options)
    finally:
        _enable_record_function(True)


@dataclass(frozen=True)
class Names:
    """Writes the errors about waits that have failed, with this rank and the message that it waited for.

    ``slices`` is the number of slices of a micro-batch: tags of messages count slices. ``check`` raises the error of an
    earlier time-out: communicators are aborted after one, and only the first error says why. ``cause`` returns the
    error of another rank that may have ended for it, as `Refusals.cause` does.
    """

    rank: int
    worker: int
    stages: int
    timeout: float
    launcher: Launcher = field(default_factory=Launcher)
    check: Callable[[], None] = lambda: None
    slices: int = 1
    cause: Callable[[], PeerLost | None] = lambda: None

    def require_launcher(self) -> None:
        """Raises `PeerLost` if torchrun has started this rank and has died: then all ranks of the job end."""
        if self.launcher.is_gone():
            raise mistakes.torchrun_has_died(rank=self.rank, worker=self.worker)

    def operation(self, verb: str, tag: int) -> str:
        """The line of schedule.sir for the message with a tag, such as ``recv m0 s0->s1``: the inverse of `tag_of`."""
        edge, number = divmod(tag, len(VALUES))
        place, target = divmod(edge, self.stages)
        micro, source = divmod(place, self.stages)
        value = [*VALUES][number]
        named = "" if value == implied(source, target) else f"{value} "
        return f"{verb} {named}{micro_text(micro, self.slices)} s{source}->s{target}"

    def lost(self, operation: str, peers: Sequence[int], error: Exception) -> PeerLost:
        """Returns the error for a failed post or wait for ``peers``, by default all; raises an earlier time-out."""
        self.check()
        if self.launcher.is_gone():
            return mistakes.torchrun_has_died(rank=self.rank, worker=self.worker)
        if (cause := self.cause()) is not None:
            return cause
        return mistakes.wait_has_failed(self.rank, self.worker, operation, peers, why=str(error), timeout=self.timeout)


class Pending(Protocol):
    """An operation that was posted to a backend."""

    def wait(self, timeout: timedelta, /) -> object:
        """Returns when the operation is over, or raises a RuntimeError."""


Lost = Callable[[Exception], PeerLost]
"""Function that makes the error for the user from the error of an operation."""

Settle = Callable[[Pending, Lost], object]
"""Function that waits for an operation; if the operation fails or is late, it raises a RuntimeError or PeerLost."""


class MessageTransfer(NamedTuple):
    """A message under way; after ``wait`` its ``tensors`` may be read if it is received, and freed if it is sent.

    ``works`` are the posted operations, one for each tensor; ``verb`` is ``send`` or ``recv``.
    """

    tensors: Tensors
    works: Sequence[Pending]
    peer: Peer
    verb: str
    tag: int

    def wait(self) -> None:
        """Returns when the message is sent or received. Raises `PeerLost` after the time-out, or if the peer ends."""
        limit = self.peer.limit
        try:
            for work in self.works:
                if limit is None:
                    self.peer.settle(work, self._lost)
                else:
                    work.wait(limit)
        except RuntimeError as error:
            raise self._lost(error) from None

    def _lost(self, error: Exception) -> PeerLost:
        return self.peer.lost(self.verb, self.tag, error)


class Peer:
    """Another worker of the same copy, to which messages go and from which they come.

    ``isend(tensors, tag)`` posts the sending of a message, and ``irecv(buffers, tag)`` the receipt of one.
    Messages are posted to the process group itself: ``dist.isend`` would repeat look-ups and checks for each of them.
    ``rank`` is the peer's number within the pipelines, ``member`` its number in the default process group. For tensors
    of a GPU that go by gloo, ``staged(communicator)`` is used in place of the communicator.
    """

    def __init__(
        self,
        rank: int,
        member: int,
        outgoing: dist.ProcessGroup,
        incoming: dist.ProcessGroup,
        names: Names,
        settle: Settle,
        staged: Callable[[Any], Any] | None = None,
    ) -> None:
        self._rank = rank
        self._outgoing = outgoing if staged is None else staged(outgoing)
        self._incoming = incoming if staged is None else staged(incoming)
        self._target = dist.get_group_rank(outgoing, member)
        self._source = dist.get_group_rank(incoming, member)
        self._names = names
        self.isend: Callable[[Tensors, int], MessageTransfer] = partial(self._post, "send")
        self.irecv: Callable[[Tensors, int], MessageTransfer] = partial(self._post, "recv")
        self.settle = settle
        self.limit = settle.limit if isinstance(settle, BlockingWait) else None

    def release(self) -> None:
        """Drops the communicators; no message may follow."""
        del self._outgoing, self._incoming

    def _post(self, verb: str, tensors: Tensors, tag: int) -> MessageTransfer:
        """Posts an operation for each tensor of a message: those of a receipt are buffers of the right shapes."""
        works = []
        try:
            post: Callable[..., Pending] = self._outgoing.send if verb == "send" else self._incoming.recv
            rank = self._target if verb == "send" else self._source
            for tensor in tensors:
                real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor]
                if _profiler_enabled():
                    works.append(unrecorded(post, real, rank, tag % _TAGS))
                else:
                    works.append(post(real, rank, tag % _TAGS))
        except RuntimeError as error:
            raise self.lost(verb, tag, error) from None
        values = tensors, works, self, verb, tag
        return tuple.__new__(MessageTransfer, values)  # as its own constructor, without a call of Python

    def lost(self, verb: str, tag: int, error: Exception) -> PeerLost:
        """Returns the error for the user when a message to or from this peer has failed."""
        return self._names.lost(self._names.operation(verb, tag), [self._rank], error)


class BlockingWait:
    """Waits for an operation of gloo (a `Settle`): blocks the host, for ``timeout`` seconds at most."""

    def __init__(self, timeout: float) -> None:
        self.limit = timedelta(seconds=timeout)

    def __call__(self, work: Pending, _lost: Lost) -> object:
        """Returns when the operation is over. Raises `RuntimeError` if it fails, or after the time-out."""
        return work.wait(self.limit)


# Staging: messages and sums of a GPU by gloo, which is on the host, through pinned memory and two more CUDA streams.
#
#          computing    outgoing                    incoming                host
# send     .., event    wait event, copy, event'                            a thread: wait event', post to gloo
# recv     .., event                                                        post to gloo
# wait                                              wait event, copy,       wait for gloo
#          wait event''                             event''
# sum      as a send, then as the wait of a receive
#
# The thread that computes never waits for the GPU: it waits for gloo alone. A receive is posted to gloo at once, so a
# receive that the lane posts ahead is early. The event of a receive is recorded when it is posted: by then the last use
# of its slot is in the computing stream.
#
# A tensor that is sent stays untouched until the send has been waited for. Pinned memory is used again when gloo has
# sent it; after a receive, when an event says that it was copied to the GPU.

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
        is_over = self._accelerator.is_over
        place = next((i for i, room in enumerate(free) if room.after is None or is_over(room.after)), None)
        if place is None:
            self.size += size
            memory = self._accelerator.pinned(size)
        else:
            memory = free.pop(place).memory
        return Room(memory, memory[: like.nbytes].view(like.dtype).view(like.shape))

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

    ``content`` is the tensor on the host: of a sum the result, valid after `wait` and until the next tensor is staged.
    ``finish`` is called when gloo is done; after it, later operations of the GPU see what was received.
    """

    content: torch.Tensor
    work: Pending
    finish: Callable[[], None]

    def wait(self, timeout: timedelta, /) -> None:
        """Returns when gloo is done; errors as in `DeferredPost.wait`."""
        self.work.wait(timeout)
        self.finish()


class Staging:
    """Two CUDA streams for copies, their pinned memory, and the thread that posts to gloo in the order of calls."""

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
        """Replaces a tensor by the result of a collective of gloo, to which this rank gives a ``part`` of it.

        It is written without waiting for an event: gloo works on a copy, and nothing else reads the tensor.
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

        When the copy is over, the staging thread calls ``post``, which posts the message to gloo.
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


# Readout of numbers such as losses from the device: copies start when they are computed, the host reads them later.
#
# computing:  .., a forward, its loss, copy, event, its backward, .., the last forward, its loss, copy, event, ..
# host:       puts all of that in, goes on to the end of the update, waits for the event, reads
#
# An update has one event, which is recorded anew behind each copy: it is over when the last of the copies is. So the
# host waits once, for a forward that is past already, and not for all operations that it has put in since.

Numbers = Callable[[], list[float]]
"""Function that waits for the numbers and returns them. Call it once."""

Reader = Callable[[int, Sequence[torch.Tensor]], Numbers]
"""Function that starts to read tensors of one number each, in an update; calls come in the order of the computation."""


def from_host(_update: int, tensors: Sequence[torch.Tensor]) -> Numbers:
    """Reads numbers from tensors of the CPU (a `Reader`). Reads them now: a later forward may overwrite them."""
    return [*map(torch.Tensor.item, tensors)].copy


class Readout:
    """Reads numbers from tensors of a GPU (a `Reader`), by way of pinned memory on the host.

    The first of an update's numbers that is asked for waits for all of them so far.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._rooms = Rooms(accelerator)
        self._events: dict[int, Any] = {}  # of the updates in which no number has been asked for

    def __call__(self, update: int, tensors: Sequence[torch.Tensor]) -> Numbers:
        """Puts a copy of all numbers into the computing CUDA stream; returns the function that reads the copy."""
        several = [tensor.detach().reshape(()).double() for tensor in tensors] if len(tensors) > 1 else []
        numbers = torch.stack(several) if several else tensors[0].detach().reshape(1)
        accelerator, room = self._accelerator, self._rooms.take(numbers)
        accelerator.copy(accelerator.computing, room.tensor, numbers)
        event = self._events[update] = accelerator.record(accelerator.computing, self._events.get(update))

        def read() -> list[float]:
            self._events.pop(update, None)  # later numbers get an event of their own
            if not accelerator.is_over(event):
                accelerator.synchronise(event)
            copied: list[float] = room.tensor.tolist()
            self._rooms.give(room)
            return copied

        return read


# Link between a device and its host: copies of memory that run while the device computes.
#
#              computing                         link                        host
# to host      .., event                         wait event, copy, event'
# wait         wait event', memory is free
# to device    memory is taken, .., event        wait event, copy, event'
# wait         wait event', ..                                               memory may be used again
#
# The copies of a link have a CUDA stream of their own, and the host never waits for them. Memory of the device is free
# when the computing stream has come to the wait. Pinned memory may be used again as soon as the copy back is launched:
# later copies come after it in the same stream. On the CPU a launch copies, and a wait has nothing to wait for.


class LinkToHost:
    """The link of a rank, and the host memory that its copies are in: ``held`` bytes now, ``peak`` at most."""

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
        """Launches copies to the host of memory that must not change until `wait`; returns places and event."""
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
