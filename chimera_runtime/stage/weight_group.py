"""A weight group on a rank: weights that are summed and stepped together, of one stage or of a tie."""

from collections.abc import Callable

import torch

from chimera_runtime.blame import LaneOperation, ModelError
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.program.weight_groups import Group, group_key
from chimera_runtime.stage.gradient_sums import GradientSum
from chimera_runtime.stage.weight_versions import Unstepped, Weights
from chimera_runtime.values.tensors import Tensors, seed_torch


class WeightGroup:
    """The versions of some weights, their gradients and the sum of these.

    ``updates`` counts the steps so far; ``on_step`` is called after each.
    """

    def __init__(self, group: Group, weights: Weights, gradient_sum: GradientSum, numbering: Numbering) -> None:
        self.group = group
        self.updates = 0
        self.on_step: Callable[[WeightGroup], None] = lambda _group: None
        self._weights = weights
        self._sum = gradient_sum
        self._numbering = numbering

    def restart(self) -> None:
        """Makes the newest weights version 0. Call it only while no other version is in memory."""
        self._weights.begin()

    def select(self, version: int) -> None:
        """Makes the parameters show a version that is in memory."""
        self._weights.select(version)

    def select_newest(self) -> None:
        """Makes the parameters show the newest version."""
        self._weights.select_newest()

    def stash(self, version: int) -> None:
        """Keeps the newest weights, whose number is ``version``, when the next step makes others."""
        self._weights.stash(version)

    def drop(self, version: int) -> None:
        """Frees a stashed version."""
        self._weights.drop(version)

    def collect(self) -> None:
        """Takes the gradients of a backward into the sum. Call it after each backward."""
        self._sum.collect()

    def count(self, counts: Tensors) -> None:
        """Adds the loss count of a micro-batch. Call it after a backward of the group's first stage."""
        self._sum.count(counts)

    def all_reduce(self) -> None:
        """Launches the sum of the gradients over all ranks that hold the group."""
        self._sum.launch()

    def wait_all_reduce(self) -> None:
        """Returns when ``grad`` of every parameter is the sum over all ranks; errors as in `GradientSum.wait`."""
        self._sum.wait()

    def step(self) -> None:
        """Updates the weights and begins the next update of the group."""
        seed_torch(self._numbering.step_seed(self.updates, *self.group))
        try:
            self._weights.step()
        except ModelError as error:
            error.during(LaneOperation("step", group_key(self.group), (), self.updates))
            raise
        if not self._weights.gradients_stay:
            self._sum.clear()
        self._stepped()

    @property
    def disturbed_parameter(self) -> torch.nn.Parameter | None:
        """A parameter whose gradient was replaced or cleared in the middle of an update, if there is one."""
        return self._sum.disturbed

    def clear_gradients(self) -> None:
        """Clears the gradients that the last update left, before the next one."""
        self._sum.clear()

    def rehearse(self) -> None:
        """Makes all later sums add zeros, in the same size, and all later steps leave the weights as they are."""
        self._sum.rehearse()
        self._weights = Unstepped()

    def _stepped(self) -> None:
        self.updates += 1
        self.on_step(self)
