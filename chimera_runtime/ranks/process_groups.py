"""Process groups: communicators, which all ranks of the default process group make together, and the exit of gloo."""

import atexit
import json
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from chimera_runtime.program.job import Job, Place
from chimera_runtime.program.weight_groups import Group
from chimera_runtime.ranks.rendezvous import exchange

Sums = dict[Group, tuple[dist.ProcessGroup | None, tuple[int, ...]]]
"""Communicator and ranks of each weight group; None in place of a communicator if a single rank holds the group."""

_GLOO_THREAD = "pt_gloo_runloop"
_EXIT_LIMIT = 5.0
"""Longest wait at exit, in seconds. A thread of gloo that waits for a dead rank does not need the interpreter."""

A_DAY = timedelta(days=1)
"""Time-out of communicators, which counts from the launch of an operation. Waits have shorter time-outs."""


class ProcessGroups:
    """Maker of communicators: all ranks of the default process group make all communicators, in the same order.

    If the pipelines are over a part of the ranks, the other ranks make pipelines of their own at the same time.

    ``members`` are the ranks of the pipelines, as the default process group counts; ``rank`` is this rank's number
    among them. ``store`` is shared by all ranks of the default process group: in it they tell each other their members.

    Raises `PeerLost` if a rank makes no pipelines within ``timeout`` seconds.
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
    """Makes a communicator for each weight group that several ranks hold, over these ranks."""
    sums: Sums = {}
    for stages in job.groups:
        ranks = place.ranks_of(job.members(stages))
        group = groups.make(ranks, backend) if len(ranks) > 1 else None
        if place.rank in ranks:
            sums[stages] = group, tuple(ranks)
    return sums


@cache
def wait_for_gloo_at_exit() -> None:
    """Makes the end of this process wait until the threads of gloo sleep.

    A thread of gloo releases the tensors of a sum after it has woken those that wait for the sum. For that it needs
    the interpreter. If the interpreter begins to end at that moment, CPython before 3.14 ends the thread, and C++
    answers with SIGABRT: a job that is over ends as one that has failed. This happens on a machine that is busy
    enough to keep the thread from running, or to a sum that nobody has waited for.
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
