"""The ranks of the job: process groups for messages, gradient sums and progress."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from runtime import Names, Peer, PeerLost, plain, waiter
from support.connections import Connection, NearPeer, connect
from support.faults import Misuse
from support.job import Job, Place

_A_DAY = timedelta(days=1)


@dataclass(frozen=True)
class World:
    """This rank's place and the communicators it takes part in."""

    job: Job
    place: Place
    device: torch.device
    names: Names
    store: Store
    timeout: float
    backend: str
    chat: dist.ProcessGroup
    sums: dict[int, tuple[dist.ProcessGroup | None, tuple[int, ...]]]
    channels: dict[tuple[int, int], dist.ProcessGroup | None]
    near: dict[int, Connection]

    def learn(self, key: str, source: int, what: str, seconds: float) -> bytes:
        """What another rank leaves in the store.

        Raises
        ------
        PeerLost
            If it takes longer than ``seconds``.
        """
        return learn(
            self.store, key, source, f"rank {self.place.rank} (worker {self.place.worker}): wait {what}", seconds
        )

    @contextmanager
    def waiting(self, operation: str, peers: Sequence[int] = ()) -> Iterator[None]:
        """Says in a failure of the communication inside what was waited for, and for whom.

        Raises
        ------
        PeerLost
            If the communication fails or takes longer than the time-out.
        """
        try:
            yield
        except RuntimeError as error:
            raise self.names.lost(operation, peers, error) from error

    def settle(self, work: dist.Work | None, operation: str, peers: Sequence[int] = ()) -> None:
        """Waits for an operation of the start-up, the check or the end; errors as in `waiting`."""
        with self.waiting(operation, peers):
            if work is not None:
                work.wait(timedelta(seconds=self.timeout))

    def send(self, tensor: torch.Tensor, rank: int, operation: str) -> None:
        """Sends a tensor outside of the schedule."""
        with self.waiting(operation, [rank]):
            work = dist.isend(plain(tensor.detach().cpu()), rank, group=self.chat)
        self.settle(work, operation, [rank])

    def recv(self, tensor: torch.Tensor, rank: int, operation: str) -> None:
        """Receives a tensor outside of the schedule."""
        with self.waiting(operation, [rank]):
            work = dist.irecv(tensor, rank, group=self.chat)
        self.settle(work, operation, [rank])

    def meet(self, operation: str) -> None:
        """Returns when all ranks have come here."""
        with self.waiting(operation):
            work = dist.barrier(self.chat, async_op=True)
        self.settle(work, operation)

    def ranks_of(self, stage: int) -> list[int]:
        """All ranks that hold a stage, ascending."""
        place, workers = self.place, self.job.holders[stage]
        return sorted(place.rank_of(copy, worker) for copy in range(place.copies) for worker in workers)

    def peer(self, worker: int) -> Peer:
        """Another worker of this rank's copy."""
        mine, rank, settle = (
            self.place.worker,
            self.place.rank_of(self.place.copy, worker),
            waiter(self.backend, self.timeout),
        )
        if rank in self.near:
            return NearPeer(self.near[rank], rank, self.names, settle)
        return Peer(rank, self.channels.get((mine, worker)), self.channels.get((worker, mine)), self.names, settle)


def meet(timeout: float) -> tuple[Store, int, int]:
    """The store, the rank and the world size that torchrun gave.

    Raises
    ------
    Misuse
        If the program was not started by torchrun.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise Misuse("start train.py with torchrun, as in: torchrun --nproc-per-node=WORKERS train.py --model MODEL.py")
    limit = timedelta(seconds=timeout)
    store, rank, size = next(rendezvous("env://", timeout=limit))
    store = PrefixStore("chimera", store)
    store.set_timeout(limit)
    return store, rank, size


def learn(store: Store, key: str, source: int, what: str, seconds: float) -> bytes:
    """What a rank leaves in the store; asks again and again: a thread that blocks in it would be deaf to signals.

    Raises
    ------
    PeerLost
        If it takes longer than ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise PeerLost(f"{what}: no answer from rank {source} within {seconds:g} s (--timeout)", [source])
        time.sleep(0.01)
    return bytes(store.get(key))


def join(job: Job, store: Store, rank: int, size: int, layout: str, backend: str, timeout: float) -> World:
    """Sets up the communicators; every rank calls it with the same options.

    Raises
    ------
    Misuse
        If the ranks do not make whole copies of the group of workers or run different programs, or a GPU is missing.
    """
    if size % job.workers:
        lower, upper = size // job.workers * job.workers, (size // job.workers + 1) * job.workers
        fitting = f"{lower} or {upper}" if lower else f"{upper}"
        raise Misuse(
            f"{job.name} runs on {job.workers} workers and torchrun started {size} {'rank' if size == 1 else 'ranks'}; "
            f"start a multiple of {job.workers}: --nproc-per-node={fitting}"
        )
    place = Place(rank, job.workers, size // job.workers, layout)
    device = _device(backend)
    limit = timedelta(seconds=timeout)
    store.set(f"here/{rank}", job.program)
    what = f"rank {rank} (worker {place.worker}): wait for all ranks to start"
    if any(learn(store, f"here/{other}", other, what, timeout).decode() != job.program for other in range(size)):
        raise Misuse(
            "the ranks run different programs: compile again before they start, or copy the whole directory to every "
            "machine again"
        )
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=_A_DAY if backend == "gloo" else limit
    )
    world = World(
        job=job,
        place=place,
        device=device,
        names=Names(rank, place.worker, job.stages, timeout),
        store=store,
        timeout=timeout,
        backend=backend,
        chat=_chat(size, backend),
        sums=_sums(job, place, backend),
        channels=_channels(job, place, backend),
        near=connections(job, place, store, timeout) if backend == "gloo" else {},
    )
    if backend == "nccl":
        _warm_up(world)
    return world


def connections(job: Job, place: Place, store: Store, timeout: float) -> dict[int, Connection]:
    """To those ranks on this machine that this one exchanges messages with; every rank calls it.

    Raises
    ------
    PeerLost
        If another rank has died, or does not answer within the time-out.
    """
    pairs = ((a, b) for a, b in job.links if place.worker in (a, b))
    others = [place.rank_of(place.copy, b if a == place.worker else a) for a, b in pairs]
    what = f"rank {place.rank} (worker {place.worker}): wait for a connection"

    def ask(key: str, other: int) -> str:
        return learn(store, key, other, what, timeout).decode()

    try:
        return connect(place.rank, others, store.set, ask, timeout)
    except OSError as error:
        raise PeerLost(f"{what}: {error}", others) from error


def _warm_up(world: World) -> None:
    """Uses every NCCL communicator once, in one order on all ranks.

    The first operation of a communicator sets it up and blocks the host until its peers are there; in the loop, where
    posting must not block, that could close a cycle.
    """
    me, token = world.place, torch.zeros(1, device=world.device)
    for source, target in world.job.links:
        channel = world.channels.get((source, target))
        if me.worker == source:
            dist.send(token, me.rank_of(me.copy, target), group=channel)
        if me.worker == target:
            dist.recv(token, me.rank_of(me.copy, source), group=channel)
        torch.cuda.synchronize(world.device)
    for stage in sorted(world.sums):
        group, _ = world.sums[stage]
        if group is not None:
            dist.all_reduce(token, group=group)
            torch.cuda.synchronize(world.device)


def _device(backend: str) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise Misuse(
            f"--backend nccl needs one GPU per rank; this machine has {torch.cuda.device_count()}: use --backend gloo"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _chat(size: int, backend: str) -> dist.ProcessGroup:
    """All ranks, on the CPU: the group that there is anyway if it is gloo's, for every group of gloo costs a thread."""
    everyone = dist.group.WORLD
    assert everyone is not None
    return everyone if backend == "gloo" else _group(range(size), "gloo")


def _group(ranks: Sequence[int], backend: str) -> dist.ProcessGroup:
    """A communicator. Its own clock runs from the launch of an operation and says nothing: every wait has a limit."""
    group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=_A_DAY, backend=backend)
    return group


def _sums(job: Job, place: Place, backend: str) -> dict[int, tuple[dist.ProcessGroup | None, tuple[int, ...]]]:
    """One communicator per stage, over every rank that holds it; none where that is a single rank."""
    sums: dict[int, tuple[dist.ProcessGroup | None, tuple[int, ...]]] = {}
    for stage, workers in enumerate(job.holders):
        ranks = sorted(place.rank_of(copy, worker) for copy in range(place.copies) for worker in workers)
        group = _group(ranks, backend) if len(ranks) > 1 else None
        if place.rank in ranks:
            sums[stage] = group, tuple(ranks)
    return sums


def _channels(job: Job, place: Place, backend: str) -> dict[tuple[int, int], dist.ProcessGroup | None]:
    """One communicator per directed pair of workers on NCCL, which matches messages by order; gloo matches by tag."""
    if backend == "gloo":
        return {}
    mine: dict[tuple[int, int], dist.ProcessGroup | None] = {}
    for copy in range(place.copies):
        for source, target in job.links:
            group = _group([place.rank_of(copy, source), place.rank_of(copy, target)], backend)
            if copy == place.copy:
                mine[source, target] = group
    return mine
