"""Data of the reference: the place of each item and its random numbers, without the code that ranks load data by."""

import hashlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset, default_collate


def seed_of(*parts: object) -> int:
    """First 8 bytes of BLAKE2b of the parts, joined by slashes, as a 63-bit number."""
    digest = hashlib.blake2b("/".join(str(p) for p in parts).encode(), digest_size=8).hexdigest()
    return int(digest, 16) // 2


def mini_batches(
    model: Any, sizes: tuple[int, int, int], seed: int, device: torch.device, *, lengths: Sequence[int] = ()
) -> Iterator[list[list[Any]]]:
    """Yields for each update a list, which has input, target and keyword arguments of each part of each micro-batch.

    ``sizes`` is a triple: items of a micro-batch, micro-batches of all copies, parts of a micro-batch. Without
    ``lengths`` parts are cut between items; with ``lengths`` they are slices along dimension 1, in proportion to these.
    """
    size, count, parts = sizes
    dataset = model.dataset()
    for epoch in itertools.count():
        items = _items_of_epoch(model, dataset, seed, epoch)
        update: list[list[Any]] = []
        for place in itertools.count(step=size):
            micro_batch = [*itertools.islice(items, size)]
            if len(micro_batch) < size:
                break
            seed_all(seed_of("collate", seed, epoch, place))
            whole = _collated(model, micro_batch)
            if lengths:
                update += [_by_item(whole, partial(_slice, number=i, lengths=lengths), device) for i in range(parts)]
            else:
                update += [_by_item(whole, partial(_part, number=i, parts=parts), device) for i in range(parts)]
            if len(update) == count * parts:
                yield update
                update = []


def _items_of_epoch(model: Any, dataset: Any, seed: int, epoch: int) -> Iterator[Any]:
    """Yields the items of an epoch in order; each is loaded after a seed of its own."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        seed_all(seed_of("item", seed, epoch, "begin"))
        getattr(dataset, "set_epoch", _no_epoch)(epoch)
        items = iter(dataset)
        for place in itertools.count():
            seed_all(seed_of("item", seed, epoch, place))
            try:
                item = next(items)
            except StopIteration:
                return
            yield item
    of_order = seed_of("order", seed, epoch)
    if model.sampler is None:
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(of_order)).tolist()
    else:
        sampler = model.sampler(dataset)
        seed_all(of_order)
        getattr(sampler, "set_epoch", _no_epoch)(epoch)
        order = list(sampler)
    for key in order:
        seed_all(seed_of("item", seed, epoch, key))
        yield dataset[key]


def _collated(model: Any, items: list[Any]) -> list[Any]:
    if model.collate is not None:
        return [*model.collate(items), {}][:3]
    triples = [(*item, {})[:3] for item in items]
    wholes = {name: value for name, value in triples[0][2].items() if _is_whole(name)}
    cut = [(*pair, {name: named[name] for name in named if name not in wholes}) for *pair, named in triples]
    inputs, targets, named = [default_collate(list(values)) for values in zip(*cut, strict=True)]
    return [inputs, targets, {**named, **wholes}]


def _is_whole(name: str) -> bool:
    """Whether a keyword argument is declared as whole: its name is of a class that is derived from str."""
    return type(name) is not str


def _by_item(triple: Sequence[Any], part: Callable[[Any], Any], device: torch.device) -> list[Any]:
    """Returns a part of input, target and keyword arguments; of these, those that are declared as whole are whole."""
    *pair, named = triple
    parts: list[Any] = [
        *map(part, pair),
        {name: v if _is_whole(name) else part(v) for name, v in named.items()},
    ]
    return [pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value) for value in parts]


def _no_epoch(_epoch: int) -> None:
    """Stands in for the ``set_epoch`` of a dataset or a sampler without one."""


def seed_devices(seed: int) -> None:
    """Seeds torch without the work of torch.manual_seed, which formats the stack for each kind of unused device."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def seed_all(seed: int) -> None:
    """Seeds the generators that an item may draw from: torch's, Python's, and NumPy's if it is in use."""
    seed_devices(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _part(value: Any, number: int, parts: int) -> Any:
    """Returns part ``number`` of ``parts`` of a batch, cut between the rows of each tensor that has rows."""

    def part(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(parts)[number] if tensor.dim() else tensor

    return pytree.tree_map_only(torch.Tensor, part, value)


def _slice(value: Any, number: int, lengths: Sequence[int]) -> Any:
    """Returns slice ``number`` of a batch, cut along the sequence of each tensor that has one."""

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2:
            return tensor
        return torch.split(tensor, items_of_slices(tensor.shape[1], lengths), 1)[number].contiguous()

    return pytree.tree_map_only(torch.Tensor, part, value)


def items_of_slices(length: int, lengths: Sequence[int]) -> list[int]:
    """Returns the number of items of each slice of a sequence of ``length`` items; ``lengths`` are relative.

    Each boundary between slices is at the nearest item with which every slice before it and after it has at least one
    item.
    """
    ends = [0]
    for place in range(1, len(lengths) + 1):
        exact = Fraction(length * sum(lengths[:place]), sum(lengths))
        end = int(exact + Fraction(1, 2))
        least, most = ends[-1] + 1, length - (len(lengths) - place)
        ends.append(least if end < least else most if end > most else end)
    return [end - start for start, end in itertools.pairwise(ends)]
