"""The numbers of micro-batches, and the seeds that follow from them."""

from dataclasses import dataclass

from chimera_runtime.blame import LaneOperation
from chimera_runtime.values.tensors import draw_seed

Micros = int | tuple[int, ...]
"""A micro-batch, or several that an operation or a message is over."""


@dataclass
class Numbering:
    """How a lane counts its micro-batches.

    Attributes
    ----------
    seed, copy
        ``--seed``, and which copy of the pipelines this is: with update, stage and micro-batch, random numbers depend
        on nothing else.
    passes
        Micro-batches of a copy in an update, in the parts that they are cut into.
    cycle
        Micro-batches after which the schedule repeats: those of an update, or the period where updates overlap.
    first
        The update from whose first micro-batch the lane counts.
    """

    seed: int
    copy: int
    passes: int
    cycle: int
    first: int = 0

    def place(self, micro: int) -> tuple[int, int]:
        """The update that a micro-batch belongs to, and its number there."""
        later, number = divmod(micro, self.passes)
        return self.first + later, number

    def forward_seed(self, micro: int, stage: int) -> int:
        """The seed of a stage's forward."""
        update, number = self.place(micro)
        return draw_seed("forward", self.seed, update, self.copy, number, stage)

    def step_seed(self, update: int, *group: int) -> int:
        """The seed of the step of a weight group, a stage or several, the same on all replicas."""
        return draw_seed("step", self.seed, update, *group)

    def operation(self, kind: str, micros: Micros, stage: int) -> LaneOperation:
        """An operation on micro-batches, for messages."""
        several = micros if isinstance(micros, tuple) else (micros,)
        update, _ = self.place(several[0])
        return LaneOperation(kind, stage, tuple(self.place(micro)[1] for micro in several), update)
