"""A weight group on a rank: the weights that are summed and stepped together, of a stage or of what stages share."""

from collections.abc import Callable

import torch

from chimera_runtime.blame import LaneOperation, ModelError
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.program.weight_groups import Group, group_key
from chimera_runtime.stage.sums import GradientSum
from chimera_runtime.stage.weight_versions import Unstepped, Weights
from chimera_runtime.values.tensors import Tensors, seed_torch


class WeightGroup:
    """The versions of some weights, their gradients and the sum of these.

    ``updates`` counts the steps so far; ``on_step`` is called after each.
    """

    def __init__(self, group: Group, weights: Weights, gradients: GradientSum, numbering: Numbering) -> None:
        self.group = group
        self.updates = 0
        self.on_step: Callable[[WeightGroup], None] = lambda _group: None
        self._weights = weights
        self._sum = gradients
        self._numbering = numbering

    def restart(self) -> None:
        """From now on versions are counted from the newest weights, the only ones that are alive."""
        self._weights.begin()

    def select(self, version: int) -> None:
        """From now on the parameters show a version that is alive."""
        self._weights.select(version)

    def select_newest(self) -> None:
        """From now on the parameters show the newest version."""
        self._weights.select_newest()

    def stash(self, version: int) -> None:
        """Keeps the newest weights, which are ``version``, beside those that the next step makes."""
        self._weights.stash(version)

    def drop(self, version: int) -> None:
        """Lets a stashed version go."""
        self._weights.drop(version)

    def collect(self) -> None:
        """After a backward: takes the gradients that are new in this update into the sum."""
        self._sum.collect()

    def count(self, counts: Tensors) -> None:
        """After a backward of its first stage: what the micro-batch counts in the loss, if ``loss`` tells it."""
        self._sum.count(counts)

    def all_reduce(self) -> None:
        """Launches the sum of the gradients over all ranks that hold the group."""
        self._sum.launch()

    def wait_all_reduce(self) -> None:
        """Returns when every parameter's ``grad`` is the sum over all ranks; errors as in `GradientSum.wait`."""
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
        """A parameter whose gradient of an update under way was taken away, if there is one."""
        return self._sum.disturbed

    def clear_gradients(self) -> None:
        """Begins an update of weights whose gradients stayed: no parameter has one."""
        self._sum.clear()

    def rehearse(self) -> None:
        """From now on sums are of zeros, for their size alone, and steps leave the weights alone."""
        self._sum.rehearse()
        self._weights = Unstepped()

    def _stepped(self) -> None:
        self.updates += 1
        self.on_step(self)
