"""The world: a rank's device, and the communicators that it takes part in for control, sums and messages."""

import atexit
import ctypes
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from itertools import count
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as registry
from torch.distributed.distributed_c10d import PrefixStore, Store

from chimera_runtime.errors import Misuse, PeerLost
from chimera_runtime.errors import start as mistakes
from chimera_runtime.program.job import Job, Place
from chimera_runtime.program.rank_facts import Group
from chimera_runtime.ranks.agreement import ControlGroup
from chimera_runtime.ranks.communicators import channels, chosen
from chimera_runtime.ranks.devices import (
    Accelerator,
    CpuAccelerator,
    accelerator_of,
    device_of,
    known_device,
    require_own_gpu,
)
from chimera_runtime.ranks.messages import LinkToHost, Names, Peer, Reader, Readout, StagedGroup, Staging, from_host
from chimera_runtime.ranks.monitor import Monitor, end_process, limited
from chimera_runtime.ranks.refusals import Refusals, break_connections
from chimera_runtime.ranks.rendezvous import exchange, leave_failure, require_own_store, waits_of

# Process groups: communicators, which all ranks of the default process group make together, and the exit of gloo.

Sums = dict[Group, tuple[dist.ProcessGroup | None, tuple[int, ...]]]
"""Communicator and ranks of each weight group; None in place of a communicator if a single rank holds the group."""

_GLOO_THREAD = "pt_gloo_runloop"
_EXIT_LIMIT = 5.0
"""Longest wait at exit, in seconds. A thread of gloo that waits for a dead rank does not need the interpreter."""

A_DAY = timedelta(days=1)
"""Time-out of communicators, which counts from the launch of an operation. Waits have shorter time-outs."""


class ProcessGroups:
    """Maker of communicators: all ranks of the default process group make all communicators, in the same order.

    ``members`` are the ranks of the pipelines, as the default process group counts; ``rank`` is this rank's number
    among them. The other ranks make pipelines of their own at the same time, and tell their members in ``store``.
    """

    def __init__(self, rank: int, members: tuple[int, ...], store: Store, timeout: float) -> None:
        self.members = members
        self._rank = rank
        self._all = [members]
        size = dist.get_world_size()
        if len(members) < size:
            what = f"rank {dist.get_rank()}: wait for all ranks of the default process group to make a pipeline"
            texts = exchange(
                store, "members", dist.get_rank(), size, value=json.dumps(members), what=what, seconds=timeout
            )
            self._all = sorted({tuple(json.loads(text)) for text in texts})

    def make(self, ranks: Sequence[int], backend: str) -> dist.ProcessGroup | None:
        """Makes a communicator over some ranks of the pipelines; None on a rank that is not among them."""
        group_of_rank: dist.ProcessGroup | None = None
        for members in self._all:
            group = dist.new_group([members[rank] for rank in ranks], timeout=A_DAY, backend=backend)
            if members == self.members and self._rank in ranks:
                group_of_rank = group
        return group_of_rank

    def everyone(self) -> dist.ProcessGroup:
        """Makes a communicator of gloo over all ranks of the pipelines."""
        group = self.make(range(len(self.members)), "gloo")
        assert group is not None
        return group


def sums_of(job: Job, place: Place, backend: str, groups: ProcessGroups) -> Sums:
    """Makes a communicator for each weight group that is trained and that several ranks hold, over these ranks."""
    sums: Sums = {}
    for stages in job.groups:
        ranks = place.ranks_of(job.members(stages))
        is_summed = len(ranks) > 1 and stages[0] not in job.frozen  # a tie has no frozen stage
        group = groups.make(ranks, backend) if is_summed else None
        if place.rank in ranks:
            sums[stages] = group, tuple(ranks)
    return sums


@cache
def wait_for_gloo_at_exit() -> None:
    """Makes the end of this process wait until the threads of gloo sleep.

    A thread of gloo releases the tensors of a sum after it has woken those that wait for the sum. For that it needs the
    interpreter. If that begins to end at that moment, CPython before 3.14 ends the thread, and C++ answers with
    SIGABRT: a job that is over ends as one that has failed, on a busy machine or after a sum that nobody has waited
    for.
    """
    atexit.register(wait_for_gloo)


def wait_for_gloo() -> None:
    """Waits until all threads of gloo sleep, and none has run for a time in which it could take the interpreter."""
    deadline, before = time.monotonic() + _EXIT_LIMIT, None
    while time.monotonic() < deadline:
        now = _switches()
        if now == before and all(is_asleep for is_asleep, _ in now.values()):
            return
        before = now
        # A thread that waits for the interpreter asks for it once in each switch interval.
        time.sleep(max(0.01, 2 * min(sys.getswitchinterval(), 0.1)))


def _switches() -> dict[str, tuple[bool, str]]:
    """State of each thread of gloo: whether it sleeps, and how often it has gone to sleep. Empty without /proc."""
    switches = {}
    for file in Path("/proc/self/task").glob("*/status"):
        try:
            facts = dict(line.split(":", 1) for line in file.read_text().splitlines())
        except OSError:
            continue  # the thread has ended
        if facts["Name"].strip() == _GLOO_THREAD:
            switches[file.parent.name] = facts["State"].strip()[0] == "S", facts["voluntary_ctxt_switches"].strip()
    return switches


@dataclass(frozen=True)
class World:
    """A rank of a program, with its device and its communicators.

    ``control_group`` is for communication outside of the schedule. ``store_of_all`` is shared by the pipelines of all
    rows of a mesh. ``sums`` has for each weight group the communicator of its gradient sum, ``channels`` for each pair
    (sender, receiver) that of their messages; it is empty for gloo, whose messages use that of ``control_group``.

    ``staging`` carries messages and sums of a GPU by gloo. ``read`` reads losses from the device. ``host_link`` moves
    memory between the device and its host. ``holders`` are outside of the world and hold communicators until
    their ``release()``.
    """

    job: Job
    device: torch.device
    control_group: ControlGroup
    store_of_all: Store
    backend: str
    sums: Sums
    channels: dict[tuple[int, int], dist.ProcessGroup]
    staging: Staging | None = None
    read: Reader = from_host
    host_link: LinkToHost = field(default_factory=lambda: LinkToHost(CpuAccelerator()))
    holders: WeakSet[Any] = field(default_factory=WeakSet)

    @property
    def place(self) -> Place:
        """The place of this rank."""
        return self.control_group.place

    def ranks_of(self, *stages: int) -> list[int]:
        """All ranks that hold any of the stages, ascending."""
        return self.place.ranks_of(self.job.members(stages))

    def synchronize(self) -> None:
        """Synchronizes the device, then raises if any wait has timed out, as in `Monitor.check`."""
        if self.control_group.monitor is not None:
            _synchronize(self.device)
            self.control_group.monitor.check()

    def peer(self, worker: int) -> Peer:
        """Returns the `Peer` for messages with another worker of this rank's copy."""
        control, mine, rank = self.control_group, self.place.worker, self.place.rank_of(self.place.copy, worker)
        peer = Peer(
            rank,
            control.members[rank],
            outgoing=self.channels.get((mine, worker), control.group),
            incoming=self.channels.get((worker, mine), control.group),
            names=control.names,
            settle=control.wait,
            staged=None if self.staging is None else partial(StagedGroup, self.staging),
        )
        self.holders.add(peer)
        return peer

    def leak_groups(self, error: PeerLost, explains: bool = True) -> None:
        """Keeps gloo's communicators for ever: a process cannot end while it destroys one that still waits for a rank.

        Gloo has no other way to give up an operation before its own time-out, which is a day. If ``explains``, the
        error gets notes about the waits of the other ranks: one that gives up closes its connections, so the cause may
        be elsewhere.
        """
        control = self.control_group
        for group in {control.group, *(_groups_of(self.sums, self.channels) if self.backend == "gloo" else ())}:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        if not explains or control.refusals.error is not None:
            return
        others = error.peers or [rank for rank in self.place.ranks if rank != self.place.rank]
        is_late = mistakes.NO_ANSWER in str(error)
        for note in waits_of(control.store, self.place.rank, str(error), others, is_late=is_late):
            error.add_note(note)

    def close(self, is_idle: bool = True) -> None:
        """Destroys the communicators; the default process group stays.

        If ``is_idle``, no operation is under way, and their threads and descriptors are freed at once. Otherwise they
        stay: to free a communicator of gloo is to wait for its operations, which other ranks may never join.
        """
        for helper in (self.staging, self.control_group.monitor, self.control_group.refusals):
            if helper is not None:
                helper.close()
        for group in {self.control_group.group, *_groups_of(self.sums, self.channels)} - {dist.group.WORLD}:
            dist.destroy_process_group(group)
        if is_idle:
            for holder in (*self.holders, self.control_group):
                holder.release()
            self.sums.clear()
            self.channels.clear()


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
    """Sets up the default process group, and returns this rank's place and device; every rank calls it alike.

    ``layout`` says which ranks form a copy, see `Place`. ``on`` is the kind of device, by default that of the backend.
    If all ranks have found the store and cannot connect in time, ``end`` is called in another thread.

    Raises `Misuse` if ranks and program do not fit together, a GPU is missing, or the backend is for another device.
    """
    place = _place(job, rank, size, layout)
    device = device_of(backend, on)
    _agree_on_program(job, place, store, timeout)
    with limited(timeout, mistakes.connecting_is_late(rank=rank, worker=place.worker, timeout=timeout), end):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=A_DAY)
    return place, device


def join_group(
    job: Job,
    group: dist.ProcessGroup | None,
    layout: str,
    device: torch.device | str | None,
    timeout: float,
    communicators: str | None = None,
    end: Callable[[PeerLost], None] = end_process,
    arguments: Mapping[str, object] = MappingProxyType({}),
    shares_refusals: bool = False,
) -> World:
    """Sets up communicators over the ranks of an existing process group, by default over all; returns the `World`.

    Every rank of the default process group calls it, with a group that it is a part of. ``layout`` is as in `Place`.
    ``communicators`` is one of `communicators.CHOICES`, by default the fewest for which the program is proven. ``end``
    is called by the `Monitor` when this process has to end. ``arguments`` are further choices that must be equal on all
    ranks. ``shares_refusals`` says that what one rank refuses ends the calls of all: see `Refusals`.

    Raises `Misuse` if there is no process group, ranks, program, communicators or arguments do not fit together, or the
    device does not exist or is another rank's.
    """
    if not dist.is_initialized():
        raise Misuse(mistakes.NO_PROCESS_GROUP)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise Misuse(mistakes.NOT_IN_THE_GROUP)
    require_own_store()
    members = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    used = known_device(("cuda" if "nccl" in dist.get_backend(group) else "cpu") if device is None else device)
    backend = _backend(group, used)
    communicators = chosen(job, backend, communicators)
    place = _place(job, members.index(dist.get_rank()), len(members), layout)
    of_all = PrefixStore(f"chimera/{next(_number)}", registry._get_default_store())
    store = PrefixStore(f"{members[0]}", of_all)
    same = {"layout": layout, "communicators": communicators, **arguments}
    _agree_on_program(job, place, store, timeout, arguments=same)
    if backend == "nccl":
        require_own_gpu(store, place.rank, used)
    wait_for_gloo_at_exit()
    # All ranks make all communicators in one order: first that of the control group, then sums, then messages.
    groups = ProcessGroups(place.rank, members, of_all, timeout)
    control = groups.everyone()
    sums = sums_of(job, place, backend, groups)
    by_link = channels(job, place, backend, groups.make, communicators)
    monitor = None if backend == "gloo" else Monitor(timeout, end, _groups_of(sums, by_link))
    breakable = {control, *(_groups_of(sums, by_link) if monitor is None else ())}

    def break_off(error: PeerLost) -> None:
        if monitor is not None:
            monitor.break_off(error)
        break_connections(breakable)

    shares = shares_refusals and len(members) > 1
    refusals = Refusals(store, place.rank, len(members), break_off, timeout) if shares else Refusals()
    names = Names(place.rank, place.worker, job.stages, timeout, slices=job.slices, cause=refusals.cause)
    world = World(
        job=job,
        device=used,
        control_group=ControlGroup(
            group=control,
            store=store,
            place=place,
            members=members,
            names=names if monitor is None else replace(names, check=monitor.check),
            timeout=timeout,
            monitor=monitor,
            refusals=refusals,
        ),
        store_of_all=of_all,
        backend=backend,
        sums=sums,
        channels=by_link,
        staging=staging_of(used, backend),
        read=reader_of(used),
        host_link=LinkToHost(accelerator_of(used)),
    )
    if backend != "gloo":
        _warm_up(world)
    return world


_number = count()
"""Number of pipelines made so far, the same on all ranks."""


def refuse_to_join(members: Sequence[int], error: Misuse) -> None:
    """Leaves an error of this rank for the ``members`` of the default process group that make the next pipeline."""
    store = PrefixStore(f"chimera/{next(_number)}/{members[0]}", registry._get_default_store())
    with suppress(RuntimeError):
        leave_failure(store, members.index(dist.get_rank()), error)


def _place(job: Job, rank: int, size: int, layout: str) -> Place:
    if size % job.workers:
        raise mistakes.copies_are_not_whole(job.name, job.workers, size)
    return Place(rank, job.workers, size // job.workers, layout)


def _agree_on_program(
    job: Job, place: Place, store: Store, timeout: float, arguments: Mapping[str, object] = MappingProxyType({})
) -> None:
    what = f"{mistakes.place_text(rank=place.rank, worker=place.worker)}: wait for all ranks to start"
    mine = json.dumps({name: str(value) for name, value in arguments.items()})
    text = f"{job.program} {mine}"
    answers = exchange(store, "here", place.rank, len(place.ranks), value=text, what=what, seconds=timeout)
    if any(answer.split(" ")[0] != job.program for answer in answers):
        raise Misuse(mistakes.PROGRAMS_DIFFER)
    arguments_of = [json.loads(answer.partition(" ")[2]) for answer in answers]
    for name in arguments:
        values = [of_rank[name] for of_rank in arguments_of]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise mistakes.arguments_differ(name=name, first=values[0], other=values[other], rank=other)


def _groups_of(sums: Sums, by_link: Mapping[tuple[int, int], dist.ProcessGroup]) -> set[dist.ProcessGroup]:
    return {group for group in (*(group for group, _ in sums.values()), *by_link.values()) if group is not None}


def staging_of(device: torch.device, backend: str) -> Staging | None:
    """Makes the staging of messages and sums, if they are on a GPU and the backend is gloo."""
    return Staging(Accelerator(device)) if device.type == "cuda" and backend == "gloo" else None


def reader_of(device: torch.device) -> Reader:
    """Returns the reader of losses; from a GPU it copies them, so that the host waits only at the end of an update."""
    return Readout(Accelerator(device)) if device.type == "cuda" else from_host


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Returns the name of the backend of messages and sums.

    A process group of gloo, or of a backend that a plug-in has registered, keeps its backend. Otherwise the device
    decides: gloo for a CPU, NCCL for a GPU.
    """
    name = str(dist.get_backend(group))
    if name == "gloo" or name.upper() in dist.Backend._plugins:
        return name
    return "gloo" if device.type == "cpu" else "nccl"


def _warm_up(world: World) -> None:
    """Uses every communicator once, in one order on all ranks.

    With NCCL the first operation of a communicator blocks the host until its peers set it up, too. In the training
    loop, where posting must not block, ranks could wait for each other in a cycle.
    """
    control, me, token = world.control_group, world.place, torch.zeros(1, device=world.device)
    assert control.monitor is not None
    with control.monitor.watching(lambda error: control.lost("for the first use of communicators", (), error)):
        for source, target in world.job.links:
            channel = world.channels.get((source, target))
            if me.worker == source:
                dist.send(token, control.members[me.rank_of(me.copy, target)], group=channel)
            if me.worker == target:
                dist.recv(token, control.members[me.rank_of(me.copy, source)], group=channel)
            _synchronize(world.device)
        for _, (group, _) in sorted(world.sums.items(), key=itemgetter(0)):
            if group is not None:
                dist.all_reduce(token, group=group)
                _synchronize(world.device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
