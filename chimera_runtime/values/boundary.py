"""Boundary and traits of a stage, found at start: the tensors that it hands on, and how it runs."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import torch

from chimera_runtime.values.keywords import KeywordNames
from chimera_runtime.values.nested import Form
from chimera_runtime.values.tensors import Tensors


@dataclass(frozen=True)
class Boundary:
    """Structure and tensors that a stage hands to the next one for every micro-batch, found once at start.

    Attributes
    ----------
    form
        The structure of the returned value; the other attributes are about its tensors, in order.
    shapes, dtypes
        The shape of each tensor for one micro-batch, and its dtype.
    recorded
        Marks the tensors that require a gradient.
    differentiable
        Marks those among them whose gradients come back, because later stages use them.
    counted
        Whether the gradients come with the count of their micro-batch in the loss, a number in float64.
    owned_by_stage
        Marks the tensors whose memory the stage keeps, such as a buffer: they are copied, as a later forward may write
        that memory.
    """

    form: Form
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    recorded: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    counted: bool = False
    owned_by_stage: tuple[bool, ...] = ()

    @classmethod
    def of(cls, form: Form, tensors: Tensors) -> "Boundary":
        """Makes the boundary of outputs, as if the gradients of all recorded tensors came back."""
        recorded = tuple(t.requires_grad for t in tensors)
        return cls(form, tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors), recorded, recorded)

    def shape(self, tensor: int, micros: int) -> tuple[int, ...]:
        """The shape of a tensor that holds several micro-batches along dimension 0."""
        rows = self.shapes[tensor]
        return rows if micros == 1 else (micros * rows[0], *rows[1:])

    def buffers(self, device: torch.device, micros: int = 1) -> Tensors:
        """Allocates the buffers of one message of activations."""
        return tuple(
            torch.zeros(self.shape(i, micros), dtype=dtype, device=device) for i, dtype in enumerate(self.dtypes)
        )

    def gradient_buffers(self, device: torch.device, micros: int = 1) -> Tensors:
        """Allocates the buffers of one message of gradients: of the differentiable tensors, and of the count."""
        gradients = compress(self.buffers(device, micros), self.differentiable)
        counts = (torch.zeros(micros, dtype=torch.float64, device=device),) if self.counted else ()
        return (*gradients, *counts)

    def views(self, memory: Tensors, micros: int) -> Tensors:
        """Returns the first part of larger buffers, in the shapes of a message of this boundary."""
        return tuple(_first_part(tensor, self.shape(i, micros)) for i, tensor in enumerate(memory))

    def gradient_views(self, memory: Tensors, micros: int) -> Tensors:
        """Returns the first part of larger gradient buffers; the count is a number for each micro-batch."""
        shapes = compress([self.shape(i, micros) for i in range(len(self.shapes))], self.differentiable)
        counts = [(micros,)] if self.counted else []
        return tuple(map(_first_part, memory, [*shapes, *counts]))

    def excess(self, outputs: Tensors, form: Form) -> str | None:
        """Text that says how outputs of a smaller update exceed the buffers of this boundary; None if they fit."""
        if form != self.form:
            return f"{form}, and {self.form} for the example"
        for output, shape, dtype in zip(outputs, self.shapes, self.dtypes, strict=True):
            if output.numel() > math.prod(shape) or output.dtype != dtype:
                return f"a tensor {tuple(output.shape)} {output.dtype}, and {shape} {dtype} for the example"
        return None

    def of_items(self, items: int, whole: int) -> "Boundary | None":
        """Returns the boundary of a micro-batch of fewer items than a ``whole`` one; None if it cannot be computed.

        It can be computed if every tensor has equally many rows for each item.
        """
        if not all(shape and shape[0] % whole == 0 for shape in self.shapes):
            return None
        return replace(self, shapes=tuple((shape[0] // whole * items, *shape[1:]) for shape in self.shapes))

    def mismatch(self, outputs: Tensors, form: Form, micros: int) -> str | None:
        """Text that says how outputs, in grad mode also gradients, differ from this boundary; None if they do not."""
        if len(outputs) != len(self.shapes):
            return f"{len(outputs)} tensor{'' if len(outputs) == 1 else 's'} instead of {len(self.shapes)}"
        for i, output in enumerate(outputs):
            shape = self.shape(i, micros)
            if output.shape != shape or output.dtype != self.dtypes[i]:
                now, before = f"{tuple(output.shape)} {output.dtype}", f"{shape} {self.dtypes[i]}"
                return f"tensor {i} is {now} and was {before} for the first micro-batch"
            if torch.is_grad_enabled() and output.requires_grad != self.recorded[i]:
                return f"tensor {i} requires a gradient for one micro-batch and none for another"
        return None if form == self.form else f"{form} and was {self.form} for the first micro-batch"


def _first_part(memory: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return memory.view(-1)[: math.prod(shape)].view(shape)


@dataclass(frozen=True)
class Traits:
    """Behaviour of a stage with the first micro-batch. Texts are empty where there is nothing to say.

    Attributes
    ----------
    buffers
        The names of the buffers that it updates.
    alone
        Why it cannot run several micro-batches at once.
    keywords
        The names of the keyword arguments that it takes.
    auxiliary
        The names of its auxiliary losses.
    whole
        Why its backward cannot be split.
    seeds_all
        Whether it draws from the generators of Python or NumPy: then forwards seed these as well.
    in_place
        The arguments that it writes: then it gets copies of the user's inputs and keyword arguments.
    shared
        The names of the keyword arguments that other stages take as well.
    """

    buffers: tuple[str, ...]
    alone: str
    keywords: tuple[str, ...] = ()
    auxiliary: tuple[str, ...] = ()
    whole: str = ""
    seeds_all: bool = False
    in_place: str = ""
    shared: tuple[str, ...] = ()


def with_shared(traits: Sequence[Traits]) -> list[Traits]:
    """Completes the traits of all stages with ``shared``."""
    takers = Counter(name for of_stage in traits for name in of_stage.keywords)
    return [replace(t, shared=tuple(name for name in t.keywords if takers[name] > 1)) for t in traits]


def keyword_names(traits: Sequence[Traits], stages: Iterable[int]) -> KeywordNames:
    """Returns the names of keyword arguments, for a rank that holds some stages."""
    example = frozenset(name for of_stage in traits for name in of_stage.keywords)
    return KeywordNames(example, frozenset(name for stage in stages for name in traits[stage].keywords))
