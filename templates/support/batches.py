"""Which item of the dataset goes where: B*N*W items per update, in an order seeded per epoch."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils.data import default_collate

from runtime import draw_seed, seed_torch
from support.blame import Calling
from support.faults import MISUSED, Misuse

_COUNTING = Calling("the length of the dataset", MISUSED)
_LOADING = Calling("an item of the dataset", MISUSED)
_COLLATING = Calling("default_collate of a micro-batch", MISUSED)


@dataclass(frozen=True)
class Batches:
    """The micro-batches of one copy of the pipeline group.

    ``micro_batch_size`` B, ``micro_batches`` N per update and ``copies`` W, as in the paper; item j of an
    update goes to copy j // (B*N) and to micro-batch (j // B) % N. Where a micro-batch is cut into ``parts``, its items
    go to them in order, and the parts are what ``micro`` counts.
    """

    dataset: Any
    micro_batch_size: int
    micro_batches: int
    parts: int
    copies: int
    copy: int
    seed: int

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
                f"the dataset has {self._items} {'item' if self._items == 1 else 'items'} and one update takes "
                f"B*N*W = {needed}; use a larger dataset, a smaller --micro-batch-size or fewer ranks"
            )

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

    def _collate(self, update: int, micro: int, part: int) -> Any:
        size, passes = self.micro_batch_size // self.parts, self.micro_batches * self.parts
        later, number = divmod(micro, passes)
        count = self._items
        epoch, place = divmod(update + later, count // self._per_update)
        start = place * self._per_update + (self.copy * passes + number) * size
        items = _order(count, self.seed, epoch)[start : start + size].tolist()
        loaded = [self._item(epoch, item)[part] for item in items]
        with _COLLATING:
            return default_collate(loaded)

    def _item(self, epoch: int, item: int) -> tuple[Any, Any]:
        seed_torch(draw_seed("item", self.seed, epoch, item))
        with _LOADING:
            found = self.dataset[item]
        if not (isinstance(found, tuple | list) and len(found) == 2):
            raise Misuse(f"item {item} of the dataset is a {type(found).__name__}, not a pair (input, target)")
        return found[0], found[1]


@lru_cache(maxsize=2)
def _order(items: int, seed: int, epoch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw_seed("order", seed, epoch))
    return torch.randperm(items, generator=generator)
