"""The weights of a stage or a tie: one version that steps change in place, or several that are alive at once.

On a rank they are a `WeightGroup`: weights that are summed and stepped together.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from chimera_runtime.blame import LaneOperation, UserCode, during
from chimera_runtime.errors import FAILED
from chimera_runtime.program.numbering import Numbering
from chimera_runtime.program.rank_facts import Group, group_key
from chimera_runtime.stage.gradient_sums import GradientSum
from chimera_runtime.values.nested import seed_torch

_STEPPING = UserCode("the optimizer's step", FAILED)


class Weights:
    """Weights with one version, which a step changes in place. ``gradients_stay``: ``grad`` is not cleared after a
    step. ``overlap``: operations of an update may run before the step of an earlier one.
    """

    gradients_stay = False
    overlap = False

    def __init__(self, optimizer: Any = None) -> None:
        self._optimizer = optimizer

    def begin(self) -> None:
        """Does nothing, because the only version needs no number."""

    def select(self, version: int) -> None:
        """Does nothing, because there is only one version."""

    def select_newest(self) -> None:
        """Does nothing, because there is only one version."""

    def stash(self, version: int) -> None:
        """Does nothing, because no operation reads an older version."""

    def drop(self, version: int) -> None:
        """Does nothing, because no version was stashed."""

    def step(self) -> None:
        """Runs the optimizer's step."""
        with _STEPPING:
            self._optimizer.step()


class Unstepped(Weights):
    """Weights that the user's loop steps after an update, with the gradients that the update has left in ``grad``."""

    gradients_stay = True

    def step(self) -> None:
        """Does nothing, because the user's loop steps later."""


def masters(parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Returns for each of ``parameters`` a second parameter, for the optimizer, with the same memory and attributes."""
    copies = []
    for parameter in parameters:
        copies.append(torch.nn.Parameter(parameter.data))
        copies[-1].__dict__.update(parameter.__dict__)
    return copies


class Versions(Weights):
    """Weights with several versions in memory: an operation reads the version that it names, a step makes the next.

    The parameters of the module show one version at a time, and nothing changes them in place: a step changes the
    masters, parameters of their own in the memory of the newest version. So a backward that selects the version of its
    forward finds what the forward saved: autograd saved either the parameter, which shows the same tensor again, or a
    view into the memory of that tensor. Autograd raises no error, as the parameters' version counters do not change.
    """

    overlap = True

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], masters: Sequence[torch.nn.Parameter], optimizer: Any
    ) -> None:
        super().__init__(optimizer)
        self._parameters = parameters
        self._masters = masters
        self._newest = 0
        self._front = [master.data for master in masters]
        self._alive = {0: self._front}
        self._shown = self._front
        self._free: list[list[torch.Tensor]] = []

    @property
    def copies(self) -> int:
        """Number of copies of the weights that are in memory, free ones included."""
        return len(self._alive) + len(self._free)

    def begin(self) -> None:
        """Makes the newest weights version 0. Call it only while no other version is in memory."""
        assert [*self._alive] == [self._newest], f"versions {[*self._alive]} are alive"
        self.select(self._newest)
        self._alive = {0: self._front}
        self._newest = 0

    def select(self, version: int) -> None:
        """Makes the parameters of the module show a version; their gradients stay."""
        tensors = self._alive[version]
        if tensors is self._shown:
            return
        self._shown = tensors
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            parameter.data = tensor
        torch.clear_autocast_cache()  # its keys are the parameters, whatever they show

    def select_newest(self) -> None:
        """Makes the parameters of the module show the version that the last step made."""
        self.select(self._newest)

    def stash(self, version: int) -> None:
        """Keeps the newest weights, which are ``version``; the next step changes a copy of them."""
        assert version == self._newest, f"version {version} is not the newest, which is {self._newest}"
        stashed = self._front
        self._front = self._free.pop() if self._free else [torch.empty_like(tensor) for tensor in stashed]
        if stashed:
            torch._foreach_copy_(self._front, stashed)
        for master, tensor in zip(self._masters, self._front, strict=True):
            master.data = tensor

    def drop(self, version: int) -> None:
        """Frees a stashed version; its memory is used again."""
        self._free.append(self._alive.pop(version))

    def step(self) -> None:
        """Makes the next version from the newest one, with the gradients of the parameters."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = parameter.grad
            if hasattr(parameter, "main_grad"):
                master.main_grad = parameter.main_grad  # type: ignore[attr-defined]
        super().step()
        for master in self._masters:  # the next update writes the memory of gradients that nothing else holds
            master.grad = None
            if hasattr(master, "main_grad"):
                master.main_grad = None
        torch.clear_autocast_cache()
        if self._alive[self._newest] is self._front:
            del self._alive[self._newest]
        self._newest += 1
        self._alive[self._newest] = self._front


class WeightGroup:
    """Weights in all their versions, with the sum of their gradients; ``on_step`` is called after each step."""

    def __init__(self, group: Group, weights: Weights, gradient_sum: GradientSum, numbering: Numbering) -> None:
        self.group = group
        self.weights = weights
        self.gradient_sum = gradient_sum
        self.updates = 0
        self.on_step: Callable[[WeightGroup], None] = lambda _group: None
        self._numbering = numbering

    def begin_round(self, start: int, is_last: bool) -> None:
        """Begins a round of an update, at part ``start`` of its micro-batches. Sums and steps wait for the last one."""
        self._numbering.start, self._numbering.is_last_round = start, is_last

    def stash(self, version: int) -> None:
        """Keeps the newest weights, whose number is ``version``, beyond the next step, which then changes a copy."""
        self.weights.stash(version)

    def drop(self, version: int) -> None:
        """Frees a stashed version."""
        self.weights.drop(version)

    def all_reduce(self) -> None:
        """Launches the sum of the gradients over all ranks that hold the group."""
        if self._numbering.is_last_round:
            self.gradient_sum.launch()

    def wait_all_reduce(self) -> None:
        """Returns when ``grad`` of every parameter is the sum over all ranks; errors as in `GradientSum.wait`."""
        if self._numbering.is_last_round:
            self.gradient_sum.wait()

    def step(self) -> None:
        """Updates the weights and begins the next update of the group."""
        if not self._numbering.is_last_round:
            return
        seed_torch(self._numbering.step_seed(self.updates, *self.group))
        with during(lambda: LaneOperation("step", group_key(self.group), (), self.updates)):
            self.weights.step()
        if not self.weights.gradients_stay:
            self.gradient_sum.clear()
        self.updates += 1
        self.on_step(self)

    def rehearse(self) -> None:
        """Makes all later sums add zeros, in the same size, and all later steps leave the weights as they are."""
        self.gradient_sum.rehearse()
        self.weights = Unstepped()
