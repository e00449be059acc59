"""The carries of a stage on their way from slice to slice, and their gradients on the way back.

        F(q)      reads the carry of slice q-1, whose tensors are leaves of its graph, and returns a carry for slice q+1
        B(q)      begins at the results of F(q), and at its carry with the gradients that B(q+1) has computed;
                            it computes the gradients of the carry of q-1

A tensor of the carry that F(q) passes on unchanged is no root of its graph: the gradient from B(q+1) goes straight to
the leaf, and B(q) adds to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from chimera_runtime.errors import stage as mistakes
from chimera_runtime.stage.engine import Roots, edge_of
from chimera_runtime.values.boundary import NO_CARRY, Carry, SliceArguments, slice_length
from chimera_runtime.values.nested import Tensors, taken_apart
from chimera_runtime.values.shared_memory import unshared

_NO_ROOTS: Mapping[int, GradientEdge] = MappingProxyType({})


class CarryGraph(NamedTuple):
    """The part of a forward's graph that belongs to carries.

    ``leaves`` are the tensors of the carry that the forward has read. ``roots`` are tensors of the carry that it has
    returned, by their number in that carry. A tensor that it has passed on unchanged is not a root: ``passed`` has
    pairs of its number in the returned carry and its number among the leaves.
    """

    leaves: Tensors = ()
    roots: Mapping[int, GradientEdge] = _NO_ROOTS
    passed: Sequence[tuple[int, int]] = ()


NO_CARRIES = CarryGraph()
"""The part of a stage without carries."""


@dataclass
class Carries:
    """The carries of a stage, and their gradients. Each of the ``slices`` of a sequence counts as a micro-batch.

    ``takes`` says whether the forward of the stage takes a carry and a start. If ``fixed``, the carries of all
    micro-batches must have equal structure, shapes and dtypes.

    ``held`` is the number of bytes of all kept carries, ``peak`` the most that it has been. A carry is kept until the
    backward of the slice that returned it. Tensors that a slice passes on unchanged count once.
    """

    stage: int
    slices: int
    takes: SliceArguments
    fixed: bool = True
    held: int = 0
    peak: int = 0
    _left: dict[int, Carry] = field(default_factory=dict)
    _gradients: dict[int, Sequence[torch.Tensor | None]] = field(default_factory=dict)
    _layouts: dict[int, Any] = field(default_factory=dict)
    _sizes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.are_used = self.slices > 1 and self.takes.any

    def take(self, micro: int) -> Carry:
        """Removes and returns the carry that the forward of this micro-batch reads: that of the slice before."""
        return self._left.pop(micro - 1) if self.are_used and micro % self.slices else NO_CARRY

    def has_reader(self, micro: int) -> bool:
        """Whether a slice follows that reads the carry which the forward of this micro-batch returns."""
        return self.are_used and (micro + 1) % self.slices != 0

    def keep(self, micro: int, before: Carry, inputs: Any, value: Any) -> None:
        """Keeps ``value``, the carry that a forward has returned, if a slice follows that reads it; ``before`` is the
        carry that the forward has read. Raises `BadModel` if the carry is empty, or differs from that of an earlier
        micro-batch.
        """
        if not self.has_reader(micro):
            return
        place, carry = micro % self.slices, Carry.of(value, before.position + slice_length(inputs))
        if self.takes.carry:
            if not carry.tensors:
                raise mistakes.carry_is_empty(self.stage, place)
            if self.fixed:
                self._require_layout(place, carry)
        self._left[micro] = carry
        passed = {tensor.untyped_storage()._cdata for tensor in before.tensors}
        self._sizes[micro] = sum(t.nbytes for t in carry.tensors if t.untyped_storage()._cdata not in passed)
        self.held += self._sizes[micro]
        self.peak = max(self.peak, self.held)

    def _require_layout(self, place: int, carry: Carry) -> None:
        layout = carry.layout()
        first = self._layouts.setdefault(place, layout)
        if layout != first:
            raise mistakes.carry_differs(stage=self.stage, place=place, now=_words(layout), before=_words(first))

    def resize(self, fixed: bool) -> None:
        """Allows carries of other shapes from now on; if not ``fixed``, also for each micro-batch."""
        self.fixed = fixed
        self._layouts.clear()

    def graph(self, leaves: Tensors, value: Any) -> CarryGraph:
        """Returns the carries' part of a forward's graph: it has read ``leaves`` and returned the carry ``value``."""
        if value is None:
            return CarryGraph(leaves) if leaves else NO_CARRIES
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        tensors = [(number, t) for number, t in enumerate(taken_apart(value)[0]) if t.requires_grad]
        return CarryGraph(
            leaves,
            {number: edge_of(t) for number, t in tensors if id(t) not in numbers},
            [(number, numbers[id(t)]) for number, t in tensors if id(t) in numbers],
        )

    def release(self, micro: int) -> None:
        """Counts the carry that a forward has left, if any, as freed."""
        self.held -= self._sizes.pop(micro, 0)

    def begin_backward(self, micro: int, graph: CarryGraph) -> tuple[Roots, Tensors]:
        """Returns the roots in the carry of a micro-batch that have a gradient, and their gradients. Those of tensors
        that the forward has passed on go to the leaves.
        """
        self.release(micro)
        gradients = self._gradients.pop(micro, None)
        if gradients is None:
            return (), ()
        for number, leaf in graph.passed:
            _add(graph.leaves[leaf], gradients[number])
        begun = [(root, g) for number, root in graph.roots.items() if (g := gradients[number]) is not None]
        return tuple([root for root, _ in begun]), tuple([gradient for _, gradient in begun])

    def end_backward(self, micro: int, graph: CarryGraph) -> None:
        """Keeps the gradients of the leaves for the backward of the slice before; clears ``grad`` of the leaves."""
        if graph.leaves:
            self._gradients[micro - 1] = [*map(_take_gradient, graph.leaves)]


def _take_gradient(leaf: torch.Tensor) -> torch.Tensor | None:
    """Removes and returns the gradient of a leaf, in memory that a later backward may write."""
    gradient, leaf.grad = leaf.grad, None
    return None if gradient is None else unshared(gradient)


def _add(leaf: torch.Tensor, gradient: torch.Tensor | None) -> None:
    if gradient is not None:
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def _words(layout: tuple[Any, Sequence[tuple[tuple[int, ...], torch.dtype]]]) -> str:
    form, tensors = layout
    return f"{form} of {', '.join(f'{shape} {dtype}' for shape, dtype in tensors)}"
