"""Output of the last stage in an evaluation: losses are added up, or outputs are stored."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from chimera_runtime.values.losses import Loss, as_pair
from chimera_runtime.values.mesh_tensors import settled
from chimera_runtime.values.nested import mapped
from chimera_runtime.values.tensors import Tensors


class LastOutput(Protocol):
    """The end of an evaluation's last stage: takes what the module returns for each micro-batch, and its target.

    It adds up the loss, say, or collects outputs.
    """

    def finish(self, micro: int, items: int, returned: Any, target: Any) -> Tensors:
        """Takes what the module ``returned`` for a micro-batch of ``items`` items; returns no tensors to send."""


class LossTotal:
    """Output of the last stage that adds up its losses; a mean is weighted by the items of its micro-batch.

    ``total``, ``items`` and ``count`` are sums over the micro-batches whose last stage runs on this rank.
    """

    def __init__(self, judge: Callable[[Any, Any], Loss]) -> None:
        self._judge = judge
        self.total = torch.zeros((), dtype=torch.float64)
        self.items = 0
        self.count = 0.0

    def finish(self, _micro: int, items: int, returned: Any, target: Any) -> Tensors:
        """Adds the loss of a micro-batch; returns no tensors to send."""
        loss, count = as_pair(self._judge(returned, target))
        total = loss.reshape(()).double()
        self.total = self.total.to(loss.device) + (total * items if count is None else total)
        self.items += items
        self.count += items if count is None else count.item()
        return ()


class OutputStore:
    """Output of the last stage that stores a copy of what the module returns for each micro-batch."""

    def __init__(self) -> None:
        self._outputs: dict[int, Any] = {}

    def finish(self, micro: int, _items: int, returned: Any, _target: Any) -> Tensors:
        """Stores what the module ``returned`` for a micro-batch; returns no tensors to send."""
        self._outputs[micro] = mapped(returned, lambda tensor: settled(tensor).clone())
        return ()

    def take(self) -> dict[int, Any]:
        """Returns the stored values and forgets them."""
        outputs, self._outputs = self._outputs, {}
        return outputs
