"""Nested values, such as batches: tensors in tuples, lists, dicts and whatever else torch knows as a pytree.

torch decides which classes are pytrees. Its module for them has no public name, but torch.export and torch.func use it
for arguments, and libraries register their classes there. Only this module and the check's reference import it.
"""

import ctypes
import math
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from hashlib import blake2b, sha256
from itertools import accumulate, pairwise
from types import EllipsisType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from chimera_runtime.errors import BadModel
from chimera_runtime.errors import stage as mistakes
from chimera_runtime.values.mesh_tensors import settled

# Checks that outputs of stages can be sent: dense tensors on the rank's device, of a dtype of the backend.

_OF_NCCL = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
}
"""dtypes that NCCL sends, from torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp; complex numbers go as pairs."""


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device; the number of a CPU does not matter."""
    if tensor.device.type != device.type:
        return False
    return device.type != "cuda" or device.index in (None, tensor.device.index)


def require_here(stage: int, outputs: Iterable[torch.Tensor], device: torch.device) -> None:
    """Raises `Misuse` unless the outputs of a stage are on the rank's device."""
    for output in outputs:
        if not is_on(output, device):
            raise mistakes.output_is_elsewhere(stage=stage, place=str(output.device), device=str(device))


def require_sendable(stage: int, outputs: Iterable[torch.Tensor], backend: str) -> None:
    """Raises `Misuse` if an output of a stage is sparse, nested or quantised, or NCCL has no such dtype."""
    for output in outputs:
        if output.layout != torch.strided:
            raise mistakes.output_is_not_dense(stage=stage, layout=str(output.layout))
        if output.is_quantized:
            raise mistakes.output_is_quantised(stage=stage, dtype=str(output.dtype))
        if backend == "nccl" and output.dtype.to_real() not in _OF_NCCL:
            raise mistakes.dtype_is_not_of_nccl(stage=stage, dtype=str(output.dtype))


# Bounds of the slices of a sequence, from their relative lengths.


def slice_bounds(length: int, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Returns start and end of each slice of a sequence, which has at least as many items as slices.

    Each boundary is at the item nearest to its share of the sequence, or at the later of two that are equally near;
    then it moves as far as is needed for every slice to have an item.

    Examples
    --------
    >>> slice_bounds(8, (3, 2, 2, 1)), slice_bounds(11, (3, 2, 2, 1))
    ([(0, 3), (3, 5), (5, 7), (7, 8)], [(0, 4), (4, 7), (7, 10), (10, 11)])
    >>> slice_bounds(4, (97, 1, 1, 1))
    [(0, 1), (1, 2), (2, 3), (3, 4)]
    """
    whole, slices = sum(lengths), len(lengths)
    bounds = [0]
    for place, until in enumerate(accumulate(lengths), start=1):
        nearest = (2 * length * until + whole) // (2 * whole)
        bounds.append(min(max(nearest, bounds[-1] + 1), length - (slices - place)))
    return [*pairwise(bounds)]


# Tensors of micro-batches, their digests, and the seeds of random numbers.

Tensors = tuple[torch.Tensor, ...]


def part(tensors: Tensors, start: int, stop: int, of: int) -> Tensors:
    """Returns the rows of micro-batches ``start .. stop-1`` from tensors that hold ``of`` micro-batches."""
    return tuple(t.narrow(0, start * (t.shape[0] // of), (stop - start) * (t.shape[0] // of)) for t in tensors)


def join(messages: Sequence[Tensors]) -> Tensors:
    """Joins the tensors of several micro-batches to one message, along dimension 0."""
    return tuple(torch.cat(tensors) for tensors in zip(*messages, strict=True))


def first_part(memory: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns a view of the first elements of ``memory`` in another shape."""
    return memory.view(-1)[: math.prod(shape)].view(shape)


def draw_seed(use: str, *parts: object) -> int:
    """Returns a seed, the same on every machine: 63 bits of the BLAKE2b hash of "use/part/part/..."."""
    text = "/".join([use, *map(str, parts)]).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


def draw_seeds(use: str, *parts: object, each: Iterable[object], last: object) -> list[int]:
    """Returns ``draw_seed(use, *parts, one, last)`` for each ``one``; what the hashes have in common is hashed once."""
    begun, seeds = blake2b("/".join([use, *map(str, parts), ""]).encode(), digest_size=8), []
    for one in each:
        hashed = begun.copy()
        hashed.update(f"{one}/{last}".encode())
        seeds.append(int.from_bytes(hashed.digest(), "big") >> 1)
    return seeds


def seed_torch(seed: int) -> None:
    """Seeds torch's generators of the devices in use, far faster than torch.manual_seed, which seeds all devices."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Context that restores the generators of torch at its end."""
    in_use = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        in_use.append(torch.cuda.default_generators[torch.cuda.current_device()])
    states = [generator.get_state() for generator in in_use]
    try:
        yield
    finally:
        for generator, state in zip(in_use, states, strict=True):
            generator.set_state(state)


def seed_all(seed: int) -> None:
    """Seeds the generators of torch, Python, and NumPy if it is imported, from which a dataset may draw."""
    seed_torch(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def has_drawn(states: tuple[Any, Any]) -> bool:
    """Whether the generators of Python or NumPy have drawn since `states_beside_torch` returned ``states``."""
    before, now = states, states_beside_torch()
    return before[0] != now[0] or pickle.dumps(before[1]) != pickle.dumps(now[1])


def states_beside_torch() -> tuple[Any, Any]:
    """States of the generators of Python, and of NumPy if it is imported."""
    numpy: Any = sys.modules.get("numpy")
    return random.getstate(), numpy and numpy.random.get_state(legacy=False)


@contextmanager
def all_generators_kept() -> Iterator[None]:
    """Context that restores all generators that `seed_all` seeds. Call `seed_all` inside, before the draws."""
    python, numpy_state = states_beside_torch()
    try:
        with generators_kept():
            yield
    finally:
        random.setstate(python)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in contiguous memory, to be sent: without a mark that it is conjugate or negative."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.resolve_conj().resolve_neg().contiguous()


def in_message(result: torch.Tensor) -> torch.Tensor:
    """Returns a result in the form of a message: without a graph, `plain`, and with version numbers."""
    message = result.clone() if result.is_inference() else result.detach()
    return message if message.is_contiguous() and not message.is_conj() and not message.is_neg() else plain(message)


def digest(tensors: Iterable[torch.Tensor | None]) -> str:
    """Returns a hash of the bits of tensors."""
    bits = sha256()
    for tensor in tensors:
        data = None if tensor is None else plain(tensor.detach().cpu())
        bits.update(b"none" if data is None else ctypes.string_at(data.data_ptr(), data.nbytes))
    return bits.hexdigest()


Constant = bool | int | float | str | None
"""Type of a part, other than a tensor, of a value that stages hand on; it must be equal for all micro-batches."""


@dataclass(frozen=True)
class Form:
    """Structure of a nested value: its ``tree`` as torch's pytree has it, and leaves with ``...`` for each tensor."""

    tree: Any
    entries: tuple[Constant | EllipsisType, ...]

    def filled(self, tensors: Sequence[Any]) -> Any:
        """Returns a value of this structure, with the given tensors in place of ``...``."""
        if self is ONE_TENSOR:
            return tensors[0]
        if self is _tuple_form(len(self.entries)):
            return tuple(tensors)
        remaining = iter(tensors)
        return pytree.tree_unflatten([next(remaining) if e is ... else e for e in self.entries], self.tree)

    def __str__(self) -> str:
        return str(
            pytree.tree_unflatten([_Verbatim("tensor" if e is ... else repr(e)) for e in self.entries], self.tree)
        )

    def __reduce__(self) -> Any:
        return (form_of, (self.filled([...] * self.entries.count(...)),))


class _Verbatim(str):
    """A text that is shown without quotes inside a shown structure."""

    def __repr__(self) -> str:
        return str(self)


ONE_TENSOR = Form(pytree.tree_structure(0), (...,))
"""Structure of a value that is a single tensor."""


# Most values are a tensor, a tuple of tensors or a dict of tensors by name: these need no pytree.


@cache
def _tuple_form(tensors: int) -> Form:
    """The structure of a tuple of ``tensors``, always the same object."""
    return Form(pytree.tree_structure((0,) * tensors), (...,) * tensors)


def _has_only(kind: type, values: Iterable[Any]) -> bool:
    return {*map(type, values)} == {kind}


def form_of(value: Any) -> Form:
    """Returns the structure of a value, in which each tensor has been replaced by ``...``."""
    if type(value) is tuple and _has_only(EllipsisType, value):
        return _tuple_form(len(value))
    entries, tree = pytree.tree_flatten(value)
    return ONE_TENSOR if value is ... else Form(tree, tuple(entries))


def taken_apart(value: Any) -> tuple[tuple[torch.Tensor, ...], Form]:
    """Splits a value into its tensors and its structure; anything but a tensor counts as a constant."""
    if type(value) is torch.Tensor:
        return (value,), ONE_TENSOR
    if type(value) is tuple and _has_only(torch.Tensor, value):
        return value, _tuple_form(len(value))
    if isinstance(value, torch.Tensor):
        return (settled(value),), ONE_TENSOR
    entries, tree = pytree.tree_flatten(value)
    tensors = tuple([settled(entry) for entry in entries if isinstance(entry, torch.Tensor)])
    return tensors, Form(tree, tuple([... if isinstance(entry, torch.Tensor) else entry for entry in entries]))


def leaves(value: Any) -> list[Any]:
    """Returns the parts of a value, at any depth, that are not tuples, lists or dicts themselves."""
    if isinstance(value, torch.Tensor):
        return [value]
    return pytree.tree_leaves(value)


def leaves_with_paths(value: Any) -> list[tuple[str, Any]]:
    """The leaves of a value, each with its path, such as ``[0]['ids']``."""
    return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(value)[0]]


def is_rows(value: Any) -> bool:
    """Whether all leaves of a value are None or tensors with a dimension 0."""
    return all(leaf is None or (isinstance(leaf, torch.Tensor) and leaf.dim() > 0) for leaf in leaves(value))


def lengths(value: Any) -> set[int]:
    """The different sizes of dimension 0 among the tensors of a value."""
    return {leaf.size(0) for leaf in leaves(value) if isinstance(leaf, torch.Tensor) and leaf.dim()}


def are_equal(first: Any, second: Any) -> bool:
    """Whether two values have equal tensors, arrays and other leaves in the same structure."""
    if first is second:
        return True
    (entries, tree), (others, other_tree) = pytree.tree_flatten(first), pytree.tree_flatten(second)
    return tree == other_tree and all(map(_is_equal, entries, others))


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first is second or (first.dtype == second.dtype and torch.equal(first, second))
    same: Any = first is second or first == second
    return bool(same.all() if hasattr(same, "all") else same)


def joined(values: Sequence[Any], dimension: int = 0) -> Any:
    """Joins values along a dimension. Raises `BadModel` if they differ in structure, or in what is not a tensor."""
    if len(values) == 1:
        return values[0]

    def together(*entries: Any) -> Any:
        if all(isinstance(entry, torch.Tensor) for entry in entries):
            return torch.cat(entries, dimension)
        if not all(isinstance(entry, Constant) and entry == entries[0] for entry in entries):
            raise BadModel(mistakes.MICRO_BATCHES_ARE_NOT_ALIKE)
        return entries[0]

    try:
        return pytree.tree_map(together, *values)
    except ValueError as error:
        raise BadModel(mistakes.MICRO_BATCHES_ARE_NOT_ALIKE) from error


def mapped(value: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Applies a function to the tensors of a value, and returns the results in the same structure."""
    if isinstance(value, torch.Tensor):
        return make(value)
    if type(value) is tuple and _has_only(torch.Tensor, value):
        return tuple(map(make, value))
    if type(value) is dict and _has_only(torch.Tensor, value.values()):
        return dict(zip(value, map(make, value.values()), strict=True))
    return pytree.tree_map_only(torch.Tensor, make, value)


def fresh(value: Any) -> Any:
    """Copies the tuples, lists and dicts of a value, but not its tensors."""
    if value is None or isinstance(value, torch.Tensor):
        return value
    return mapped(value, lambda tensor: tensor)


def parts(value: Any, count: int) -> list[Any]:
    """Splits a value into ``count`` equal parts along dimension 0."""
    return [mapped(value, lambda tensor, i=i: tensor.chunk(count)[i]) for i in range(count)]  # type: ignore[misc]


def obstacle(value: Any, items: int) -> tuple[str, str] | None:
    """Returns path and description of a leaf that `rows` cannot cut into micro-batches of ``items`` items; else None.

    Numbers, strings, None and tensors without dimensions need no cut: every part has them whole. A list with a number
    or a string for each item would need a cut, and cannot be cut.
    """
    if all(_is_cut(leaf) or leaf is None for leaf in pytree.tree_leaves(value, is_leaf=is_mask)):
        return None
    entries = pytree.tree_flatten_with_path(value, is_leaf=lambda part: is_mask(part) or _has_one_each(part, items))[0]
    for path, leaf in entries:
        if not (_is_cut(leaf) or _is_whole(leaf)):
            return pytree.keystr(path), _described(leaf)
    return None


def _is_cut(leaf: Any) -> bool:
    dense = isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_nested
    return dense and leaf.dim() > 0


def _is_whole(leaf: Any) -> bool:
    if isinstance(leaf, (Constant, complex, bytes, Enum, torch.dtype, torch.device)):
        return True
    if isinstance(leaf, torch.Tensor):
        return leaf.dim() == 0
    shape = getattr(leaf, "shape", None)
    if shape is None or shape == ():
        return shape == ()
    return bool(is_mask(leaf) and shape[0] == 1 and pytree.tree_structure(leaf).is_leaf())


def is_mask(value: Any) -> bool:
    """Whether a value is a BlockMask of flex attention, which cannot be cut: its function may count items."""
    return type(value).__name__ == "BlockMask"


def _has_one_each(value: Any, items: int) -> bool:
    """Whether a value is a list or tuple of ``items`` entries without tensors, such as one text for each item."""
    if type(value) not in (list, tuple) or len(value) != items:
        return False
    parts = leaves(value)
    return not any(map(_is_cut, parts)) and any(part is not None for part in parts)


def _described(leaf: Any) -> str:
    if isinstance(leaf, (list, tuple)):
        return f"a {type(leaf).__name__} of {len(leaf)} entries, as many as there are items"
    if isinstance(leaf, torch.Tensor):
        return f"a {'nested' if leaf.is_nested else 'sparse'} tensor"
    if is_mask(leaf):
        return f"a BlockMask for {leaf.shape[0]} items" if leaf.shape[0] > 1 else "a BlockMask"
    module = type(leaf).__module__
    return f"of type {type(leaf).__qualname__ if module == 'builtins' else f'{module}.{type(leaf).__qualname__}'}"


def rows(value: Any, start: int, count: int) -> Any:
    """Returns a value with ``count`` rows of every tensor; other leaves and tensors without dimensions stay whole."""
    return mapped(value, lambda tensor: tensor.narrow(0, start, count) if tensor.dim() else tensor)


def to_device(value: Any, device: torch.device) -> Any:
    """Copies the tensors of a value to a device."""
    return mapped(value, lambda tensor: tensor.to(device, non_blocking=True))
