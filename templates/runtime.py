"""What a lane of the schedule calls: messages between workers and sums of gradients; support/compute.py has the stages.

Everything that can be decided before the first update is decided in the constructors: shapes, buffers, peers, groups.
A call in the steady state posts, waits or computes, and nothing else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any, Protocol

import torch
import torch.distributed as dist

Tensors = tuple[torch.Tensor, ...]

_TAGS = 2**30
"""Tags on the wire repeat after so many: where micro-batches are counted over the whole run, theirs grow and grow."""


class PeerLost(Exception):
    """A wait for another rank failed or timed out; the message names rank, operation and peer.

    ``peers`` are the ranks that were waited for, as far as they are known.
    """

    def __init__(self, message: str, peers: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.peers = tuple(peers)


class BadModel(Exception):
    """The model file does something that its interface does not allow; the message says what and what to do."""


def part(tensors: Tensors, start: int, stop: int, of: int) -> Tensors:
    """The rows of the micro-batches ``start .. stop-1`` in tensors that hold ``of`` of them along dimension 0."""
    return tuple(t.narrow(0, start * (t.shape[0] // of), (stop - start) * (t.shape[0] // of)) for t in tensors)


def join(messages: Sequence[Tensors]) -> Tensors:
    """Several micro-batches' tensors as one message, along dimension 0."""
    return tuple(torch.cat(tensors) for tensors in zip(*messages, strict=True))


def draw_seed(use: str, *parts: int) -> int:
    """A seed for one use, the same on every machine: 63 bits of the BLAKE2b hash of "use/part/part/..."."""
    text = "/".join([use, *map(str, parts)]).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_torch(seed: int) -> None:
    """Seeds the generators that a stage may draw from; torch.manual_seed takes far longer, for devices not in use."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in one piece of memory, as it can be sent: not a view that is only marked as conjugate or negative."""
    return tensor.resolve_conj().resolve_neg().contiguous()


@dataclass(frozen=True)
class Names:
    """Turns what a handle knows about itself into words, when something went wrong."""

    rank: int
    worker: int
    stages: int
    timeout: float

    def operation(self, verb: str, tag: int) -> str:
        """The line of schedule.sir behind a tag, as in ``recv m0 s0->s1``."""
        micro, rest = divmod(tag, 2 * self.stages)
        source, backwards = divmod(rest, 2)
        return f"{verb} m{micro} s{source}->s{source - 1 if backwards else source + 1}"

    def lost(self, operation: str, peers: Sequence[int], error: Exception) -> PeerLost:
        """The one message that a failed wait leaves behind; no peers stand for all ranks."""
        peer = f"rank{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}" if peers else "the other ranks"
        text = str(error)
        if "imed out" in text:
            cause = f"no answer within {self.timeout:g} s (--timeout); it may be stuck, or slower than that"
        elif "onnection" in text or "reset" in text or "EOF" in text:
            cause = "the connection was closed; it has died or ended"
        else:
            cause = text.split("\n", 1)[0]
        return PeerLost(f"rank {self.rank} (worker {self.worker}): wait {operation}: {peer}: {cause}", peers)


class Pending(Protocol):
    """What was posted to a backend and can be waited for."""

    def wait(self, timeout: timedelta = ..., /) -> object:
        """Returns when it is over, or raises a RuntimeError."""


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
                peer.settle(work)
        except RuntimeError as error:
            raise peer.lost(self._verb, self._tag, error) from error
        self._works = ()
        if self._verb == "send":
            self.tensors = ()


class Peer:
    """Another worker of the same copy, reached by messages.

    Posts to the group itself: what ``dist.isend`` looks up and checks each time is known before the first message.
    """

    def __init__(
        self,
        rank: int,
        outgoing: dist.ProcessGroup | None,
        incoming: dist.ProcessGroup | None,
        names: Names,
        settle: Callable[[Pending], object],
    ) -> None:
        self._rank = rank
        everyone = dist.group.WORLD
        assert everyone is not None
        self._outgoing = everyone if outgoing is None else outgoing
        self._incoming = everyone if incoming is None else incoming
        self._target = dist.get_group_rank(self._outgoing, rank)
        self._source = dist.get_group_rank(self._incoming, rank)
        self._names = names
        self.settle = settle

    def isend(self, tensors: Tensors, tag: int) -> Transfer:
        """Posts the sending of all the tensors of a message."""
        try:
            works = [self._outgoing.send([_real(t)], self._target, tag % _TAGS) for t in tensors]
        except RuntimeError as error:
            raise self.lost("send", tag, error) from error
        return Transfer(tensors, works, self, "send", tag)

    def irecv(self, buffers: Tensors, tag: int) -> Transfer:
        """Posts the receipt of a message into buffers of the right shapes."""
        try:
            works = [self._incoming.recv([_real(t)], self._source, tag % _TAGS) for t in buffers]
        except RuntimeError as error:
            raise self.lost("recv", tag, error) from error
        return Transfer(buffers, works, self, "recv", tag)

    def lost(self, verb: str, tag: int, error: Exception) -> PeerLost:
        """What to tell the user when a message to or from this peer has failed."""
        return self._names.lost(self._names.operation(verb, tag), [self._rank], error)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a backend takes it: NCCL knows no complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _posted(works: Sequence[dist.Work | None]) -> list[dist.Work]:
    return [work for work in works if work is not None]


def _dense(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else gradient


class GradientSum:
    """The gradients of a stage in one flat buffer, and their sum over all ranks that hold the stage.

    Behind the gradients lies one number per parameter: how many ranks had a gradient for it. A parameter that no rank
    has a gradient for keeps ``grad = None``.
    """

    def __init__(
        self,
        stage: int,
        parameters: Sequence[torch.nn.Parameter],
        group: dist.ProcessGroup | None,
        members: Sequence[int],
        names: Names,
        settle: Callable[[Pending], object],
    ) -> None:
        self._stage = stage
        self._parameters = list(parameters)
        self._group = group
        self._members = members
        self._names = names
        self._settle = settle
        self._flats: list[torch.Tensor] = []
        self._all_counts: list[torch.Tensor] = []
        self._views: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._counts: dict[torch.nn.Parameter, torch.Tensor] = {}
        kinds = sorted({(p.dtype, p.device) for p in self._parameters}, key=str)
        for dtype, device in kinds:
            self._lay_out([p for p in self._parameters if (p.dtype, p.device) == (dtype, device)])
        self._absent = list(self._parameters)
        self._works: list[dist.Work] = []

    def _lay_out(self, parameters: list[torch.nn.Parameter]) -> None:
        sizes = [p.numel() for p in parameters]
        flat = torch.zeros(sum(sizes) + len(parameters), dtype=parameters[0].dtype, device=parameters[0].device)
        self._flats.append(flat)
        *pieces, counts = torch.split(flat, [*sizes, len(parameters)])
        self._all_counts.append(counts.fill_(1))
        for i, (parameter, piece) in enumerate(zip(parameters, pieces, strict=True)):
            self._views[parameter] = piece.view_as(parameter)
            self._counts[parameter] = counts[i]

    def collect(self) -> None:
        """After a backward: moves gradients that are new in this update into the flat buffer."""
        new = [p for p in self._absent if p.grad is not None]
        if not new:
            return
        views = [self._views[p] for p in new]
        with torch.no_grad():
            torch._foreach_copy_(views, [_dense(p) for p in new])
        for parameter, view in zip(new, views, strict=True):
            parameter.grad = view
        self._absent = [p for p in self._absent if p.grad is None]

    def launch(self) -> "GradientSum":
        """Posts the sum of the flat buffer over the members, where they are several."""
        if self._group is None:
            return self
        for parameter in self._absent:
            self._views[parameter].zero_()
            self._counts[parameter].zero_()
        try:
            works = [dist.all_reduce(flat, group=self._group, async_op=True) for flat in self._flats]
        except RuntimeError as error:
            raise self._lost(error) from error
        self._works = _posted(works)
        return self

    def rehearse(self) -> None:
        """Sums zeros from now on, for their size alone."""
        self._absent = []
        for flat in self._flats:
            flat.zero_()

    def _lost(self, error: Exception) -> PeerLost:
        others = [r for r in self._members if r != self._names.rank]
        return self._names.lost(f"all_reduce s{self._stage}", others, error)

    def wait(self) -> None:
        """Returns when every parameter's ``grad`` is the sum over all members, or None if none had one.

        Raises
        ------
        PeerLost
            If that takes longer than the time-out, or a member has ended.
        """
        try:
            for work in self._works:
                self._settle(work)
        except RuntimeError as error:
            raise self._lost(error) from error
        self._works = []
        if self._group is None:
            return
        for parameter in self._absent:
            parameter.grad = self._views[parameter] if self._counts[parameter].item() != 0 else None

    def clear(self) -> None:
        """Begins the next update: no parameter has a gradient."""
        for parameter in self._parameters:
            parameter.grad = None
        self._absent = list(self._parameters)
        for counts in self._all_counts:
            counts.fill_(1)


class Lane:
    """What a rank's script sees: its stages, its peers, and the micro-batches from the first of an update on."""

    def __init__(
        self,
        stages: Mapping[int, Any],
        peers: Mapping[int, Any],
        load_input: Callable[[int, int], Any],
        load_target: Callable[[int, int], Any],
    ) -> None:
        self._stages = stages
        self._peers = peers
        self._load_input = load_input
        self._load_target = load_target
        self._first = 0

    def begin(self, update: int) -> None:
        """From now on micro-batches are counted from the first of an update."""
        self._first = update
        for stage in self._stages.values():
            stage.begin(update)

    def stage(self, number: int) -> Any:
        """A stage that this worker holds."""
        return self._stages[number]

    def peer(self, worker: int) -> Any:
        """Another worker of this copy."""
        return self._peers[worker]

    def input(self, micro: int) -> Any:
        """The inputs of a micro-batch, for stage 0."""
        return self._load_input(self._first, micro)

    def target(self, micro: int) -> Any:
        """The targets of a micro-batch, for the loss."""
        return self._load_target(self._first, micro)

    def stages(self) -> Iterator[Any]:
        """All stages that this worker holds."""
        return iter(self._stages.values())


def waiter(backend: str, timeout: float) -> Callable[[Pending], object]:
    """How a posted operation is waited for: with a time-out on gloo; on NCCL its own watchdog keeps the time."""
    if backend == "nccl":
        return lambda work: work.wait()
    limit = timedelta(seconds=timeout)
    return lambda work: work.wait(limit)
