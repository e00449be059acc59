"""Small programs and their ranks, all in this process: gloo connects threads as well as processes."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore
from torch.distributed import distributed_c10d as registry

from chimera_runtime.program.job import Job, Place
from chimera_runtime.ranks.agreement import ControlGroup
from chimera_runtime.ranks.messages import Names
from chimera_runtime.ranks.world import World
from tests.patience import FACTOR, PATIENCE

T = TypeVar("T")

LIMIT = timedelta(seconds=20 * FACTOR)


def job(**changed: Any) -> Job:
    """Two stages on two workers, one pipe, two micro-batches."""
    facts: dict[str, Any] = {
        "name": "two",
        "program": "ours",
        "workers": 2,
        "stages": 2,
        "micro_batches": 2,
        "evaluated": 2,
        "parts": 1,
        "recomputing": (),
        "grouped": (),
        "placement": ((0, 1),),
        "links": ((0, 1), (1, 0)),
        "period": 0,
        "reads": (),
        "lag": 0,
    }
    return Job(**facts | changed)


def alone_job(**changed: Any) -> Job:
    """All stages, two unless another number is given, on one worker."""
    stages = changed.get("stages", 2)
    return job(**{"workers": 1, "placement": ((0,) * stages,), "links": ()} | changed)


@contextmanager
def groups(size: int) -> Iterator[Sequence[Any]]:
    """Communicators that belong together, one for each of so many ranks. `alone` must be there."""
    store = HashStore()

    def connect(rank: int) -> Any:
        return dist.ProcessGroupGloo(PrefixStore("group", store), rank, size, LIMIT)

    with ThreadPoolExecutor(size) as pool:
        members = list(pool.map(connect, range(size)))
    for member in members:
        registry._world.pg_group_ranks[member] = {rank: rank for rank in range(size)}
    try:
        yield members
    finally:
        for member in members:
            del registry._world.pg_group_ranks[member]


@contextmanager
def worlds(alone: World, of: Job, copies: int = 1, timeout: float = 20.0) -> Iterator[list[World]]:
    """The worlds of all ranks of a program, without communicators for sums and messages."""
    size = of.workers * copies
    places = [Place(rank, of.workers, copies, "pipeline") for rank in range(size)]
    store = HashStore()
    with groups(size) as members:
        yield [
            replace(
                alone,
                job=of,
                control_group=ControlGroup(
                    group=member,
                    store=store,
                    place=place,
                    members=tuple(range(size)),
                    names=Names(place.rank, place.worker, of.stages, timeout),
                    timeout=timeout,
                ),
                sums=dict.fromkeys(of.groups, (None, (place.rank,))),
            )
            for place, member in zip(places, members, strict=True)
        ]


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """What calls return that wait for one another, each in a thread; an error of any is raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=PATIENCE) for future in [pool.submit(call) for call in calls]]
