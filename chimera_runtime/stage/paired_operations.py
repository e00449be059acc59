"""Pairs: a forward and a backward of different micro-batches that a rank runs as one operation.

A module may have a method for both, ``forward_and_backward(inputs, backward, **keywords)``: it returns what its forward
returns for the inputs, and runs a `Backward` beside it, in whatever order and on whatever streams it likes. Without the
method, or where the forward keeps its input alone or is over several micro-batches, one runs after the other.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from chimera_runtime.errors import BadModel
from chimera_runtime.values.tensors import Tensors

METHOD = "forward_and_backward"
"""The name of the method."""


class Backward:
    """The backward of a pair, for the method of the forward's module.

    Calling it runs the backward: it adds to the ``.grad`` of the leaves of the graph. A method that does so in pieces
    of its own asks for ``roots`` and ``gradients``, and never calls.

    Attributes
    ----------
    module
        The module whose graph it is; it may be another stage's.
    begun
        Whether the method has run the backward, or taken it into its own hands.
    """

    def __init__(self, module: torch.nn.Module, roots: Tensors, gradients: Tensors) -> None:
        self.module = module
        self.begun = False
        self._roots = roots
        self._gradients = gradients

    def __call__(self) -> None:
        """Runs the backward, in one go."""
        if self.begun:
            raise BadModel("the backward of a pair runs once: it was called, or its roots were taken, before")
        self.begun = True
        if self._roots:
            torch.autograd.backward(self._roots, self._gradients)

    @property
    def roots(self) -> Tensors:
        """The ends of the graph. The backward is now in the hands of whoever asked."""
        self.begun = True
        return self._roots

    @property
    def gradients(self) -> Tensors:
        """The gradient of each root."""
        return self._gradients


class ModuleCalls:
    """How a stage calls its module, and how it runs backwards: plainly, unless a pair is under way."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.forward: Callable[..., Any] = module
        self.backward: Callable[[Tensors, Tensors], None] | None = None

    def differentiate(self, roots: Tensors, gradients: Tensors) -> None:
        """Runs a backward from its roots, whose gradients are given, to the leaves of its graph."""
        if self.backward is not None:
            self.backward(roots, gradients)
        elif roots:
            torch.autograd.backward(roots, gradients)


class _PairedStage(Protocol):
    """What a pair needs of a stage."""

    calls: ModuleCalls
    number: int

    def forward(self, *arguments: Any) -> None: ...

    def backward(self, *arguments: Any) -> None: ...


def run_pair(stage: _PairedStage, forward: tuple[Any, ...], other: _PairedStage, backward: tuple[Any, ...]) -> None:
    """A forward of a stage and a backward of it or another one, with the arguments of each.

    The backward's graph is ready, run again if need be, before the module's method is called.
    """
    method = getattr(stage.calls.module, METHOD, None)
    if not callable(method):
        stage.forward(*forward)
        other.backward(*backward)
        return

    def both(roots: Tensors, gradients: Tensors) -> None:
        other.calls.backward = None
        beside = Backward(other.calls.module, roots, gradients)
        stage.calls.forward = partial(method, backward=beside)
        try:
            stage.forward(*forward)
        finally:
            stage.calls.forward = stage.calls.module
        if not beside.begun:
            raise BadModel(f"{METHOD} of stage {stage.number} returned without its backward; call it: `backward()`")

    other.calls.backward = both
    try:
        other.backward(*backward)
    finally:
        other.calls.backward = None
