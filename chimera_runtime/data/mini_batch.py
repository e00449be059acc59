"""Mini-batches: loading of items and their collation to micro-batches, in a rank or in its data workers.

Random numbers depend on the item alone, not on the process.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch.utils.data import default_collate

from chimera_runtime.blame import UserCode
from chimera_runtime.data.item_order import Share
from chimera_runtime.errors import MISUSED, Misuse
from chimera_runtime.errors import data as mistakes
from chimera_runtime.values.boundary import KeywordNames, Keywords, Whole, cut, cut_alone
from chimera_runtime.values.nested import (
    are_equal,
    draw_seed,
    is_rows,
    joined,
    leaves,
    leaves_with_paths,
    lengths,
    mapped,
    obstacle,
    rows,
    seed_all,
    slice_bounds,
    taken_apart,
)

Triple = tuple[Any, Any, Keywords]
"""An input, a target and keyword arguments, as pytrees."""

Uses = Mapping[int, frozenset[int]]
"""The parts of each micro-batch that a rank uses: 0 is the input, 1 the target, 2 the keyword arguments."""

POSITION_NAMES = ("seed", "shuffle", "items of the epoch", "epoch", "item", "key")
"""Names of the numbers in a position in the data, all known without loading; the last is the key from a sampler."""

ALL = frozenset({0, 1, 2})

_COLLATING = UserCode("default_collate of a micro-batch", MISUSED)
_COLLATING_OWN = UserCode("collate of a micro-batch", MISUSED)


@dataclass(frozen=True)
class ItemLoading:
    """Loads items, and collates them to micro-batches.

    ``collate`` makes a pair or a triple from the items of a micro-batch; None is torch's default_collate. ``name`` is
    what messages call the dataset. Keyword arguments must have the ``names``, if these are given.
    """

    dataset: Any
    seed: int
    collate: Callable[[list[Any]], Any] | None = None
    name: str = "the dataset"
    names: KeywordNames | None = None

    def items(self, epoch: int, keys: Sequence[Any]) -> list[Any]:
        """Loads items of a map-style dataset, each with random generators that are seeded for the item."""
        loaded = []
        for key in keys:
            seed_all(draw_seed("item", self.seed, epoch, key))
            with UserCode(f"item {key} of {self.name}", MISUSED):
                loaded.append(self.dataset[key])
        return loaded

    def collated(
        self, items: list[Any], epoch: int, place: int, names: Sequence[Any], uses: frozenset[int] = ALL
    ) -> Triple:
        """Collates items, ``names`` in messages, to a micro-batch that begins at ``place`` in the epoch.

        Parts outside of ``uses`` are None, and keyword arguments are an empty dict.

        Raises `Misuse` if items or the result of ``collate`` do not have the right form, `ModelError` if collating
        fails.
        """
        if self.collate is None:
            named = zip(items, names, strict=True)
            triples = [as_triple(item, f"item {name} of {self.name}", self.names) for item, name in named]
            for name, (*_, keywords) in zip(names, triples, strict=True):
                if differing := sorted(keywords.keys() ^ triples[0][2].keys()):
                    raise mistakes.keyword_argument_is_in_one(
                        names=(names[0], name), dataset=self.name, keyword=differing[0]
                    )
            wholes = {n: value for n, value in triples[0][2].items() if isinstance(n, Whole)} if 2 in uses else {}
            for keyword, value in wholes.items():
                for name, (*_, keywords) in zip(names, triples, strict=True):
                    if not are_equal(keywords[keyword], value):
                        raise mistakes.items_differ_in_whole(names=(names[0], name), dataset=self.name, keyword=keyword)
            with _COLLATING:
                parts = [
                    default_collate(list(part)) if i in uses else None
                    for i, part in enumerate(zip(*map(by_item, triples), strict=True))
                ]
            return parts[0], parts[1], {**(parts[2] or {}), **wholes}
        seed_all(draw_seed("collate", self.seed, epoch, place))
        with _COLLATING_OWN:
            value = self.collate(items)
        inputs, target, keywords = triple = as_triple(value, "what collate returned", self.names)
        require_rows(triple, len(items), "what collate returned", mistakes.as_many_as_items(len(items)))
        return inputs if 0 in uses else None, target if 1 in uses else None, keywords if 2 in uses else {}


@dataclass(frozen=True)
class MiniBatch:
    """The part of a mini-batch that a rank uses: an argument for `Pipeline.step`, ``evaluate`` and ``predict``.

    ``items`` is the number of items of the copy: B*N, or fewer in the last mini-batch of an epoch. ``position`` is the
    same on all ranks: see `POSITION_NAMES`.
    """

    items: int
    share: Share
    micro_batches: Mapping[int, Triple] = field(default_factory=dict)
    position: tuple[int, ...] = ()

    def __call__(self, micro: int) -> Triple:
        """The (input, target, keywords) of a micro-batch; parts that this rank does not use are None."""
        if micro not in self.micro_batches:
            raise mistakes.micro_batch_was_not_loaded(micro=micro)
        return self.micro_batches[micro]

    @property
    def number(self) -> int:
        """The number of its micro-batches, of which the last one may lack items."""
        return -(-self.items // self.share.micro_batch_size)

    def require_whole(self) -> None:
        """Raises `Misuse` if the mini-batch lacks items for an update, as the last one of an epoch may."""
        if self.items != self.share.items_of_copy(self.share.items):
            raise mistakes.mini_batch_lacks_items(
                items=self.items, micro_batch_size=self.share.micro_batch_size, micro_batches=self.share.micro_batches
            )


def sendable(micro_batches: Mapping[int, Triple]) -> dict[int, Triple]:
    """Returns micro-batches as a data worker sends them, in few storages, without graphs; `ModelError` if it cannot."""
    for triple in micro_batches.values():
        with UserCode("sending a micro-batch from a data worker", MISUSED):
            pickle.dumps(taken_apart(triple)[1])
    inputs, targets, keywords = (
        _in_one_piece({micro: mapped(triple[part], torch.Tensor.detach) for micro, triple in micro_batches.items()})
        for part in range(3)
    )
    return {micro: (inputs[micro], targets[micro], keywords[micro]) for micro in micro_batches}


def _in_one_piece(values: dict[int, Any]) -> dict[int, Any]:
    """Replaces the tensors of micro-batches by views of joined ones, as each tensor that is sent costs an open file."""
    present = {micro: value for micro, value in values.items() if is_rows(value) and lengths(value)}
    kinds = set()
    for value in present.values():
        tensors, form = taken_apart(value)
        kinds.add((str(form), tuple((t.dtype, t.shape[1:], t.layout) for t in tensors)))
    if len(kinds) != 1 or len(present) == 1 or any(len(lengths(value)) > 1 for value in present.values()):
        return values
    joined_values, start, views = joined([*present.values()]), 0, dict(values)
    for micro, value in present.items():
        (count,) = lengths(value)
        views[micro] = rows(joined_values, start, count)
        start += count
    return views


def as_triple(value: Any, name: str, names: KeywordNames | None = None) -> Triple:
    """Returns input, target and keyword arguments of a triple; a pair has no keyword arguments.

    Raises `Misuse` if the value is neither, or has other keyword arguments than ``names``.
    """
    match value:
        case (inputs, target):
            triple = inputs, target, Keywords()
        case (inputs, target, dict() as keywords) if all(isinstance(name, str) for name in keywords):
            triple = inputs, target, keywords
        case _:
            raise mistakes.neither_pair_nor_triple(name=name, kind=type(value).__name__)
    return triple if names is None else (triple[0], triple[1], names.declared(triple[2], name))


def by_item(triple: Triple) -> Triple:
    """Returns a triple without the keyword arguments that are whole, and without such entries of its input."""
    return cut_alone(triple[0]) if isinstance(triple[0], dict) else triple[0], triple[1], cut_alone(triple[2])


def length_of(triple: Triple, name: str) -> int:
    """Returns the items along dimension 0 of a triple, ``name`` in messages; `Misuse` if tensors differ in it."""
    for path, leaf in leaves_with_paths(by_item(triple)):
        if (items := _length(leaf)) is not None:
            require_rows(triple, items, name, mistakes.as_in_first(items=items, place=place_of(path)))
            return items
    raise mistakes.has_no_rows(name=name)


def require_rows(triple: Triple, items: int, name: str, wanted: str) -> None:
    """Raises `Misuse` if a tensor that is not whole has other rows than ``items``; ``wanted`` says how many."""
    if lengths(by_item(triple)) <= {items}:
        return
    for path, leaf in leaves_with_paths(by_item(triple)):
        if _length(leaf) not in (None, items):
            keyword = keyword_of(path) or (".." if path.startswith("[0]") and items in lengths(triple[0]) else "")
            raise mistakes.has_other_rows(name, place_of(path), tuple(leaf.shape), wanted, keyword)


def require_no_graph(value: Any, name: str) -> None:
    """Raises `Misuse` if a tensor of a triple requires a gradient, which no rank would have as a whole."""
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves(value)):
        tensors = ((path, leaf) for path, leaf in leaves_with_paths(value) if isinstance(leaf, torch.Tensor))
        raise mistakes.requires_a_gradient(
            name=name, place=place_of(next(path for path, leaf in tensors if leaf.requires_grad))
        )


def _length(leaf: Any) -> int | None:
    return leaf.size(0) if isinstance(leaf, torch.Tensor) and leaf.dim() else None


_PLACES = {"[0]": "the input", "[1]": "the target"}


def require_cut(triple: Triple, items: int, name: str) -> None:
    """Raises `Misuse` if parts of a triple of ``items`` items cannot be cut into smaller parts.

    Tensors are cut, and plain values such as numbers go whole to every part. Any other value may hold something for
    each item, such as a list with a string for each, and cannot be cut.
    """
    uncut = obstacle(by_item(triple), items)
    if uncut is not None:
        path, kind = uncut
        raise mistakes.cannot_be_cut(name, place_of(path), kind, keyword_of(path))


def place_of(path: str) -> str:
    """Returns the place of a leaf of a triple in words, from its path, such as ``the input['ids']``."""
    if keyword := keyword_of(path):
        return f"the keyword argument {keyword}" + path.removeprefix(f"[2]['{keyword}']")
    return f"{_PLACES[path[:3]]}{path[3:]}"


def keyword_of(path: str) -> str:
    """Returns the name of the keyword argument at a path that begins with ``[2]['name']``; empty if it is another."""
    return path[len("[2]['") :].split("']", 1)[0] if path.startswith("[2]") else ""


# Cutting of a micro-batch into parts: halves along dimension 0, or slices along dimension 1.

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
    in every keyword argument with two dimensions or more; ``cut_slice`` replaces this way. ``lengths`` are the relative
    lengths of slices, empty if they are equal.
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
            raise mistakes.sequence_is_too_short(name=name, length=short[0], slices=self.slices)
        if undivided := [length for length in lengths if length % self.slices and not self.lengths]:
            raise mistakes.sequence_is_not_divided(name=name, length=undivided[0], slices=self.slices)


def rows_of(value: Any, component: int, start: int, count: int) -> Any:
    """Returns ``count`` rows of inputs (0), targets (1) or keyword arguments (2), of which some may be whole."""
    if component == KEYWORDS:
        return cut(value, lambda argument: rows(argument, start, count))
    return rows(value, start, count)


def micro_batches_of(value: Any, component: int, size: int, items: int) -> Sequence[Any]:
    """Returns the micro-batches of ``size`` items in a component of a mini-batch of ``items``, which is cut once; the
    last one may have fewer.
    """
    named = value if type(value) is dict and {*map(type, value)} == {str} else {"": value}
    tensors = [*named.values()]
    if {*map(type, tensors)} != {torch.Tensor} or not all(map(torch.Tensor.dim, tensors)):
        return [rows_of(value, component, start, min(size, items - start)) for start in range(0, items, size)]
    parts = [tensor.split(size) for tensor in tensors]
    return (
        [dict(zip(named, of_micro, strict=True)) for of_micro in zip(*parts, strict=True)]
        if named is value
        else parts[0]
    )


def _takes(function: Callable[..., Any], arguments: int) -> bool:
    try:
        signature(function).bind(*range(arguments))
    except (TypeError, ValueError):
        return False
    return True


def slice_of(value: Any, bounds: Callable[[int], tuple[int, int]]) -> Any:
    """Cuts a slice with ``bounds(size of dimension 1)`` from every tensor of a value with two dimensions or more."""

    def of_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2:
            return tensor
        start, end = bounds(tensor.size(1))
        return tensor.narrow(1, start, end - start).contiguous()

    return mapped(value, of_tensor)
