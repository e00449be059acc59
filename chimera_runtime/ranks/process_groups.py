"""Which ranks of the default process group have which pipelines, and the communicators that they make together."""

import json
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from chimera_runtime.program.job import Job, Place
from chimera_runtime.program.weight_groups import Group
from chimera_runtime.ranks.rendezvous import exchange

Sums = dict[Group, tuple[dist.ProcessGroup | None, tuple[int, ...]]]
"""By weight group, its communicator, None where a single rank holds it, and the ranks that do."""

A_DAY = timedelta(days=1)
"""The clock of a communicator runs from the launch of an operation and says nothing: every wait has its own limit."""


class Groups:
    """Makes communicators: all ranks of the default process group make all of them, in the same order.

    Where the pipelines are over a part of the ranks, the ranks beside them have pipelines of their own.

    Parameters
    ----------
    rank
        This rank's number among the ``members``.
    members
        The ranks of the pipelines, as the default process group counts.
    store
        Of all ranks of that group, for these pipelines and those beside them alone.

    Raises
    ------
    PeerLost
        If a rank makes no pipelines within ``timeout`` seconds.
    """

    def __init__(self, rank: int, members: tuple[int, ...], store: Store, timeout: float) -> None:
        self.members = members
        self.store = store
        self._rank = rank
        self._all = [members]
        size = dist.get_world_size()
        if len(members) < size:
            what = f"rank {dist.get_rank()}: wait for all ranks of the default process group to make a pipeline"
            listed = exchange(store, "members", dist.get_rank(), size, json.dumps(members), what, timeout)
            self._all = sorted({tuple(json.loads(text)) for text in listed})

    def make(self, ranks: Sequence[int], backend: str) -> dist.ProcessGroup | None:
        """A communicator over ranks of the pipelines, for the one who is among them."""
        made: dist.ProcessGroup | None = None
        for members in self._all:
            group = dist.new_group([members[rank] for rank in ranks], timeout=A_DAY, backend=backend)
            if members == self.members and self._rank in ranks:
                made = group
        return made

    def everyone(self) -> dist.ProcessGroup:
        """A communicator of gloo over all ranks of the pipelines."""
        group = self.make(range(len(self.members)), "gloo")
        assert group is not None
        return group


def sums_of(job: Job, place: Place, backend: str, groups: Groups) -> Sums:
    """One communicator per weight group, over every rank that holds any of it; none where that is a single rank."""
    sums: Sums = {}
    for stages in job.groups:
        ranks = ranks_of(job, place, stages)
        group = groups.make(ranks, backend) if len(ranks) > 1 else None
        if place.rank in ranks:
            sums[stages] = group, tuple(ranks)
    return sums


def ranks_of(job: Job, place: Place, stages: Group) -> list[int]:
    """All ranks that hold any of some stages, ascending."""
    return sorted(place.rank_of(copy, worker) for copy in range(place.copies) for worker in job.members(stages))
