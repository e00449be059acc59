"""Messages between workers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._autograd import _enable_record_function, _profiler_enabled

from chimera_runtime.errors import PeerLost
from chimera_runtime.program.numbering import Micros
from chimera_runtime.ranks.parent_death import Launcher
from chimera_runtime.values.tensors import Tensors

_TAGS = 2**30
"""Tags on the wire repeat after so many: where micro-batches are counted over the whole run, theirs grow and grow."""


def tag_of(micros: Micros, source: int, target: int, stages: int) -> int:
    """A number for a message; no two messages of a lane between the same stages share a micro-batch."""
    first = micros[0] if isinstance(micros, tuple) else micros
    return (first * stages + source) * 2 + (source > target)


def unrecorded(post: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Posts an operation that torch's profiler, if it records, does not see.

    One that is under way when the profiler stops would, when it ends, write into memory that the profiler has let go.
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
    """Turns what a handle knows about itself into words, when something went wrong."""

    rank: int
    worker: int
    stages: int
    timeout: float
    launcher: Launcher = field(default_factory=Launcher)

    def require_launcher(self) -> None:
        """Passes as long as torchrun is there, if it has started this rank.

        Raises
        ------
        PeerLost
            If it has died: no rank of the job is to go on.
        """
        if self.launcher.is_gone():
            raise self._orphaned()

    def _orphaned(self) -> PeerLost:
        return PeerLost(f"rank {self.rank} (worker {self.worker}): torchrun has died, and its ranks end")

    def operation(self, verb: str, tag: int) -> str:
        """The line of schedule.sir behind a tag of `tag_of`, as in ``recv m0 s0->s1``."""
        micro, rest = divmod(tag, 2 * self.stages)
        source, backwards = divmod(rest, 2)
        return f"{verb} m{micro} s{source}->s{source - 1 if backwards else source + 1}"

    def lost(self, operation: str, peers: Sequence[int], error: Exception) -> PeerLost:
        """The one message that a failed wait leaves behind; no peers stand for all others."""
        if self.launcher.is_gone():
            return self._orphaned()
        peer = f"rank{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}" if peers else "the other ranks"
        text = str(error)
        if "imed out" in text:
            cause = f"no answer within {self.timeout:g} s (timeout); it may be stuck, or slower than that"
        elif any(word in text for word in ("onnection", "reset", "roken pipe", "EOF")):
            cause = "the connection was closed; it has died or ended"
        else:
            cause = text.split("\n", 1)[0]
        return PeerLost(f"rank {self.rank} (worker {self.worker}): wait {operation}: {peer}: {cause}", peers)


class Pending(Protocol):
    """What was posted to a backend and can be waited for."""

    def wait(self, timeout: timedelta, /) -> object:
        """Returns when it is over, or raises a RuntimeError."""


Lost = Callable[[Exception], PeerLost]
"""What to tell the user about an operation that has failed."""

Settle = Callable[[Pending, Lost], object]
"""Waits for an operation: raises a RuntimeError if it fails or takes too long, or a PeerLost at once."""


class Transfer:
    """Messages under way; ``tensors`` may be read (received) or let go (sent) after ``wait``."""

    __slots__ = ("_peer", "_tag", "_verb", "_works", "tensors")

    def __init__(self, tensors: Tensors, works: Sequence[Pending], peer: "Peer", verb: str, tag: int) -> None:
        self.tensors = tensors
        self._works = works
        self._peer = peer
        self._verb = verb
        self._tag = tag

    def wait(self) -> None:
        """Returns when the message is over.

        Raises
        ------
        PeerLost
            If that takes longer than the time-out, or the peer has ended.
        """
        peer = self._peer
        try:
            for work in self._works:
                peer.settle(work, self._lost)
        except RuntimeError as error:
            raise self._lost(error) from None
        self._works = ()
        if self._verb == "send":
            self.tensors = ()

    def _lost(self, error: Exception) -> PeerLost:
        return self._peer.lost(self._verb, self._tag, error)


class Peer:
    """Another worker of the same copy, reached by messages.

    Posts to the group itself: what ``dist.isend`` looks up and checks each time is known before the first message.
    ``rank`` is its number within the pipelines, ``member`` that in the default process group. ``staged`` makes
    of a communicator what tensors of a GPU are posted to instead of it.
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

    def isend(self, tensors: Tensors, tag: int) -> Transfer:
        """Posts the sending of all the tensors of a message."""
        try:
            works = [unrecorded(self._outgoing.send, [_real(t)], self._target, tag % _TAGS) for t in tensors]
        except RuntimeError as error:
            raise self.lost("send", tag, error) from None
        return Transfer(tensors, works, self, "send", tag)

    def irecv(self, buffers: Tensors, tag: int) -> Transfer:
        """Posts the receipt of a message into buffers of the right shapes."""
        try:
            works = [unrecorded(self._incoming.recv, [_real(t)], self._source, tag % _TAGS) for t in buffers]
        except RuntimeError as error:
            raise self.lost("recv", tag, error) from None
        return Transfer(buffers, works, self, "recv", tag)

    def lost(self, verb: str, tag: int, error: Exception) -> PeerLost:
        """What to tell the user when a message to or from this peer has failed."""
        return self._names.lost(self._names.operation(verb, tag), [self._rank], error)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a backend takes it: NCCL knows no complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def waiter(timeout: float) -> Settle:
    """How an operation of gloo is waited for: the host waits, as long as the time-out at most."""
    limit = timedelta(seconds=timeout)
    return lambda work, _lost: work.wait(limit)
