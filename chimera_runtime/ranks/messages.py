"""Messages between workers: a `Peer` posts them, and a `MessageTransfer` waits for one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._autograd import _enable_record_function, _profiler_enabled

from chimera_runtime.blame import micro_text
from chimera_runtime.errors import PeerLost
from chimera_runtime.errors import ranks as mistakes
from chimera_runtime.program.numbering import Micros
from chimera_runtime.program.stage_graph import VALUES, implied, readers
from chimera_runtime.ranks.parent_death import Launcher
from chimera_runtime.values.tensors import Tensors

_NUMBERS = {value: number for number, value in enumerate(VALUES)}
_TAGS = 2**30
"""Number of tags on the wire, after which they repeat: micro-batches may be counted over the whole run."""


def tag_of(micros: Micros, source: int, value: str, stages: int) -> int:
    """Returns the tag of a message: by its value, the stage that makes it, and the first micro-batch.

    No two messages between the same workers have all three in common.
    """
    first = micros[0] if isinstance(micros, tuple) else micros
    return (first * stages + source) * len(VALUES) + _NUMBERS[value]


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
    earlier time-out: after one, communicators are aborted, so that other waits fail as well, and only the first error
    says why. ``cause`` returns the error of another rank that may have ended for it, as `Refusals.cause` does.
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
            raise mistakes.torchrun_has_died(self.rank, self.worker)

    def operation(self, verb: str, tag: int) -> str:
        """The line of schedule.sir for the message with a tag, such as ``recv m0 s0->s1``: the inverse of `tag_of`."""
        micro, rest = divmod(tag, len(VALUES) * self.stages)
        source, number = divmod(rest, len(VALUES))
        value = [*VALUES][number]
        (target,) = readers(value, source, self.stages)
        named = "" if value == implied(source, target, self.stages) else f"{value} "
        return f"{verb} {named}{micro_text(micro, self.slices)} s{source}->s{target}"

    def lost(self, operation: str, peers: Sequence[int], error: Exception) -> PeerLost:
        """Returns the error for a failed post or wait for ``peers``; empty ``peers`` stand for all other ranks.

        If there was a time-out before, its error is raised instead.
        """
        self.check()
        if self.launcher.is_gone():
            return mistakes.torchrun_has_died(self.rank, self.worker)
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


@dataclass(slots=True)
class MessageTransfer:
    """A message under way; after ``wait`` its ``tensors`` may be read if it is received, and freed if it is sent.

    ``works`` are the posted operations, one for each tensor; ``verb`` is ``send`` or ``recv``.
    """

    tensors: Tensors
    works: Sequence[Pending]
    peer: "Peer"
    verb: str
    tag: int

    def wait(self) -> None:
        """Returns when the message is sent or received. Raises `PeerLost` after the time-out, or if the peer ends."""
        try:
            for work in self.works:
                self.peer.settle(work, self._lost)
        except RuntimeError as error:
            raise self._lost(error) from None
        self.works = ()
        if self.verb == "send":
            self.tensors = ()

    def _lost(self, error: Exception) -> PeerLost:
        return self.peer.lost(self.verb, self.tag, error)


class Peer:
    """Another worker of the same copy, to which messages go and from which they come.

    Messages are posted to the process group itself: ``dist.isend`` would repeat look-ups and checks for each of them.
    ``rank`` is the peer's number within the pipelines, ``member`` its number in the default process group. If
    ``staged`` is given, messages are tensors of a GPU that go by gloo: the object that ``staged(communicator)`` returns
    is used in place of the communicator.
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
        self.settle = settle

    def release(self) -> None:
        """Drops the communicators; no message may follow."""
        del self._outgoing, self._incoming

    def isend(self, tensors: Tensors, tag: int) -> MessageTransfer:
        """Posts the sending of all the tensors of a message."""
        try:
            works = [unrecorded(self._outgoing.send, [_real(t)], self._target, tag % _TAGS) for t in tensors]
        except RuntimeError as error:
            raise self.lost("send", tag, error) from None
        return MessageTransfer(tensors, works, self, "send", tag)

    def irecv(self, buffers: Tensors, tag: int) -> MessageTransfer:
        """Posts the receipt of a message into buffers of the right shapes."""
        try:
            works = [unrecorded(self._incoming.recv, [_real(t)], self._source, tag % _TAGS) for t in buffers]
        except RuntimeError as error:
            raise self.lost("recv", tag, error) from None
        return MessageTransfer(buffers, works, self, "recv", tag)

    def lost(self, verb: str, tag: int, error: Exception) -> PeerLost:
        """Returns the error for the user when a message to or from this peer has failed."""
        return self._names.lost(self._names.operation(verb, tag), [self._rank], error)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a complex tensor as a view of real numbers, as NCCL has no complex ones; any other tensor as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def waiter(timeout: float) -> Settle:
    """Returns a function that waits for an operation of gloo: it blocks the host, for the time-out at most."""
    limit = timedelta(seconds=timeout)
    return lambda work, _lost: work.wait(limit)
