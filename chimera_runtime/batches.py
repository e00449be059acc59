"""Which item of the dataset goes where: B*N*W items per update, in an order seeded per epoch."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from chimera_runtime.blame import Calling
from chimera_runtime.errors import MISUSED, Misuse
from chimera_runtime.keywords import Keywords
from chimera_runtime.tensors import draw_seed, seed_torch

_COUNTING = Calling("the length of the dataset", MISUSED)
_LOADING = Calling("an item of the dataset", MISUSED)
_COLLATING = Calling("default_collate of a micro-batch", MISUSED)


Triple = tuple[Any, Any, Keywords]
"""An input, a target and keyword arguments, as pytrees."""


class Source(Protocol):
    """Where micro-batches come from; they are counted from the first of an update."""

    def input(self, update: int, micro: int) -> Any:
        """The inputs of a micro-batch, for stage 0."""

    def target(self, update: int, micro: int) -> Any:
        """The targets of a micro-batch, for the loss."""

    def keywords(self, update: int, micro: int) -> Keywords:
        """The keyword arguments of a micro-batch, for the stages that take them."""


@dataclass(frozen=True)
class Batches:
    """The micro-batches of one copy of the pipeline group.

    ``micro_batch_size`` B, ``micro_batches`` N per update and ``copies`` W, as in the paper; item j of an
    update goes to copy j // (B*N) and to micro-batch (j // B) % N. Where a micro-batch is cut into ``parts``, its items
    go to them in order, and the parts are what ``micro`` counts. Update u takes what update u + ``shift`` takes by the
    seed: where training goes on with mini-batches of another size, after other updates.
    """

    dataset: Any
    micro_batch_size: int
    micro_batches: int
    parts: int
    copies: int
    copy: int
    seed: int
    shift: int = 0

    def check(self) -> None:
        """Says what is wrong with the dataset.

        Raises
        ------
        Misuse
            If it is not map-style, or too small for one update.
        """
        with _COUNTING:
            is_map = hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__")
        if not is_map:
            raise Misuse("dataset() must return a map-style dataset: one with __len__ and __getitem__")
        if self._items < self._per_update:
            needed = f"{self.micro_batch_size}*{self.micro_batches}*{self.copies} = {self._per_update}"
            raise Misuse(
                f"the dataset has {in_items(self._items)} and one update takes "
                f"B*N*W = {needed}; use a larger dataset, a smaller --micro-batch-size or fewer ranks"
            )

    def position(self, update: int) -> tuple[int, int]:
        """Where an update begins: the epoch, and how many of its items come before, those of all copies."""
        epoch, place = divmod(update + self.shift, self._items // self._per_update)
        return epoch, place * self._per_update

    def at(self, update: int, epoch: int, items: int) -> "Batches":
        """The micro-batches if an update begins at that position.

        Raises
        ------
        Misuse
            If no update begins there.
        """
        if items % self._per_update:
            sizes = f"{self.micro_batch_size}*{self.micro_batches}*{self.copies}"
            raise Misuse(
                f"training was at item {items} of the data, and B*N*W = {sizes} = {self._per_update} does not divide "
                "that: choose B, N or W so that it does"
            )
        began = epoch * (self._items // self._per_update) + items // self._per_update
        return replace(self, shift=began - update)

    @property
    def _items(self) -> int:
        with _COUNTING:
            return len(self.dataset)

    @property
    def _per_update(self) -> int:
        return self.micro_batch_size * self.micro_batches * self.copies

    def input(self, update: int, micro: int) -> Any:
        """The collated inputs of a micro-batch, counted from the first of an update."""
        return self._collate(update, micro, 0)

    def target(self, update: int, micro: int) -> Any:
        """The collated targets of a micro-batch, counted from the first of an update."""
        return self._collate(update, micro, 1)

    def keywords(self, update: int, micro: int) -> Keywords:
        """The collated keyword arguments of a micro-batch, counted from the first of an update."""
        keywords: Keywords = self._collate(update, micro, 2)
        return keywords

    def _collate(self, update: int, micro: int, part: int) -> Any:
        size, passes = self.micro_batch_size // self.parts, self.micro_batches * self.parts
        later, number = divmod(micro, passes)
        count = self._items
        epoch, place = divmod(update + later + self.shift, count // self._per_update)
        start = place * self._per_update + (self.copy * passes + number) * size
        items = _order(count, self.seed, epoch)[start : start + size].tolist()
        loaded = [self._item(epoch, item)[part] for item in items]
        with _COLLATING:
            return default_collate(loaded)

    def _item(self, epoch: int, item: int) -> Triple:
        seed_torch(draw_seed("item", self.seed, epoch, item))
        with _LOADING:
            loaded = self.dataset[item]
        return as_triple(loaded, f"item {item} of the dataset")


def in_items(count: int) -> str:
    """A number of items, in words."""
    return "1 item" if count == 1 else f"{count} items"


def as_triple(value: Any, what: str) -> Triple:
    """Input, target and keyword arguments: a pair has none of these.

    Raises
    ------
    Misuse
        If it is neither a pair nor a triple with a dict of names.
    """
    match value:
        case (inputs, target):
            return inputs, target, {}
        case (inputs, target, dict() as keywords) if all(isinstance(name, str) for name in keywords):
            return inputs, target, keywords
        case _:
            raise Misuse(
                f"{what} is a {type(value).__name__}, not a pair (input, target); keyword arguments of stages stand "
                "third, in a dict"
            )


@lru_cache(maxsize=2)
def _order(items: int, seed: int, epoch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw_seed("order", seed, epoch))
    return torch.randperm(items, generator=generator)
