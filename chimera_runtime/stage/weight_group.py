"""A weight group on a rank: weights that are summed and stepped together, of one stage or of a tie."""

from collections.abc import Callable

from chimera_runtime.blame import LaneOperation, ModelError
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.program.weight_groups import Group, group_key
from chimera_runtime.stage.gradient_sums import GradientSum
from chimera_runtime.stage.weight_versions import Unstepped, Weights
from chimera_runtime.values.tensors import seed_torch


class WeightGroup:
    """Weights in all their versions, with the sum of their gradients.

    ``updates`` counts the steps so far; ``on_step`` is called after each.
    """

    def __init__(self, group: Group, weights: Weights, gradient_sum: GradientSum, numbering: Numbering) -> None:
        self.group = group
        self.weights = weights
        self.gradient_sum = gradient_sum
        self.updates = 0
        self.on_step: Callable[[WeightGroup], None] = lambda _group: None
        self._numbering = numbering

    def stash(self, version: int) -> None:
        """Keeps the newest weights, whose number is ``version``, when the next step makes others."""
        self.weights.stash(version)

    def drop(self, version: int) -> None:
        """Frees a stashed version."""
        self.weights.drop(version)

    def all_reduce(self) -> None:
        """Launches the sum of the gradients over all ranks that hold the group."""
        self.gradient_sum.launch()

    def wait_all_reduce(self) -> None:
        """Returns when ``grad`` of every parameter is the sum over all ranks; errors as in `GradientSum.wait`."""
        self.gradient_sum.wait()

    def step(self) -> None:
        """Updates the weights and begins the next update of the group."""
        seed_torch(self._numbering.step_seed(self.updates, *self.group))
        try:
            self.weights.step()
        except ModelError as error:
            error.during(LaneOperation("step", group_key(self.group), (), self.updates))
            raise
        if not self.weights.gradients_stay:
            self.gradient_sum.clear()
        self.updates += 1
        self.on_step(self)

    def rehearse(self) -> None:
        """Makes all later sums add zeros, in the same size, and all later steps leave the weights as they are."""
        self.gradient_sum.rehearse()
        self.weights = Unstepped()
