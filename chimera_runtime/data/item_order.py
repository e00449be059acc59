"""Which item of a mini-batch is whose, and in which order the items of a dataset come."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import MISUSED, Misuse
from chimera_runtime.values.tensors import all_generators_kept, draw_seed, seed_all

_SAMPLING = UserCode("the sampler", MISUSED)
_COUNTING = UserCode("the length of the dataset", MISUSED)


@dataclass(frozen=True)
class Share:
    """What a copy of the pipelines has of a mini-batch.

    A mini-batch is the next B*N*W items, ``micro_batch_size`` B, ``micro_batches`` N and ``copies`` W as in the paper:
    item j of it goes to copy j // (B*N) and there to micro-batch (j // B) % N.
    """

    micro_batch_size: int
    micro_batches: int
    copies: int
    copy: int

    @property
    def items(self) -> int:
        """Those of an update, over all copies: B*N*W."""
        return self.micro_batch_size * self.micro_batches * self.copies

    @property
    def formula(self) -> str:
        """B*N*W in numbers, for messages."""
        return f"{self.micro_batch_size}*{self.micro_batches}*{self.copies} = {self.items}"

    def start(self, micro: int) -> int:
        """The first item of a micro-batch of this copy, counted within the mini-batch."""
        return (self.copy * self.micro_batches + micro) * self.micro_batch_size

    def held(self, items: int) -> int:
        """How many of the first items of a mini-batch are this copy's."""
        mine = self.micro_batch_size * self.micro_batches
        return max(0, min(mine, items - self.copy * mine))


@dataclass
class ItemOrder:
    """The items of a map-style dataset, epoch by epoch; ``seed`` and epoch alone decide what is drawn.

    Items come as the ``sampler`` gives them, which is asked for all of an epoch at its beginning; without one in an
    order that is drawn anew in each epoch, if they are to be shuffled, and else as they lie.
    """

    dataset: Any
    seed: int
    shuffle: bool = True
    sampler: Iterable[Any] | None = None
    _keys: dict[int, Any] = field(default_factory=dict)

    def count(self, epoch: int) -> int:
        """The items of an epoch."""
        return len(self._of(epoch)) if self.sampler is not None else length(self.dataset)

    def keys(self, epoch: int, start: int, stop: int) -> list[Any]:
        """What the dataset is asked for, at some places of an epoch."""
        if self.sampler is None and not self.shuffle:
            return [*range(start, stop)]
        keys = self._of(epoch)[start:stop]
        return keys.tolist() if isinstance(keys, torch.Tensor) else keys

    def _of(self, epoch: int) -> Any:
        if epoch not in self._keys:
            if len(self._keys) > 1:  # two of them: mini-batches of the next epoch are loaded during one
                del self._keys[min(self._keys)]
            self._keys[epoch] = self._drawn(epoch)
        return self._keys[epoch]

    def _drawn(self, epoch: int) -> Any:
        seed = draw_seed("order", self.seed, epoch)
        if self.sampler is None:
            return torch.randperm(length(self.dataset), generator=torch.Generator().manual_seed(seed))
        with all_generators_kept(), _SAMPLING:
            seed_all(seed)
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            return [*self.sampler]


def length(dataset: Any) -> int:
    """The items of a dataset that has a length."""
    with _COUNTING:
        return len(dataset)


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is iterable, and not map-style.

    Raises
    ------
    Misuse
        If it is neither, or can be read but once.
    """
    with _COUNTING:
        if isinstance(dataset, torch.utils.data.IterableDataset):
            return True
        if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
            return False
        is_iterable = hasattr(dataset, "__iter__") and not hasattr(dataset, "__next__")
    if not is_iterable:
        raise Misuse(
            f"the dataset, of type {type(dataset).__name__}, is none: a map-style one has __len__ and __getitem__, an "
            "iterable one an __iter__ that begins anew every time"
        )
    return True


def refuse_order(what: str) -> None:
    """Refuses what decides the order of an iterable dataset.

    Raises
    ------
    Misuse
        In any case.
    """
    raise Misuse(
        f"{what} is for a map-style dataset; this one is iterable and comes in its own order: leave that out, or give "
        "the dataset __len__ and __getitem__"
    )


def length_of_stream(dataset: Any) -> int | None:
    """The items of an epoch of an iterable dataset, if it says that beforehand."""
    if not hasattr(dataset, "__len__"):
        return None
    with _COUNTING:
        try:
            return len(dataset)
        except (TypeError, NotImplementedError):
            return None


def in_items(count: int) -> str:
    """A number of items, in words."""
    return "1 item" if count == 1 else f"{count} items"


def require_enough(items: int, share: Share) -> None:
    """Passes if an epoch has a mini-batch.

    Raises
    ------
    Misuse
        If it has fewer items.
    """
    if items < share.items:
        raise Misuse(
            f"the dataset has {in_items(items)} and one update takes B*N*W = {share.formula}; use a larger dataset, "
            "smaller micro-batches or fewer ranks"
        )
