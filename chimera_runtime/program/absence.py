"""Absence: the stages that have no part in a micro-batch, because the program or the data leave it out there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from chimera_runtime.program.job import Job
from chimera_runtime.program.numbering import Micros, numbers_of
from chimera_runtime.program.rank_facts import VALUES, Route


@dataclass
class Absence:
    """The stages that the micro-batches of the update under way do not have.

    ``by_data`` has the stages that each micro-batch lacks because it has no input for some source; micro-batches are
    counted within the update, and whole; it is empty if none lacks any. What the program leaves out is the same in
    every update: `Job.lacking`. The round under way begins at ``start``, counted in parts. ``is_felt`` says that some
    micro-batch of any copy lacks a stage.

    ``counts`` are the counts of the losses that this rank has computed in the update, and ``count`` is their sum over
    all ranks at its end. ``parts`` are the stages and links of a lane, and ``late`` the calls that wait for ``count``.
    """

    job: Job
    by_data: Sequence[frozenset[int]] = ()
    is_felt: bool = field(init=False)
    start: int = 0
    counts: list[torch.Tensor] = field(default_factory=list)
    count: float = 0.0
    parts: list[Any] = field(default_factory=list)
    late: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.is_felt = bool(self.job.lacking)

    def has(self, micros: Micros, stage: int) -> bool:
        """Whether a stage has a part in a micro-batch, or in several: either in all of them, or in none."""
        first, job = numbers_of(micros)[0], self.job
        if job.leaves_out(first, stage):
            return False
        return not self.by_data or stage not in self.by_data[(self.start + first % job.passes) // job.parts]

    def is_sent(self, micros: Micros, route: Route) -> bool:
        """Whether there is a message along a route; activations of a stage that feeds several are sent always."""
        source, target, *_ = route
        is_for_one = len(self.job.fed[source]) == 1 or not VALUES[self.job.value_of(route)].onward
        return self.has(micros, source) and (not is_for_one or self.has(micros, target))

    def is_last_sink(self, micro: int, stage: int) -> bool:
        """Whether a stage that feeds no other is the last one of these that a micro-batch has: it counts the items."""
        return not any(other > stage and self.has(micro, other) for other in self.job.sinks)
