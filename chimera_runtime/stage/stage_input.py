"""What a stage is called on, and what it hands back: the gradients of what it was given."""

from itertools import compress
from typing import Any

import torch

from chimera_runtime.errors import BadModel
from chimera_runtime.values.aliases import unshared
from chimera_runtime.values.boundary import Boundary
from chimera_runtime.values.nested import fresh, mapped
from chimera_runtime.values.tensors import Tensors, plain


class StageInput:
    """The beginning of a stage; ``before`` is what it receives, None for the first stage.

    ``copies`` says that the first stage is called on copies of what was loaded, which it changes.
    """

    def __init__(self, number: int, before: Boundary | None, copies: bool = False) -> None:
        self.before = before
        self._number = number
        self._copies = copies

    def argument(self, inputs: Any) -> tuple[Tensors, Any]:
        """The tensors whose gradients are wanted, and what the module is called on, in containers of its own."""
        if self.before is None:
            return (), mapped(inputs, torch.clone) if self._copies else fresh(inputs)
        leaves = tuple(t.detach().requires_grad_(r) for t, r in zip(inputs, self.before.recorded, strict=True))
        return leaves, self.before.form.filled(leaves)

    def take_gradients(self, leaves: Tensors, counts: Tensors) -> Tensors:
        """The gradients of the leaves, once they are there, and what their micro-batch counts in the loss.

        The leaves have them no longer: what remains of the graph for the weights' gradients would keep them.

        Raises
        ------
        BadModel
            If a tensor has a gradient of which the first micro-batch had none.
        """
        if self.before is None:
            return ()
        for leaf, recorded, expected in zip(leaves, self.before.recorded, self.before.differentiable, strict=True):
            if not recorded:
                leaf.grad = None  # there if the stage called requires_grad_(), and for no parameter before it
            elif leaf.grad is not None and not expected:
                raise BadModel(
                    f"stage {self._number} uses a tensor of stage {self._number - 1} that it did not use for the first "
                    "micro-batch; use the same tensors every time"
                )
        return (*map(self._own, compress(leaves, self.before.differentiable)), *[count.clone() for count in counts])

    def _own(self, leaf: torch.Tensor) -> torch.Tensor:
        """The leaf's gradient, in memory that neither a later message nor a later backward writes."""
        gradient, leaf.grad = leaf.grad, None
        return torch.zeros_like(leaf) if gradient is None else unshared(plain(gradient))
