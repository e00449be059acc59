"""Nested values, such as batches: tensors in tuples, lists, dicts and whatever else torch knows as a pytree.

What a pytree is, torch decides: its module has no public name, but it is the one with which torch.export and torch.func
take arguments apart, and where libraries register their classes. Nothing else here imports it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch.utils import _pytree as pytree

Constant = bool | int | float | str | None
"""What a value may hold beside tensors, the same for every micro-batch, where it is handed from stage to stage."""


@dataclass(frozen=True)
class Form:
    """The structure of a value: where its tensors are, and the constants among them."""

    tree: Any
    entries: tuple[Constant | EllipsisType, ...]

    def filled(self, tensors: Sequence[Any]) -> Any:
        """The value of this structure that has such tensors."""
        if self is ONE_TENSOR:
            return tensors[0]
        remaining = iter(tensors)
        return pytree.tree_unflatten([next(remaining) if e is ... else e for e in self.entries], self.tree)

    def __str__(self) -> str:
        return str(pytree.tree_unflatten([_Shown("tensor" if e is ... else repr(e)) for e in self.entries], self.tree))

    def __reduce__(self) -> Any:
        return (form_of, (self.filled([...] * self.entries.count(...)),))


class _Shown(str):
    """A text that prints as it is."""

    def __repr__(self) -> str:
        return str(self)


ONE_TENSOR = Form(pytree.tree_structure(0), (...,))
"""The structure of a tensor that is nothing more."""


def form_of(value: Any) -> Form:
    """The structure of a value that has ``...`` in the place of each tensor."""
    entries, tree = pytree.tree_flatten(value)
    return ONE_TENSOR if value is ... else Form(tree, tuple(entries))


def taken_apart(value: Any) -> tuple[tuple[torch.Tensor, ...], Form]:
    """The tensors of a value, and the rest of it; what is no tensor counts as constant, whatever it is."""
    if isinstance(value, torch.Tensor):
        return (value,), ONE_TENSOR
    entries, tree = pytree.tree_flatten(value)
    tensors = tuple([entry for entry in entries if isinstance(entry, torch.Tensor)])
    return tensors, Form(tree, tuple([... if isinstance(entry, torch.Tensor) else entry for entry in entries]))


def leaves(value: Any) -> list[Any]:
    """What lies inside the tuples, lists and dicts of a value."""
    if isinstance(value, torch.Tensor):
        return [value]
    return pytree.tree_leaves(value)


def is_rows(value: Any) -> bool:
    """Whether a value consists of tensors that have a dimension 0; there may be None among them."""
    return all(leaf is None or (isinstance(leaf, torch.Tensor) and leaf.dim() > 0) for leaf in leaves(value))


def lengths(value: Any) -> set[int]:
    """The lengths of dimension 0 of a value's tensors, as far as they have one."""
    return {len(leaf) for leaf in leaves(value) if isinstance(leaf, torch.Tensor) and leaf.dim()}


def joined(values: Sequence[Any]) -> Any:
    """Values of one structure as one, along dimension 0."""
    if len(values) == 1:
        return values[0]

    def together(*entries: Any) -> Any:
        return torch.cat(entries) if isinstance(entries[0], torch.Tensor) else entries[0]

    return pytree.tree_map(together, *values)


def mapped(value: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with other tensors in the same structure."""
    if isinstance(value, torch.Tensor):
        return make(value)
    return pytree.tree_map_only(torch.Tensor, make, value)


def parts(value: Any, count: int) -> list[Any]:
    """A value as several of the same structure, equal parts along dimension 0."""
    return [mapped(value, lambda tensor, i=i: tensor.chunk(count)[i]) for i in range(count)]  # type: ignore[misc]


def rows(value: Any, start: int, count: int) -> Any:
    """Some rows of every tensor in a value; a tensor without dimensions, and what is no tensor, as it is."""
    return mapped(value, lambda tensor: tensor.narrow(0, start, count) if tensor.dim() else tensor)


def to_device(value: Any, device: torch.device) -> Any:
    """A batch on the device of the stages."""
    return mapped(value, lambda tensor: tensor.to(device, non_blocking=True))
