"""The control group: what ranks exchange outside of the schedule, as tensors by gloo and as texts in a store."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from chimera_runtime.errors import Misuse, PeerLost
from chimera_runtime.errors.pipeline import PIPELINE_IS_CLOSED
from chimera_runtime.program.job import Place
from chimera_runtime.ranks.messages import Names, Pending, Settle, unrecorded, waiter
from chimera_runtime.ranks.monitor import Monitor
from chimera_runtime.ranks.refusals import Refusals
from chimera_runtime.ranks.rendezvous import wait_for_key
from chimera_runtime.values.tensors import plain

T = TypeVar("T")


@dataclass(eq=False)
class ControlGroup:
    """All ranks of the pipelines: they send each other tensors by gloo, and leave texts for each other in a store.

    ``group`` is the communicator of gloo, and ``store`` has keys and values for these ranks alone. ``place`` is this
    rank's place, with ranks counted within the pipelines; ``members`` are the numbers of the ranks in the default
    process group. ``names`` writes the messages about waits that have failed. A wait may take ``timeout`` seconds.
    Where messages do not go by gloo, ``monitor`` keeps the time of waits, as these do not block the host; with gloo it
    is None. ``refusals`` are those of all ranks.
    """

    group: dist.ProcessGroup  # until `release`
    store: Store
    place: Place
    members: tuple[int, ...]
    names: Names
    timeout: float
    monitor: Monitor | None = None
    refusals: Refusals = field(default_factory=Refusals)

    def wait_for_key(self, key: str, source: int, what: str, seconds: float | None = None) -> bytes:
        """Returns what rank ``source`` leaves in the store under ``key``; ``what`` names the wait in the error.

        Raises `PeerLost` after ``seconds``, by default the time-out.
        """
        doing = f"rank {self.place.rank} (worker {self.place.worker}): wait {what}"
        return wait_for_key(self.store, key, source, doing, self.timeout if seconds is None else seconds)

    def collect(self, key: str, value: Any, what: str) -> list[Any]:
        """Returns the ``value`` of every rank, in the order of ranks; all ranks call it with the same ``key``.

        Values go through the store as JSON. ``what`` and errors are as in `wait_for_key`.
        """
        self.store.set(f"{key}/{self.place.rank}", json.dumps(value))
        return [json.loads(self.wait_for_key(f"{key}/{rank}", rank, what)) for rank in self.place.ranks]

    def decide(self, key: str, value: Any, verdict: Callable[[list[Any]], T], what: str) -> T:
        """Returns on all ranks the ``verdict`` of rank 0 on the ``value`` of every rank; all ranks call it.

        Values and verdict go through the store as JSON; no other rank reads the values. ``what`` and errors are as in
        `wait_for_key`.
        """
        self.store.set(f"{key}/{self.place.rank}", json.dumps(value))
        if self.place.rank == 0:
            values = [json.loads(self.wait_for_key(f"{key}/{rank}", rank, what)) for rank in self.place.ranks]
            self.store.set(key, json.dumps(verdict(values)))
        decided: T = json.loads(self.wait_for_key(key, 0, what))
        return decided

    @contextmanager
    def waiting(self, operation: str, peers: Sequence[int] = ()) -> Iterator[None]:
        """Turns failures of the communication inside into an error that names the operation and the peers.

        Raises `PeerLost` if the communication fails or takes longer than the time-out, or an earlier wait has; `Misuse`
        after `release`.
        """
        if not hasattr(self, "group"):
            raise Misuse(PIPELINE_IS_CLOSED)
        self.check()
        try:
            yield
        except RuntimeError as error:
            self.check()
            raise self.lost(operation, peers, error) from None

    def lost(self, operation: str, peers: Sequence[int], error: Exception) -> PeerLost:
        """Returns the error for a failed wait for ``peers``; no peers stand for all other ranks."""
        only = [1 - self.place.rank] if len(self.members) == 2 else []
        return self.names.lost(operation, peers or only, error)

    def check(self) -> None:
        """Raises `PeerLost` if a wait has not ended in time, torchrun has died, or another rank cannot go on."""
        self.names.require_launcher()
        self.refusals.check()
        if self.monitor is not None:
            self.monitor.check()

    def release(self) -> None:
        """Drops the communicator: torch frees its threads and descriptors with the last reference."""
        del self.group

    @cached_property
    def wait(self) -> Settle:
        """Function that waits for a posted message or sum; a wait that takes longer than the time-out is an error.

        With gloo the function raises the error; with other backends the monitor does.
        """
        return waiter(self.timeout) if self.monitor is None else self.monitor.settle

    def settle(self, work: Pending | None, operation: str, peers: Sequence[int] = ()) -> None:
        """Waits for an operation outside of the schedule; errors as in `waiting`."""
        with self.waiting(operation, peers):
            if work is not None:
                work.wait(timedelta(seconds=self.timeout))

    def send(self, tensor: torch.Tensor, rank: int, operation: str) -> None:
        """Sends a tensor to a rank; errors as in `waiting`."""
        with self.waiting(operation, [rank]):
            work = dist.isend(plain(tensor.detach().cpu()), self.members[rank], group=self.group)
        self.settle(work, operation, [rank])

    def recv(self, tensor: torch.Tensor, rank: int, operation: str, tag: int = 0) -> None:
        """Receives a tensor from a rank; errors as in `waiting`."""
        with self.waiting(operation, [rank]):
            work = dist.irecv(tensor, self.members[rank], group=self.group, tag=tag)
        self.settle(work, operation, [rank])

    def post_reduce(
        self, tensor: torch.Tensor, operation: str, kind: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> dist.Work | None:
        """Posts the sum, or another ``kind`` of reduction, of a tensor over all ranks; `settle` waits for it."""
        with self.waiting(operation):
            work: dist.Work | None = unrecorded(dist.all_reduce, tensor, kind, group=self.group, async_op=True)
            return work

    def reduce(self, tensor: torch.Tensor, operation: str, kind: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Replaces a tensor by its sum, or another ``kind`` of reduction, over all ranks; errors as in `waiting`."""
        self.settle(self.post_reduce(tensor, operation, kind), operation)

    def barrier(self, operation: str) -> None:
        """Waits until all ranks have called `barrier`; errors as in `waiting`."""
        with self.waiting(operation):
            work = dist.barrier(self.group, async_op=True)
        self.settle(work, operation)
