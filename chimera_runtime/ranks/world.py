"""The ranks of the job: process groups for messages, gradient sums and progress."""

import ctypes
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import count
from operator import itemgetter
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as registry
from torch.distributed.distributed_c10d import PrefixStore, Store

from chimera_runtime.errors import Misuse, PeerLost
from chimera_runtime.program.job import Job, Place
from chimera_runtime.ranks.accelerator import Cuda
from chimera_runtime.ranks.communicators import DIRECTED, channels, chosen
from chimera_runtime.ranks.devices import device_of, known_device, require_own_gpu
from chimera_runtime.ranks.interpreter_end import wait_for_gloo_at_exit
from chimera_runtime.ranks.messages import Names, Peer, Pending, Settle, waiter
from chimera_runtime.ranks.monitor import Monitor, end_process, limited
from chimera_runtime.ranks.process_groups import A_DAY, Groups, Sums, ranks_of, sums_of
from chimera_runtime.ranks.readout import Reader, Readout, from_host
from chimera_runtime.ranks.rendezvous import exchange, learn, require_own_store, waits_of
from chimera_runtime.ranks.staging import Staging
from chimera_runtime.values.tensors import plain

_LATE = "no answer within"
"""In the message of a wait that took longer than the time-out."""


@dataclass(frozen=True)
class World:
    """This rank's place and the communicators it takes part in.

    Ranks are counted within the pipelines; ``members`` are their numbers in the default process group. Messages and
    sums of a GPU by gloo go through a ``staging``; a ``monitor`` keeps the time where gloo does not. Losses are read by
    ``read``. ``store_of_all`` is that of the pipelines in the other rows of a mesh as well.
    """

    job: Job
    place: Place
    members: tuple[int, ...]
    device: torch.device
    names: Names
    store: Store
    store_of_all: Store
    timeout: float
    backend: str
    chat: dist.ProcessGroup
    sums: Sums
    channels: dict[tuple[int, int], dist.ProcessGroup]
    staging: Staging | None = None
    monitor: Monitor | None = None
    read: Reader = from_host

    def learn(self, key: str, source: int, what: str, seconds: float) -> bytes:
        """What another rank leaves in the store.

        Raises
        ------
        PeerLost
            If it takes longer than ``seconds``.
        """
        doing = f"rank {self.place.rank} (worker {self.place.worker}): wait {what}"
        return learn(self.store, key, source, doing, seconds)

    @contextmanager
    def waiting(self, operation: str, peers: Sequence[int] = ()) -> Iterator[None]:
        """Says in a failure of the communication inside what was waited for, and for whom.

        Raises
        ------
        PeerLost
            If the communication fails or takes longer than the time-out, or something has done so before.
        """
        self.check()
        try:
            yield
        except RuntimeError as error:
            self.check()
            raise self.lost(operation, peers, error) from None

    def lost(self, operation: str, peers: Sequence[int], error: Exception) -> PeerLost:
        """The one message that a failed wait leaves behind; no peers stand for all others, of two ranks the other."""
        only = [1 - self.place.rank] if len(self.members) == 2 else []
        return self.names.lost(operation, peers or only, error)

    def check(self) -> None:
        """Passes as long as every wait has ended in time, and torchrun is there.

        Raises
        ------
        PeerLost
            If not: see `Monitor.check`.
        """
        self.names.require_launcher()
        if self.monitor is not None:
            self.monitor.check()

    def catch_up(self) -> None:
        """Returns when the device has computed what it is to compute, and counts; errors as in `check`."""
        if self.monitor is not None:
            _synchronise(self.device)
            self.monitor.check()

    @cached_property
    def wait(self) -> Settle:
        """How a message or a sum is waited for.

        What takes longer than the time-out is an error of the wait with gloo; elsewhere the monitor notes it.
        """
        return waiter(self.timeout) if self.monitor is None else self.monitor.settle

    def settle(self, work: Pending | None, operation: str, peers: Sequence[int] = ()) -> None:
        """Waits for an operation of the start-up, the check or the end; errors as in `waiting`."""
        with self.waiting(operation, peers):
            if work is not None:
                work.wait(timedelta(seconds=self.timeout))

    def send(self, tensor: torch.Tensor, rank: int, operation: str) -> None:
        """Sends a tensor outside of the schedule."""
        with self.waiting(operation, [rank]):
            work = dist.isend(plain(tensor.detach().cpu()), self.members[rank], group=self.chat)
        self.settle(work, operation, [rank])

    def recv(self, tensor: torch.Tensor, rank: int, operation: str) -> None:
        """Receives a tensor outside of the schedule."""
        with self.waiting(operation, [rank]):
            work = dist.irecv(tensor, self.members[rank], group=self.chat)
        self.settle(work, operation, [rank])

    def meet(self, operation: str) -> None:
        """Returns when all ranks have come here."""
        with self.waiting(operation):
            work = dist.barrier(self.chat, async_op=True)
        self.settle(work, operation)

    def ranks_of(self, *stages: int) -> list[int]:
        """All ranks that hold a stage, or any of several, ascending."""
        return ranks_of(self.job, self.place, stages)

    def peer(self, worker: int) -> Peer:
        """Another worker of this rank's copy."""
        mine, rank = self.place.worker, self.place.rank_of(self.place.copy, worker)
        outgoing = self.channels.get((mine, worker), self.chat)
        incoming = self.channels.get((worker, mine), self.chat)
        staged = None if self.staging is None else self.staging.staged
        return Peer(rank, self.members[rank], outgoing, incoming, self.names, self.wait, staged)

    def abandon(self, error: PeerLost, explains: bool = True) -> None:
        """Keeps gloo's communicators for ever: a process cannot end while it destroys one that still waits for a rank.

        Gloo has no other way to give up an operation before its own time-out, which is a day. If ``explains``,
        the error gets notes with what the ranks that were waited for have waited for themselves: one that gives up
        closes its connections.
        """
        for group in {self.chat, *(_groups_of(self.sums, self.channels) if self.backend == "gloo" else ())}:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        if not explains:
            return
        others = error.peers or [rank for rank in self.place.ranks if rank != self.place.rank]
        for note in waits_of(self.store, self.place.rank, str(error), others, _LATE in str(error)):
            error.add_note(note)

    def close(self) -> None:
        """Lets the communicators go; the default process group stays."""
        for helper in (self.staging, self.monitor):
            if helper is not None:
                helper.close()
        for group in {self.chat, *_groups_of(self.sums, self.channels)} - {dist.group.WORLD}:
            dist.destroy_process_group(group)


def begin(
    job: Job,
    store: Store,
    rank: int,
    size: int,
    layout: str,
    backend: str,
    timeout: float,
    on: str | None = None,
    end: Callable[[PeerLost], None] = end_process,
) -> tuple[Place, torch.device]:
    """Sets up the default process group; every rank calls it with the same options.

    ``on`` is the kind of device, ``cpu`` or ``cuda``: by default what the backend is for. ``end`` is called, in another
    thread, if the ranks have met in the store and cannot connect in time.

    Raises
    ------
    Misuse
        If the ranks do not make whole copies of the group of workers or run different programs, a GPU is missing, or
        the backend is for another kind of device.
    """
    place = _place(job, rank, size, layout)
    device = device_of(backend, on)
    _agree_on_program(job, place, store, timeout)
    late = PeerLost(
        f"rank {rank} (worker {place.worker}): connecting with the other ranks: not done within {timeout:g} s "
        "(timeout); one of them may be stuck, or ports or the address of a host cannot be reached",
        (),
    )
    with limited(timeout, late, end):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=A_DAY)
    return place, device


def join_all(job: Job, place: Place, store: Store, device: torch.device, timeout: float) -> World:
    """Sets up communicators over all ranks of a process group that `begin` made."""
    backend = _backend(dist.group.WORLD, device)
    groups = Groups(place.rank, tuple(place.ranks), store, timeout)
    return _connect(job, place, groups, store, device, timeout, backend, dist.group.WORLD)


def join(
    job: Job, store: Store, rank: int, size: int, layout: str, backend: str, timeout: float, on: str | None = None
) -> World:
    """The default process group and the communicators over it; arguments and errors as in `begin`."""
    place, device = begin(job, store, rank, size, layout, backend, timeout, on)
    return join_all(job, place, store, device, timeout)


def join_group(
    job: Job,
    group: dist.ProcessGroup | None,
    layout: str,
    device: torch.device | str | None,
    timeout: float,
    communicators: str | None = None,
    end: Callable[[PeerLost], None] = end_process,
    arguments: Mapping[str, object] = MappingProxyType({}),
) -> World:
    """Sets up communicators over the ranks of a process group that is there, by default over all.

    Every rank of the default process group calls it, each with the group that it is a part of. ``communicators`` is one
    of `communicators.CHOICES`, by default the last that the program is proven for. A `Monitor` calls ``end``. What else
    ranks have to choose alike are ``arguments``, by their names.

    Raises
    ------
    Misuse
        If there is no process group, the ranks do not make whole copies of the group of workers, or they run different
        programs or give different arguments; if the program is not proven to finish with these communicators; if there
        is no such device, or with NCCL another rank has it.
    """
    if not dist.is_initialized():
        raise Misuse("there is no process group: call torch.distributed.init_process_group() before")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise Misuse("this rank is not in the group that it gave: every rank gives one that it is a part of")
    require_own_store()
    members = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    used = known_device(("cuda" if "nccl" in dist.get_backend(group) else "cpu") if device is None else device)
    backend = _backend(group, used)
    communicators = chosen(job, backend, communicators)
    place = _place(job, members.index(dist.get_rank()), len(members), layout)
    of_all = PrefixStore(f"chimera/{next(_number)}", registry._get_default_store())
    store = PrefixStore(f"{members[0]}", of_all)
    _agree_on_program(job, place, store, timeout, {"layout": layout, "communicators": communicators, **arguments})
    if backend == "nccl":
        require_own_gpu(store, place.rank, used)
    groups = Groups(place.rank, members, of_all, timeout)
    return _connect(job, place, groups, store, used, timeout, backend, None, communicators, end)


_number = count()
"""Of the pipelines made so far, the same on all ranks."""


def _place(job: Job, rank: int, size: int, layout: str) -> Place:
    if size % job.workers:
        lower, upper = size // job.workers * job.workers, (size // job.workers + 1) * job.workers
        fitting = f"{lower} or {upper}" if lower else f"{upper}"
        raise Misuse(
            f"{job.name} runs on {job.workers} workers and there {'is' if size == 1 else 'are'} {size} "
            f"{'rank' if size == 1 else 'ranks'}; start a multiple of {job.workers}: --nproc-per-node={fitting}"
        )
    return Place(rank, job.workers, size // job.workers, layout)


def _agree_on_program(
    job: Job, place: Place, store: Store, timeout: float, arguments: Mapping[str, object] = MappingProxyType({})
) -> None:
    what = f"rank {place.rank} (worker {place.worker}): wait for all ranks to start"
    mine = json.dumps({name: str(value) for name, value in arguments.items()})
    answers = exchange(store, "here", place.rank, len(place.ranks), f"{job.program} {mine}", what, timeout)
    if any(answer.split(" ")[0] != job.program for answer in answers):
        raise Misuse(
            "the ranks run different programs: compile again before they start, or copy the whole directory to every "
            "machine again"
        )
    given = [json.loads(answer.partition(" ")[2]) for answer in answers]
    for name in arguments:
        values = [of_rank[name] for of_rank in given]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise Misuse(
                f"{name} is {values[0]} on rank 0 and {values[other]} on rank {other}: every rank makes the pipeline "
                "with the same arguments"
            )


def _connect(
    job: Job,
    place: Place,
    groups: Groups,
    store: Store,
    device: torch.device,
    timeout: float,
    backend: str,
    chat: dist.ProcessGroup | None,
    communicators: str = DIRECTED,
    end: Callable[[PeerLost], None] = end_process,
) -> World:
    """The world; ``chat`` is a group of gloo over all members, if there is one that nobody else uses."""
    wait_for_gloo_at_exit()
    everyone = groups.everyone() if chat is None or backend != "gloo" else chat
    sums = sums_of(job, place, backend, groups)
    by_link = channels(job, place, backend, groups.make, communicators)
    world = World(
        job=job,
        place=place,
        members=groups.members,
        device=device,
        names=Names(place.rank, place.worker, job.stages, timeout),
        store=store,
        store_of_all=groups.store,
        timeout=timeout,
        backend=backend,
        chat=everyone,
        sums=sums,
        channels=by_link,
        staging=staging_of(device, backend),
        monitor=None if backend == "gloo" else Monitor(timeout, end, _groups_of(sums, by_link)),
        read=reader_of(device),
    )
    if backend != "gloo":
        _warm_up(world)
    return world


def _groups_of(sums: Sums, by_link: Mapping[tuple[int, int], dist.ProcessGroup]) -> set[dist.ProcessGroup]:
    """The communicators of sums and messages."""
    return {group for group in (*(group for group, _ in sums.values()), *by_link.values()) if group is not None}


def staging_of(device: torch.device, backend: str) -> Staging | None:
    """What messages and sums go through, if they are on a GPU and gloo is not."""
    return Staging(Cuda(device)) if device.type == "cuda" and backend == "gloo" else None


def reader_of(device: torch.device) -> Reader:
    """How losses are read: of a GPU by copies that the host waits for at the end of an update."""
    return Readout(Cuda(device)) if device.type == "cuda" else from_host


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """The backend of messages and sums: that of the group, if it is gloo or registered; else torch's for the device."""
    name = str(dist.get_backend(group))
    if name == "gloo" or name.upper() in dist.Backend._plugins:
        return name
    return "gloo" if device.type == "cpu" else "nccl"


def _warm_up(world: World) -> None:
    """Uses every communicator once, in one order on all ranks.

    On NCCL the first operation of a communicator sets it up and blocks the host until its peers are there; in the loop,
    where posting must not block, that could close a cycle.
    """
    assert world.monitor is not None
    with world.monitor.watching(lambda error: world.lost("for the first use of communicators", (), error)):
        _use_all(world)


def _use_all(world: World) -> None:
    me, token = world.place, torch.zeros(1, device=world.device)
    for source, target in world.job.links:
        channel = world.channels.get((source, target))
        if me.worker == source:
            dist.send(token, world.members[me.rank_of(me.copy, target)], group=channel)
        if me.worker == target:
            dist.recv(token, world.members[me.rank_of(me.copy, source)], group=channel)
        _synchronise(world.device)
    for _, (group, _) in sorted(world.sums.items(), key=itemgetter(0)):
        if group is not None:
            dist.all_reduce(token, group=group)
            _synchronise(world.device)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
