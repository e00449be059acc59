"""Cutting of a micro-batch into parts: halves along dimension 0, or slices along dimension 1."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.data.mini_batch import Triple, by_item, place_of, require_cut
from chimera_runtime.errors import MISUSED, Misuse
from chimera_runtime.errors import data as mistakes
from chimera_runtime.values.keywords import cut
from chimera_runtime.values.nested import leaves_with_paths, mapped, rows
from chimera_runtime.values.slice_bounds import slice_bounds

CutSlice = Callable[..., Any]
"""Function ``cut_slice`` of a model file: a value of a micro-batch, which value it is, a slice's number, and the count.

The value is the micro-batch's ``"input"``, ``"target"`` or ``"keywords"``; the result is the slice of it. Where slices
have unequal lengths, a fifth argument is a function from the length of a sequence to the slice's start and end in it.
"""

COMPONENTS = ("input", "target", "keywords")
"""The components of a micro-batch, in the order of its triple."""

KEYWORDS = 2
"""The place of the keyword arguments among the components."""

_CUTTING = UserCode("cut_slice of a micro-batch", MISUSED)


@dataclass(frozen=True)
class MicroBatchParts:
    """Cuts a micro-batch of ``items`` items into ``count`` parts: along dimension 0 or, if ``slices`` > 1, into slices.

    By default slices are cut along dimension 1, which must be the sequence in every tensor of inputs and targets, and
    in every keyword argument with two dimensions or more. Each slice gets all other keyword arguments whole, and each
    part those that are declared so. A function
    ``cut_slice`` replaces this way of cutting slices. ``lengths`` are the relative lengths of slices, empty if they are
    equal.
    """

    items: int
    count: int
    slices: int = 1
    cut_slice: CutSlice | None = None
    lengths: tuple[int, ...] = ()

    @property
    def items_of_part(self) -> int:
        """The number of items of a part."""
        return self.items // (self.count // self.slices)

    def part(self, value: Any, component: int, number: int) -> Any:
        """Returns a part of a component of a micro-batch: inputs (0), targets (1) or keyword arguments (2)."""
        if self.slices > 1 and self.cut_slice is not None:
            with _CUTTING:
                bounds = [partial(self._bounds, number)] if self.lengths else []
                return self.cut_slice(value, COMPONENTS[component], number, self.slices, *bounds)
        if self.slices > 1:
            of_slice = partial(slice_of, bounds=partial(self._bounds, number))
            return cut(value, of_slice) if component == KEYWORDS else of_slice(value)
        return value if self.count == 1 else rows_of(value, component, number * self.items_of_part, self.items_of_part)

    def _bounds(self, number: int, length: int) -> tuple[int, int]:
        """Returns the start and the end of slice ``number`` in a sequence of this length."""
        return slice_bounds(length, self.lengths or (1,) * self.slices)[number]

    def require(self, triple: Triple, name: str) -> None:
        """Raises `Misuse` unless a micro-batch, or a mini-batch, can be cut; ``name`` is its name in the message."""
        if self.slices > 1:
            if self.cut_slice is None:
                self._require_sequences(triple, name)
            elif self.lengths and not _takes(self.cut_slice, 5):
                raise Misuse(mistakes.CUT_SLICE_LACKS_BOUNDS)
        elif self.count > 1:
            require_cut(triple, self.items, name)

    def _require_sequences(self, triple: Triple, name: str) -> None:
        lengths: dict[int, str] = {}
        for path, leaf in leaves_with_paths(by_item(triple)):
            is_tensor, is_keyword = isinstance(leaf, torch.Tensor), path.startswith("[2]")
            if is_tensor and leaf.dim() > 1:
                lengths.setdefault(leaf.size(1), place_of(path))
            elif leaf is not None and not is_keyword:
                raise mistakes.has_no_sequence(name, place_of(path), tuple(leaf.shape) if is_tensor else None)
        if len(lengths) > 1:
            raise mistakes.sequences_differ(name, lengths)
        if short := [length for length in lengths if length < self.slices]:
            raise mistakes.sequence_is_too_short(name, short[0], self.slices)
        if undivided := [length for length in lengths if length % self.slices and not self.lengths]:
            raise mistakes.sequence_is_not_divided(name, undivided[0], self.slices)


def rows_of(value: Any, component: int, start: int, count: int) -> Any:
    """Returns ``count`` rows of inputs (0), targets (1) or keyword arguments (2), of which some may be whole."""
    if component == KEYWORDS:
        return cut(value, lambda argument: rows(argument, start, count))
    return rows(value, start, count)


def _takes(function: Callable[..., Any], arguments: int) -> bool:
    """Whether a function can be called with this number of positional arguments."""
    try:
        signature(function).bind(*range(arguments))
    except (TypeError, ValueError):
        return False
    return True


def slice_of(value: Any, bounds: Callable[[int], tuple[int, int]]) -> Any:
    """Cuts a slice from every tensor of a value that has two dimensions or more; other tensors stay whole.

    ``bounds`` returns start and end of the slice for the size of dimension 1.
    """

    def of_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2:
            return tensor
        start, end = bounds(tensor.size(1))
        return tensor.narrow(1, start, end - start).contiguous()

    return mapped(value, of_tensor)
