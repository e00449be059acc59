"""What happens between the operations of a timeline: sums of gradients are launched, weights stepped."""

from dataclasses import dataclass
from fractions import Fraction

from chimera_ir.ir.ids import Stage, Version, Worker
from chimera_ir.ir.levels import Strategy


@dataclass(frozen=True, slots=True)
class Launched:
    """The sum of a stage's gradients, as one worker launches it; times in the unit of the costs.

    ``free`` is the time in which the worker idles between the launch and the wait for the sum, or its last operation:
    the regions (a) and (b) of Figure 6. ``flush`` is what is left to the makespan where the wait comes after all
    operations, region (c); without a flush it is 0.
    """

    worker: Worker
    stage: Stage
    strategy: Strategy
    at: Fraction
    free: Fraction
    flush: Fraction


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step of an asynchronous program: the weights of a stage become ``version``."""

    worker: Worker
    stage: Stage
    version: Version
    at: Fraction


Event = Launched | Stepped
