"""Pairs: a forward and a backward of different micro-batches that a rank runs as one operation.

A module may have a method for both, ``forward_and_backward(inputs, backward, **keywords)``: it returns what its forward
returns for the inputs, and also runs a `Backward`, in any order and on any CUDA streams. The forward runs first and
then the backward if there is no such method, or if the forward is recomputed or is over several micro-batches.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from chimera_runtime.errors import BadModel
from chimera_runtime.errors import stage as mistakes
from chimera_runtime.values.tensors import Tensors

if TYPE_CHECKING:
    from chimera_runtime.stage.stage import Stage

METHOD = "forward_and_backward"
"""Name of the method with which a module runs a forward and a backward together."""


class Backward:
    """Backward of a pair, which the method ``forward_and_backward`` of the forward's module gets as an argument.

    To call this object is to run the backward, which adds to the ``.grad`` of the leaves of the graph. A method that
    runs the backward piece by piece takes ``roots`` and ``gradients`` instead. ``module`` is the module whose forward
    made the graph; it may belong to another stage than the method. ``begun`` says whether the method has run the
    backward, or taken the roots in order to run it.
    """

    def __init__(self, module: torch.nn.Module, roots: Tensors, gradients: Tensors) -> None:
        self.module = module
        self.begun = False
        self._roots = roots
        self._gradients = gradients

    def __call__(self) -> None:
        """Runs the backward, in one go."""
        if self.begun:
            raise BadModel(mistakes.BACKWARD_OF_PAIR_RAN_TWICE)
        self.begun = True
        if self._roots:
            torch.autograd.backward(self._roots, self._gradients)

    @property
    def roots(self) -> Tensors:
        """Tensors at which the backward begins. A method that reads this property must run the backward."""
        self.begun = True
        return self._roots

    @property
    def gradients(self) -> Tensors:
        """The gradient of each of the roots, with which the backward begins."""
        return self._gradients


class ModuleCalls:
    """Functions by which a stage runs its module's forward and a backward; a pair replaces both while it runs."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.forward: Callable[..., Any] = module
        self.backward: Callable[[Tensors, Tensors], None] | None = None

    def differentiate(self, roots: Tensors, gradients: Tensors) -> None:
        """Runs a backward from its roots, which begin with ``gradients``, to the leaves of its graph."""
        if self.backward is not None:
            self.backward(roots, gradients)
        elif roots:
            torch.autograd.backward(roots, gradients)


def run_pair(stage: "Stage", forward: tuple[Any, ...], other: "Stage", backward: tuple[Any, ...]) -> None:
    """Runs a pair: ``stage.forward(*forward)`` and ``other.backward(*backward)``; both may be one stage.

    If the module of ``stage`` has the method `METHOD`, a call of the method runs both. If the backward's forward is
    recomputed, its second run comes before this call, because the method runs the backward on the graph.
    """
    method = getattr(stage.calls.module, METHOD, None)
    if not callable(method):
        stage.forward(*forward)
        other.backward(*backward)
        return

    # The backward comes first. At the point where it would run its graph it runs the forward instead, whose module
    # gets the backward as an argument.
    def run_both(roots: Tensors, gradients: Tensors) -> None:
        other.calls.backward = None
        backward_of_pair = Backward(other.calls.module, roots, gradients)
        stage.calls.forward = partial(method, backward=backward_of_pair)
        try:
            stage.forward(*forward)
        finally:
            stage.calls.forward = stage.calls.module
        if not backward_of_pair.begun:
            raise mistakes.backward_of_pair_did_not_run(METHOD, stage.number)

    other.calls.backward = run_both
    try:
        other.backward(*backward)
    finally:
        other.calls.backward = None
