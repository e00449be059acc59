"""The weights of a stage: one version that steps change in place, or several that are alive at once."""

from collections.abc import Sequence
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import FAILED

_STEPPING = UserCode("the optimizer's step", FAILED)


class Weights:
    """Weights of which there is one version: a step changes the module's own parameters.

    ``gradients_stay`` says that they do so after a step, ``overlap`` that updates do: an operation of an update may run
    before the step of the one before.
    """

    gradients_stay = False
    overlap = False

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def begin(self) -> None:
        """Nothing: versions have no numbers."""

    def select(self, version: int) -> None:
        """Nothing: there is nothing to choose from."""

    def select_newest(self) -> None:
        """Nothing: there is nothing to choose from."""

    def stash(self, version: int) -> None:
        """Keeps no copy: no operation reads an older version."""

    def drop(self, version: int) -> None:
        """Frees nothing, as nothing was stashed."""

    def step(self) -> None:
        """The optimizer's step."""
        with _STEPPING:
            self._optimizer.step()


class Unstepped(Weights):
    """Weights that are stepped after the update, by whoever called it, with the gradients that it leaves."""

    gradients_stay = True

    def __init__(self) -> None:
        super().__init__(None)

    def step(self) -> None:
        """Nothing: the gradients wait for the step."""


def masters(parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """For each parameter another one in the same memory, with the same attributes: what the optimizer is given."""
    made = []
    for parameter in parameters:
        made.append(torch.nn.Parameter(parameter.data))
        made[-1].__dict__.update(parameter.__dict__)
    return made


class Versions(Weights):
    """Weights of which several versions are alive: an operation reads the one it names, a step makes the next.

    The module's parameters show one version at a time, and nothing changes them in place: a step changes the masters,
    which lie in the memory of the newest version. So a backward finds what its forward saved, if it selects the version
    of its forward: autograd saved either the parameter itself, which shows the same tensor again, or a view into
    that tensor's memory. As the parameters' version counters stand still, autograd has nothing to object to.
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
        """How many copies of the weights there is memory for."""
        return len(self._alive) + len(self._free)

    def begin(self) -> None:
        """Shows the newest weights, the only ones that are alive, and calls them version 0 from now on."""
        assert [*self._alive] == [self._newest], f"versions {[*self._alive]} are alive"
        self.select(self._newest)
        self._alive = {0: self._front}
        self._newest = 0

    def select(self, version: int) -> None:
        """Makes the module's parameters show a version that is alive; their gradients stay."""
        tensors = self._alive[version]
        if tensors is self._shown:
            return
        self._shown = tensors
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            parameter.data = tensor
        torch.clear_autocast_cache()  # which knows a parameter by its object, whatever it shows

    def select_newest(self) -> None:
        """Makes the module's parameters show the version that the last step made."""
        self.select(self._newest)

    def stash(self, version: int) -> None:
        """Keeps the newest weights, which are ``version``: the next step works on a copy of them."""
        assert version == self._newest, f"version {version} is not the newest, which is {self._newest}"
        kept = self._front
        self._front = self._free.pop() if self._free else [torch.empty_like(tensor) for tensor in kept]
        if kept:
            torch._foreach_copy_(self._front, kept)
        for master, tensor in zip(self._masters, self._front, strict=True):
            master.data = tensor

    def drop(self, version: int) -> None:
        """Lets a stashed version go; its memory is used again."""
        self._free.append(self._alive.pop(version))

    def step(self) -> None:
        """Makes the next version of the newest one, with the gradients that the parameters have."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = parameter.grad
            if hasattr(parameter, "main_grad"):
                master.main_grad = parameter.main_grad  # type: ignore[attr-defined]
        super().step()
        torch.clear_autocast_cache()
        if self._alive[self._newest] is self._front:
            del self._alive[self._newest]
        self._newest += 1
        self._alive[self._newest] = self._front
