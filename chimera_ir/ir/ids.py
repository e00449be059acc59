"""Types of integers that must not be mixed up."""

from typing import NewType

Worker = NewType("Worker", int)
"""A place in the pipeline group, 0 .. workers-1; W copies of the group make W ranks of each worker."""

Stage = NewType("Stage", int)
"""The number of a stage, which is a part of the model, 0 .. D-1."""

WeightGroup = tuple[Stage, ...]
"""Weights that are summed and stepped together, named by the stages that hold them, ascending.

The weights of a stage alone have one stage; parameters that several stages share have all of these. The gradients are
summed over all workers that hold any of the stages."""

Micro = NewType("Micro", int)
"""The number of a micro-batch among those of all pipes, 0 .. N-1; in a turn, counted from its first micro-batch."""

Clock = NewType("Clock", int)
"""The order that a scheme gives an operation; it is not a time."""

Slot = NewType("Slot", int)
"""The index of a receive buffer among those that a worker has for the messages from one stage to another."""

Version = NewType("Version", int)
"""The number of updates that have made the weights of a group; only schemes without a flush have several versions.

In a turn, versions are counted from the one that the updates before the turn have made."""
