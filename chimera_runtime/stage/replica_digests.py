"""Digests of the weights of replicas, bit by bit, computed on the device of the weights."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from chimera_runtime.program.weight_groups import Group
from chimera_runtime.ranks.agreement import Fact
from chimera_runtime.ranks.device_to_host import Numbers, Reader
from chimera_runtime.stage.rerun_comparison import INTEGERS
from chimera_runtime.values.mesh_tensors import local

_EVERY = 100
_PRIME = 1048573
"""The largest prime below 2**20, so that remainders fit into a fact."""


def is_due(update: int) -> bool:
    """Whether weights are compared after ``update`` updates: after 1, 2, 4, 8 .., and after every 100th."""
    return update > 0 and (update & (update - 1) == 0 or update % _EVERY == 0)


class Replicas:
    """Weights on this rank that other ranks hold as well, by weight group; the groups have one order on all ranks."""

    def __init__(self, parameters: Mapping[Group, Sequence[torch.Tensor]], read: Reader) -> None:
        self._parameters = {group: of_group for group, of_group in parameters.items() if of_group}
        self._read = read

    def begin(self, groups: Iterable[Group] | None = None) -> dict[Group, Numbers]:
        """Begins to read a digest of the newest weights of each group, by default of all; `digest` ends the reading."""
        chosen = self._parameters if groups is None else [group for group in groups if group in self._parameters]
        return {group: self._read([bits(self._parameters[group])]) for group in chosen}


def digest(numbers: Numbers) -> Fact:
    """Reads a digest that `Replicas.begin` has begun to read, and returns it as a fact that ranks compare."""
    (number,) = numbers()
    return int(number), lambda: {"a digest of their bits": f"{int(number):x}"}


@torch.no_grad()
def bits(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A digest of the bits of tensors: an integer below 2**20, computed on their device."""
    sums = torch.stack([_sum(local(tensor)) for tensor in tensors])
    weights = torch.arange(1, 2 * len(tensors), 2, device=sums.device)
    return (sums * weights).sum().remainder(_PRIME)


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits as integers, which may overflow."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    kind = INTEGERS[tensor.element_size()]
    return tensor.view(kind).sum(dtype=torch.int64).remainder(_PRIME)
