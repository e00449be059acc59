"""Types of integers that must not be mixed up."""

from typing import NewType

Worker = NewType("Worker", int)
"""A place in the pipeline group, 0 .. workers-1; W copies of the group make W ranks of each worker."""

Stage = NewType("Stage", int)
"""A slice of the model, 0 .. D-1."""

WeightGroup = tuple[Stage, ...]
"""The stages, ascending, that hold some weights: a single stage, or several stages for parameters that they share.

The gradients of a group are summed together, over all workers that hold any of its stages, and stepped together."""

Micro = NewType("Micro", int)
"""A micro-batch by its global number, 0 .. N-1, over all pipes; in a turn counted from the first one of the turn."""

Clock = NewType("Clock", int)
"""The order that a scheme gives an operation; it is not a time."""

Slot = NewType("Slot", int)
"""A receive buffer, counted per worker, receiving stage and direction."""

Version = NewType("Version", int)
"""The weights of a group by the number of updates that made them; only asynchronous schemes have several versions.

In a turn, versions are counted from the weights that the updates before the turn have made."""
