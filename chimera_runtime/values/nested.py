"""Nested values, such as batches: tensors in tuples, lists, dicts and whatever else torch knows as a pytree.

What a pytree is, torch decides: its module has no public name, but it is the one with which torch.export and torch.func
take arguments apart, and where libraries register their classes. Beside this only the check's reference has it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import EllipsisType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from chimera_runtime.errors import BadModel
from chimera_runtime.values.shards import settled

Constant = bool | int | float | str | None
"""What a value may hold beside tensors, the same for every micro-batch, where it is handed from stage to stage."""


_NOT_ALIKE = (
    "micro-batches that run together differ in structure, or in something that is not a tensor; give all micro-batches "
    "the form of the first"
)


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
        return (settled(value),), ONE_TENSOR
    entries, tree = pytree.tree_flatten(value)
    tensors = tuple([settled(entry) for entry in entries if isinstance(entry, torch.Tensor)])
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
    return {leaf.size(0) for leaf in leaves(value) if isinstance(leaf, torch.Tensor) and leaf.dim()}


def joined(values: Sequence[Any]) -> Any:
    """Values of one structure as one, along dimension 0.

    Raises
    ------
    BadModel
        If they differ in structure, or in something that is not a tensor.
    """
    if len(values) == 1:
        return values[0]

    def together(*entries: Any) -> Any:
        if all(isinstance(entry, torch.Tensor) for entry in entries):
            return torch.cat(entries)
        if not all(isinstance(entry, Constant) and entry == entries[0] for entry in entries):
            raise BadModel(_NOT_ALIKE)
        return entries[0]

    try:
        return pytree.tree_map(together, *values)
    except ValueError as error:
        raise BadModel(_NOT_ALIKE) from error


def mapped(value: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with other tensors in the same structure."""
    if isinstance(value, torch.Tensor):
        return make(value)
    return pytree.tree_map_only(torch.Tensor, make, value)


def fresh(value: Any) -> Any:
    """A value with the same tensors in tuples, lists and dicts of its own."""
    if value is None or isinstance(value, torch.Tensor):
        return value
    return mapped(value, _itself)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def parts(value: Any, count: int) -> list[Any]:
    """A value as several of the same structure, equal parts along dimension 0."""
    return [mapped(value, lambda tensor, i=i: tensor.chunk(count)[i]) for i in range(count)]  # type: ignore[misc]


def obstacle(value: Any, items: int) -> tuple[str, str] | None:
    """What `rows` cannot cut in a value that has so many items: its place, and what it is. None if it cuts everything.

    Numbers, strings, None and tensors without dimensions are no obstacle: every part has them whole. A list with one of
    these for each item is.
    """
    if all(_is_cut(leaf) or leaf is None for leaf in pytree.tree_leaves(value, is_leaf=_is_mask)):
        return None
    entries = pytree.tree_flatten_with_path(value, is_leaf=lambda part: _is_mask(part) or _has_one_each(part, items))[0]
    for path, leaf in entries:
        if not (_is_cut(leaf) or _is_whole(leaf)):
            return pytree.keystr(path), _described(leaf)
    return None


def _is_cut(leaf: Any) -> bool:
    dense = isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_nested
    return dense and leaf.dim() > 0


def _is_whole(leaf: Any) -> bool:
    """Whether a value is the same for all items."""
    if isinstance(leaf, (Constant, complex, bytes, Enum, torch.dtype, torch.device)):
        return True
    if isinstance(leaf, torch.Tensor):
        return leaf.dim() == 0
    shape = getattr(leaf, "shape", None)
    if shape is None or shape == ():
        return shape == ()
    return bool(_is_mask(leaf) and shape[0] == 1 and pytree.tree_structure(leaf).is_leaf())


def _is_mask(value: Any) -> bool:
    """Whether a value is a BlockMask of flex attention, whose ``mask_mod`` may look at the number of the item."""
    return type(value).__name__ == "BlockMask"


def _has_one_each(value: Any, items: int) -> bool:
    """Whether a value is a list with a text, a number or the like for each item."""
    if type(value) not in (list, tuple) or len(value) != items:
        return False
    parts = leaves(value)
    return not any(map(_is_cut, parts)) and any(part is not None for part in parts)


def _described(leaf: Any) -> str:
    if isinstance(leaf, (list, tuple)):
        return f"a {type(leaf).__name__} of {len(leaf)} entries, as many as there are items"
    if isinstance(leaf, torch.Tensor):
        return f"a {'nested' if leaf.is_nested else 'sparse'} tensor"
    if _is_mask(leaf):
        return f"a BlockMask for {leaf.shape[0]} items" if leaf.shape[0] > 1 else "a BlockMask"
    module = type(leaf).__module__
    return f"of type {type(leaf).__qualname__ if module == 'builtins' else f'{module}.{type(leaf).__qualname__}'}"


def rows(value: Any, start: int, count: int) -> Any:
    """Some rows of every tensor in a value; a tensor without dimensions, and what is no tensor, as it is."""
    return mapped(value, lambda tensor: tensor.narrow(0, start, count) if tensor.dim() else tensor)


def to_device(value: Any, device: torch.device) -> Any:
    """A batch on the device of the stages."""
    return mapped(value, lambda tensor: tensor.to(device, non_blocking=True))
