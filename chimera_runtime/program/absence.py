"""Absence: the stages that have no part in a micro-batch, because the program or the data leave it out there."""

from collections.abc import Sequence
from dataclasses import dataclass

from chimera_runtime.program.job import Job
from chimera_runtime.program.numbering import Micros, numbers_of


@dataclass
class Absence:
    """The stages that the micro-batches of the update under way do not have.

    ``by_data`` has the stages that each micro-batch lacks because it has no input for some source; micro-batches are
    counted within the update, and whole. What the program leaves out is the same in every update: `Job.lacking`.
    """

    job: Job
    by_data: Sequence[frozenset[int]] = ()

    def has(self, micros: Micros, stage: int) -> bool:
        """Whether a stage has a part in a micro-batch, or in several: either in all of them, or in none."""
        first, job = numbers_of(micros)[0], self.job
        if first % job.cycle in job.lacking.get(stage, ()):
            return False
        return not self.by_data or stage not in self.by_data[first // job.parts % job.micro_batches]

    def is_last_sink(self, micro: int, stage: int) -> bool:
        """Whether a stage that feeds no other is the last one of these that a micro-batch has: it counts the items."""
        return not any(other > stage and self.has(micro, other) for other in self.job.sinks)
