"""The input of a stage: what its module is called on, and the gradients for the stage before."""

from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch

from chimera_runtime.errors.stage import tensor_was_unused_at_first
from chimera_runtime.values.boundary import Boundary
from chimera_runtime.values.nested import fresh, mapped
from chimera_runtime.values.shared_memory import note_received, unshared
from chimera_runtime.values.tensors import Tensors, plain


@dataclass
class StageInput:
    """The input of a stage; ``before`` describes the tensors of the stage before, and is None for the first stage.

    With ``copies`` the first stage is called on copies of the loaded data, because it changes its input.
    """

    number: int
    before: Boundary | None
    copies: bool = False

    def argument(self, inputs: Any) -> tuple[Tensors, Any]:
        """Returns the leaves of a new graph, and the argument of the module: the leaves in new containers."""
        if self.before is None:
            argument = mapped(inputs, torch.clone) if self.copies else fresh(inputs)
            note_received(argument)
            return (), argument
        leaves = tuple(t.detach().requires_grad_(r) for t, r in zip(inputs, self.before.recorded, strict=True))
        return leaves, self.before.form.filled(leaves)

    def take_gradients(self, leaves: Tensors, counts: Tensors) -> Tensors:
        """Returns the message to the stage before: the gradients of the leaves, then the loss count, if any.

        ``grad`` of the leaves is cleared: otherwise a graph that waits for its second half would keep it in memory.

        Raises `BadModel` if a tensor has a gradient although it had none for the first micro-batch.
        """
        if self.before is None:
            return ()
        for leaf, recorded, expected in zip(leaves, self.before.recorded, self.before.differentiable, strict=True):
            if not recorded:
                leaf.grad = None  # the stage called requires_grad_(); no parameter before it needs the gradient
            elif leaf.grad is not None and not expected:
                raise tensor_was_unused_at_first(self.number)
        gradients = map(self._take_gradient, compress(leaves, self.before.differentiable))
        return (*gradients, *[count.clone() for count in counts])

    def _take_gradient(self, leaf: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of a leaf, in memory that neither a later message nor a later backward writes."""
        gradient, leaf.grad = leaf.grad, None
        return torch.zeros_like(leaf) if gradient is None else unshared(plain(gradient))
