"""Communicators of messages, where a backend matches messages by their order as NCCL does: which ones share one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from chimera_runtime.errors import Misuse

if TYPE_CHECKING:
    import torch.distributed as dist

    from chimera_runtime.program.job import Job, Place

DIRECTED = "directed"
"""One communicator per directed pair of workers: every program is proven to finish."""
PAIR = "pair"
"""One for both directions between two workers, half as many; their operations wait for each other in one stream."""
CHOICES = (DIRECTED, PAIR)


def chosen(job: Job, backend: str, communicators: str | None) -> str:
    """The choice of communicators; where None is given, the fewest that the program is proven to finish with.

    Raises
    ------
    Misuse
        If the program is not proven to finish with what is given, or the backend leaves no choice.
    """
    if communicators is None:
        return PAIR if PAIR in job.communicators else DIRECTED
    if communicators not in CHOICES:
        raise Misuse(f"communicators {communicators}: it is one of {', '.join(CHOICES)}")
    if communicators != DIRECTED and backend == "gloo":
        raise Misuse(
            f"communicators {communicators}: gloo finds messages by their tags, so there is nothing to choose: leave "
            "it out"
        )
    if communicators not in job.communicators:
        raise Misuse(
            f"communicators {communicators}: {job.name} could wait for ever with one communicator for both directions "
            "of a pair of workers; under communicators, report.json says where: compile it with "
            "--communicators pair, or leave it at directed"
        )
    return communicators


def channels(
    job: Job,
    place: Place,
    backend: str,
    make: Callable[[Sequence[int], str], dist.ProcessGroup | None],
    communicators: str,
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """This rank's communicators, by sender and receiver; none for gloo, which matches messages by their tags.

    ``make`` makes a communicator over some ranks, for those among them; every rank calls it for all, in one order.
    """
    if backend == "gloo":
        return {}
    both = communicators == PAIR
    mine: dict[tuple[int, int], dist.ProcessGroup] = {}
    for copy in range(place.copies):
        for source, target in sorted({(min(link), max(link)) if both else link for link in job.links}):
            group = make([place.rank_of(copy, source), place.rank_of(copy, target)], backend)
            if copy == place.copy and group is not None:
                mine[source, target] = group
                if both:
                    mine[target, source] = group
    return mine
