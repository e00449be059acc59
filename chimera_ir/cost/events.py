"""Events between the operations of a timeline: launches of sums of gradients, and steps of weights."""

from dataclasses import dataclass
from fractions import Fraction

from chimera_ir.ir.ids import Version, WeightGroup, Worker
from chimera_ir.ir.levels import Strategy


@dataclass(frozen=True, slots=True)
class Launched:
    """The launch of the sum of a group's gradients on one worker; times in the unit of the costs.

    ``free`` is how long the worker idles from the launch to the wait for the sum, or to the worker's last operation if
    that comes first: regions (a) and (b) of Figure 6. ``flush`` is the time from the last operation to the end of the
    makespan if the wait comes after all operations, region (c); without a flush it is 0.
    """

    worker: Worker
    group: WeightGroup
    strategy: Strategy
    at: Fraction
    free: Fraction
    flush: Fraction


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step of an asynchronous program, which makes ``version`` of a group's weights."""

    worker: Worker
    group: WeightGroup
    version: Version
    at: Fraction


Event = Launched | Stepped
