"""`Boundary` and `Traits`: the tensors that a stage hands on, and its behaviour, as found with one micro-batch."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import torch

from chimera_runtime.values.carries import NO_ARGUMENTS, SliceArguments
from chimera_runtime.values.keywords import KeywordNames
from chimera_runtime.values.nested import Form
from chimera_runtime.values.tensors import Tensors, first_part


@dataclass(frozen=True)
class Boundary:
    """Structure, shapes and dtypes of the value that a stage hands to the next one for every micro-batch.

    ``form`` is the structure of the value. ``shapes``, ``dtypes``, ``recorded``, ``differentiable`` and
    ``owned_by_stage`` have an entry for each tensor in it; ``shapes`` are those for one micro-batch.

    A tensor is ``recorded`` if it requires a gradient. It is ``differentiable`` if its gradient comes back: it requires
    one, and a later stage uses the tensor. It is ``owned_by_stage`` if the stage keeps its memory, such as that of a
    buffer: then a copy is handed on, because a later forward may write the memory.

    ``counted`` says that a message of gradients also has the loss count of each micro-batch, in float64. If slices have
    unequal lengths, ``of_slices`` has the shapes for each slice, and ``shapes`` the largest.
    """

    form: Form
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    recorded: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    counted: bool = False
    owned_by_stage: tuple[bool, ...] = ()
    of_slices: tuple[tuple[tuple[int, ...], ...], ...] = ()

    @classmethod
    def of(cls, form: Form, tensors: Tensors) -> "Boundary":
        """Describes the outputs of a micro-batch; every tensor that requires a gradient counts as differentiable."""
        recorded = tuple(t.requires_grad for t in tensors)
        return cls(form, tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors), recorded, recorded)

    def with_slices(self, others: "Sequence[Boundary]") -> "Boundary | None":
        """Merges this boundary, of slice 0, with those of the ``others``; None if they differ in more than shapes."""
        slices = (self, *others)
        if any(
            (b.form, b.dtypes, [*map(len, b.shapes)]) != (self.form, self.dtypes, [*map(len, self.shapes)])
            for b in others
        ):
            return None
        largest = tuple(max(shapes, key=math.prod) for shapes in zip(*(b.shapes for b in slices), strict=True))
        return replace(self, shapes=largest, of_slices=tuple(b.shapes for b in slices))

    def at(self, micro: int) -> "Boundary":
        """Returns the boundary for one micro-batch, with the shapes of its slice if slices have unequal lengths."""
        if not self.of_slices:
            return self
        return replace(self, shapes=self.of_slices[micro % len(self.of_slices)], of_slices=())

    def shape(self, tensor: int, micros: int) -> tuple[int, ...]:
        """The shape of tensor number ``tensor`` in a message of ``micros`` micro-batches, joined along dimension 0."""
        rows = self.shapes[tensor]
        return rows if micros == 1 else (micros * rows[0], *rows[1:])

    def buffers(self, device: torch.device, micros: int = 1) -> Tensors:
        """Allocates the buffers of one message of activations."""
        return tuple(
            torch.zeros(self.shape(i, micros), dtype=dtype, device=device) for i, dtype in enumerate(self.dtypes)
        )

    def gradient_buffers(self, device: torch.device, micros: int = 1) -> Tensors:
        """Allocates the buffers of one message of gradients: one for each differentiable tensor, and loss counts."""
        gradients = compress(self.buffers(device, micros), self.differentiable)
        counts = (torch.zeros(micros, dtype=torch.float64, device=device),) if self.counted else ()
        return (*gradients, *counts)

    def views(self, memory: Tensors, micros: int, first: int = 0) -> Tensors:
        """Returns views of buffers in the shapes of a message of activations; the buffers may be larger.

        The message has ``micros`` micro-batches, of which ``first`` is the first.
        """
        boundary = self.at(first)
        return tuple(first_part(tensor, boundary.shape(i, micros)) for i, tensor in enumerate(memory))

    def gradient_views(self, memory: Tensors, micros: int, first: int = 0) -> Tensors:
        """Returns views of buffers in the shapes of a message of gradients, as `views` does for activations."""
        boundary = self.at(first)
        shapes = compress([boundary.shape(i, micros) for i in range(len(self.shapes))], self.differentiable)
        counts = [(micros,)] if self.counted else []
        return tuple(map(first_part, memory, [*shapes, *counts]))

    def excess(self, outputs: Tensors, form: Form) -> str | None:
        """Returns why outputs of another size do not fit into buffers of this boundary; None if they fit."""
        if form != self.form:
            return f"{form}, and {self.form} for the example"
        for output, shape, dtype in zip(outputs, self.shapes, self.dtypes, strict=True):
            if output.numel() > math.prod(shape) or output.dtype != dtype:
                return f"a tensor {tuple(output.shape)} {output.dtype}, and {shape} {dtype} for the example"
        return None

    def of_items(self, items: int, whole: int) -> "Boundary | None":
        """Returns the boundary of a micro-batch of ``items`` items, computed from this one, for ``whole`` items.

        Returns None if the rows of some tensor cannot be divided equally among the items.
        """
        if not all(shape and shape[0] % whole == 0 for shape in self.shapes):
            return None
        return replace(self, shapes=tuple((shape[0] // whole * items, *shape[1:]) for shape in self.shapes))

    def mismatch(self, outputs: Tensors, form: Form, micros: int) -> str | None:
        """Returns in words how outputs of ``micros`` micro-batches differ from this boundary; None if they do not.

        In grad mode ``requires_grad`` is compared as well.
        """
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


@dataclass(frozen=True)
class Traits:
    """Behaviour that a stage showed with the first micro-batch, at start. A text is empty if there was nothing to note.

    ``buffers`` are the names of the buffers that the stage updates in its forward. ``alone`` is the reason why the
    stage cannot run several micro-batches in one call, ``whole`` the reason why the backward cannot be split into two
    halves. ``keywords`` are the names of the keyword arguments that the stage takes; ``shared`` are the ones among them
    that other stages take as well, and ``uncut`` the ones that are whole. ``auxiliary`` are the names of the auxiliary
    losses that the stage adds, ``reports`` those of its reports. ``seeds_all`` says that the stage draws from the
    generators of Python or NumPy: then each forward seeds these as well. ``in_place`` names arguments that the stage
    writes: then it gets copies of the user's inputs and keyword arguments. ``takes`` says which arguments of slices the
    stage takes. ``changed`` are the parameters whose values the forward changes; ``touched`` are those that it writes,
    be it with the values that they have. ``evaluates`` says that all of the stage is in evaluation mode.
    """

    buffers: tuple[str, ...]
    alone: str
    keywords: tuple[str, ...] = ()
    auxiliary: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()
    whole: str = ""
    seeds_all: bool = False
    in_place: str = ""
    shared: tuple[str, ...] = ()
    uncut: tuple[str, ...] = ()
    takes: SliceArguments = NO_ARGUMENTS
    changed: tuple[str, ...] = ()
    touched: tuple[str, ...] = ()
    evaluates: bool = False


def traits_of_slices(traits: Sequence[Traits]) -> Traits:
    """Merges the traits that a stage showed with each slice of a micro-batch into the traits of the stage."""
    return replace(
        traits[0],
        buffers=tuple(dict.fromkeys(name for of_slice in traits for name in of_slice.buffers)),
        alone=next((of_slice.alone for of_slice in traits if of_slice.alone), ""),
        auxiliary=tuple(sorted({name for of_slice in traits for name in of_slice.auxiliary})),
        reports=tuple(sorted({name for of_slice in traits for name in of_slice.reports})),
        whole=next((of_slice.whole for of_slice in traits if of_slice.whole), ""),
        seeds_all=any(of_slice.seeds_all for of_slice in traits),
        in_place=next((of_slice.in_place for of_slice in traits if of_slice.in_place), ""),
    )


def with_shared(traits: Sequence[Traits]) -> list[Traits]:
    """Returns the traits of all stages with ``shared`` filled in."""
    takers = Counter(name for of_stage in traits for name in of_stage.keywords)
    return [replace(t, shared=tuple(name for name in t.keywords if takers[name] > 1)) for t in traits]


def keyword_names(traits: Sequence[Traits], stages: Iterable[int]) -> KeywordNames:
    """Returns the names of the keyword arguments that any stage takes, and of those that the given ``stages`` take."""
    return KeywordNames(
        example=frozenset(name for of_stage in traits for name in of_stage.keywords),
        needed=frozenset(name for stage in stages for name in traits[stage].keywords),
        whole=frozenset(name for of_stage in traits for name in of_stage.uncut),
    )
