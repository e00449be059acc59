"""Communicators of messages, for backends such as NCCL, which match messages by their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from chimera_runtime.errors import start as mistakes

if TYPE_CHECKING:
    import torch.distributed as dist

    from chimera_runtime.program.job import Job, Place

DIRECTED = "directed"
"""One communicator per directed pair of workers; every program is proven to finish with these."""
PAIR = "pair"
"""One communicator for both directions between two workers; their operations wait for each other in one CUDA stream."""
CHOICES = (DIRECTED, PAIR)


def chosen(job: Job, backend: str, communicators: str | None) -> str:
    """Returns which of `CHOICES` to make; for None, the fewest with which the program is proven to finish.

    Raises `Misuse` if ``communicators`` is unknown or not proven for the program, or the backend leaves no choice.
    """
    if communicators is None:
        return PAIR if PAIR in job.communicators else DIRECTED
    if communicators not in CHOICES:
        raise mistakes.communicators_are_unknown(communicators=communicators, choices=CHOICES)
    if communicators != DIRECTED and backend == "gloo":
        raise mistakes.gloo_has_no_choice(communicators=communicators)
    if communicators not in job.communicators:
        raise mistakes.communicators_are_not_proven(communicators=communicators, program=job.name)
    return communicators


def channels(
    job: Job,
    place: Place,
    backend: str,
    make: Callable[[Sequence[int], str], dist.ProcessGroup | None],
    communicators: str,
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Makes the communicators of messages; returns those of this rank, each under the pair (sender, receiver).

    None for gloo, which matches messages by their tags. ``make`` makes a communicator over some ranks, and returns None
    elsewhere: every rank calls it for all communicators, in the same order.
    """
    if backend == "gloo":
        return {}
    both = communicators == PAIR
    by_link: dict[tuple[int, int], dist.ProcessGroup] = {}
    for copy in range(place.copies):
        for source, target in sorted({(min(link), max(link)) if both else link for link in job.links}):
            group = make([place.rank_of(copy, source), place.rank_of(copy, target)], backend)
            if copy == place.copy and group is not None:
                by_link[source, target] = group
                if both:
                    by_link[target, source] = group
    return by_link
