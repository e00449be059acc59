"""Which item of the dataset goes where: B*N*W items per update, in an order seeded per epoch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils.data import default_collate

from runtime import draw_seed
from support.faults import Misuse


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
        if not (hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__")):
            raise Misuse("dataset() must return a map-style dataset: one with __len__ and __getitem__")
        if len(self.dataset) < self._per_update:
            needed = f"{self.micro_batch_size}*{self.micro_batches}*{self.copies} = {self._per_update}"
            raise Misuse(
                f"the dataset has {len(self.dataset)} items and one update takes B*N*W = {needed}; "
                "use a larger dataset, a smaller --micro-batch-size or fewer ranks"
            )

    @property
    def _per_update(self) -> int:
        return self.micro_batch_size * self.micro_batches * self.copies

    def input(self, update: int, micro: int) -> Any:
        """The collated inputs of a micro-batch."""
        return self._collate(update, micro, lambda item: item[0])

    def target(self, update: int, micro: int) -> Any:
        """The collated targets of a micro-batch."""
        return self._collate(update, micro, lambda item: item[1])

    def _collate(self, update: int, micro: int, part: Callable[[Any], Any]) -> Any:
        epoch, update = divmod(update, len(self.dataset) // self._per_update)
        size = self.micro_batch_size // self.parts
        start = update * self._per_update + (self.copy * self.micro_batches * self.parts + micro) * size
        items = _order(len(self.dataset), self.seed, epoch)[start : start + size]
        return default_collate([part(self._item(epoch, item)) for item in items])

    def _item(self, epoch: int, item: int) -> Any:
        torch.manual_seed(draw_seed("item", self.seed, epoch, item))
        return self.dataset[item]


@lru_cache(maxsize=1)
def _order(items: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(draw_seed("order", seed, epoch))
    order: list[int] = torch.randperm(items, generator=generator).tolist()
    return order
