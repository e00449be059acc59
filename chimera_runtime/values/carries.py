"""Carries: what a stage leaves for the next slice of a micro-batch, such as keys and values of attention.

A stage that looks back says so by its signature: ``forward(x, carry=None, start=0)`` returns its output and a carry. It
gets the carry of the slice before, None for the first slice, and the position at which its slice starts. The carry of a
stack of layers is a dict of the carries of its layers.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any

import torch

from chimera_runtime.errors import values as mistakes
from chimera_runtime.values.nested import Constant, Form, form_of, leaves, taken_apart
from chimera_runtime.values.tensors import Tensors

CARRY, START = "carry", "start"
"""Names of the parameters by which a forward takes the carry, and the position of the first item of its slice."""

OF_LAYERS = "_of_layers"
"""Name of the keyword argument in which a stack of layers gets carry and start, apart from those of a batch."""

_BY_NAME = {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}


@dataclass(frozen=True)
class SliceArguments:
    """Arguments of slices that the forward of a stage takes: ``carry``, ``start``, both or neither.

    A forward that takes a carry also returns one. If ``by_layer``, the stage is a stack of layers, which passes the
    arguments on to them.
    """

    carry: bool = False
    start: bool = False
    by_layer: bool = False

    @property
    def any(self) -> bool:
        """Whether the forward takes any argument of slices."""
        return self.carry or self.start

    def without(self, keywords: Container[str]) -> "SliceArguments":
        """Returns these arguments without those names that the user's ``keywords`` have: such a name is the user's."""
        return replace(self, carry=self.carry and CARRY not in keywords, start=self.start and START not in keywords)

    def split_result(self, name: str, returned: Any) -> tuple[Any, Any]:
        """Returns the output and the carry in what a forward has returned; the carry is None if there is none.

        ``name`` is the stage or the layer in messages.

        Raises `BadModel` if a forward that takes a carry returns anything but a pair.
        """
        if not self.carry:
            return returned, None
        if type(returned) is not tuple or len(returned) != 2:
            raise mistakes.carry_is_not_returned(name, type(returned).__name__)
        return returned


NO_ARGUMENTS = SliceArguments()


def slice_arguments(module: torch.nn.Module) -> SliceArguments:
    """Returns which arguments of slices a module names in the signature of its forward."""
    inner = getattr(module, "_orig_mod", module)  # the module inside that of torch.compile
    named = getattr(inner, "slice_arguments", None)
    if isinstance(named, SliceArguments):
        return named
    try:
        parameters = list(signature(inner.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return NO_ARGUMENTS
    names = {parameter.name for parameter in parameters if parameter.kind in _BY_NAME}
    return SliceArguments(CARRY in names, START in names)


@dataclass(frozen=True)
class Carry:
    """Carry from a slice to the next: tensors without a graph, and the position where the next slice starts.

    A tensor is ``recorded`` if it requires a gradient.
    """

    tensors: Tensors
    recorded: tuple[bool, ...]
    form: Form
    position: int

    @classmethod
    def of(cls, value: Any, position: int) -> "Carry":
        """Returns the carry that a forward has returned; ``position`` is that of the first item of the next slice."""
        tensors, form = taken_apart(value)
        return cls(tuple([t.detach() for t in tensors]), tuple([t.requires_grad for t in tensors]), form, position)

    def leaves(self) -> Tensors:
        """Returns the tensors as leaves of a new graph, without copying them."""
        return tuple([t.detach().requires_grad_(r) for t, r in zip(self.tensors, self.recorded, strict=True)])

    def arguments(self, takes: SliceArguments, tensors: Tensors) -> Mapping[str, Any]:
        """Returns the keyword arguments with which a forward reads this carry: those that it ``takes``.

        ``tensors`` replace the tensors of the carry.
        """
        arguments: dict[str, Any] = {CARRY: self.form.filled(tensors)} if takes.carry else {}
        if takes.start:
            arguments[START] = self.position
        return {OF_LAYERS: arguments} if takes.by_layer and arguments else arguments

    @property
    def opaque(self) -> str | None:
        """The type of some part of the carry that is no tensor and no constant, and so may hide tensors; else None."""
        kinds = [type(e).__name__ for e in self.form.entries if e is not ... and not isinstance(e, Constant)]
        return kinds[0] if kinds else None

    def layout(self) -> tuple[Form, list[tuple[tuple[int, ...], torch.dtype]]]:
        """Returns what must be equal for the same slice of all micro-batches: structure, shapes and dtypes."""
        return self.form, [(tuple(t.shape), t.dtype) for t in self.tensors]


NO_CARRY = Carry((), (), form_of(None), 0)
"""The carry that the first slice of a micro-batch reads."""


def slice_length(argument: Any) -> int:
    """Returns the number of items of a slice: dimension 1 of the first tensor that has one; 0 if none has one."""
    tensors = (leaf for leaf in leaves(argument) if isinstance(leaf, torch.Tensor))
    return next((tensor.size(1) for tensor in tensors if tensor.dim() > 1), 0)
