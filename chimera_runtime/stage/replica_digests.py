"""Digests of the weights of replicas, bit by bit, computed on the device of the weights."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

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
    """Weights on this rank that other ranks hold as well, by weight group; the groups have one order on all ranks.

    ``names`` has for each parameter the words that stand for it in messages.
    """

    def __init__(
        self, parameters: Mapping[Group, Sequence[torch.Tensor]], names: Mapping[torch.Tensor, str], read: Reader
    ) -> None:
        self._parameters = {group: of_group for group, of_group in parameters.items() if of_group}
        self._names = names
        self._read = read

    def begin(self, groups: Iterable[Group] | None = None) -> dict[Group, Callable[[], Fact]]:
        """Begins to read digests of the newest weights of each group, by default of all.

        Returns for each group a function that ends the reading, and returns a fact that ranks compare.
        """
        chosen = self._parameters if groups is None else [group for group in groups if group in self._parameters]
        return {group: partial(self._fact, group, self._read(_sums(self._parameters[group]))) for group in chosen}

    def _fact(self, group: Group, numbers: Numbers) -> Fact:
        digests = [*map(int, numbers())]
        names = [f"a digest of {self._names[parameter]}" for parameter in self._parameters[group]]
        return _together(digests), lambda: {n: f"{number:x}" for n, number in zip(names, digests, strict=True)}


def bits(tensor: torch.Tensor) -> int:
    """A digest of the bits of a tensor: an integer below 2**20, computed on its device."""
    return int(*_sums([tensor]))


@torch.no_grad()
def _sums(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [_sum(local(tensor)) for tensor in tensors]


def _together(digests: Sequence[int]) -> int:
    return sum(digest * (2 * place + 1) for place, digest in enumerate(digests)) % _PRIME


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits as integers, which may overflow; less than 2**20."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    kind = INTEGERS[tensor.element_size()]
    return tensor.view(kind).sum(dtype=torch.int64).remainder(_PRIME)
