"""The order of the items of a dataset, and the share of a copy of the pipelines in each mini-batch."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import MISUSED, Misuse
from chimera_runtime.errors import data as mistakes
from chimera_runtime.values.nested import all_generators_kept, draw_seed, seed_all

_SAMPLING = UserCode("the sampler", MISUSED)
_COUNTING = UserCode("the length of the dataset", MISUSED)


@dataclass(frozen=True)
class Share:
    """The part of each mini-batch, the next B*N*W items, that goes to one ``copy`` of the W pipelines.

    Item j of a mini-batch goes to copy j // (B*N), and there to micro-batch (j // B) % N. Of a mini-batch with another
    number of items, see `of`, the copy has ``micro_batches`` from micro-batch ``first`` on.
    """

    micro_batch_size: int
    micro_batches: int
    copies: int
    copy: int
    first: int | None = None

    def of(self, items: int) -> "Share":
        """Returns the share in a mini-batch of any number of items, whose micro-batches are spread over the copies."""
        total = -(-items // self.micro_batch_size)
        first, end = (copy * total // self.copies for copy in (self.copy, self.copy + 1))
        return replace(self, micro_batches=end - first, first=first)

    @property
    def items(self) -> int:
        """Number of items of an update over all copies, B*N*W."""
        return self.micro_batch_size * self.micro_batches * self.copies

    @property
    def formula(self) -> str:
        """The product B*N*W with its numbers, for messages."""
        return f"{self.micro_batch_size}*{self.micro_batches}*{self.copies} = {self.items}"

    def start(self, micro: int) -> int:
        """The first item of a micro-batch of this copy, counted within the mini-batch."""
        first = self.copy * self.micro_batches if self.first is None else self.first
        return (first + micro) * self.micro_batch_size

    def items_of_copy(self, items: int) -> int:
        """Number of items for this copy if the mini-batch has ``items`` over all copies."""
        return max(0, min(self.micro_batch_size * self.micro_batches, items - self.start(0)))


@dataclass
class ItemOrder:
    """The order of the items of a map-style dataset, epoch by epoch; it depends on ``seed`` and epoch alone.

    A ``sampler`` gives the order; it is read to its end when an epoch begins. If it ``gives_batches``, these are lists
    of keys, each for a mini-batch.
    """

    dataset: Any
    seed: int
    shuffle: bool = True
    sampler: Iterable[Any] | None = None
    gives_batches: bool = False
    _keys: dict[int, Any] = field(default_factory=dict)
    _sizes: dict[int, dict[int, int]] = field(default_factory=dict)  # of mini-batches, by epoch and first item

    def count(self, epoch: int) -> int:
        """The number of items in an epoch."""
        return len(self._keys_of(epoch)) if self.sampler is not None else length(self.dataset)

    def keys(self, epoch: int, start: int, stop: int) -> list[Any]:
        """Returns the keys with which the dataset is indexed for items number ``start .. stop-1`` of an epoch."""
        if self.sampler is None and not self.shuffle:
            return [*range(start, stop)]
        keys = self._keys_of(epoch)[start:stop]
        return keys.tolist() if isinstance(keys, torch.Tensor) else keys

    def size_at(self, epoch: int, place: int) -> int:
        """The items of the mini-batch that begins at a place of an epoch, if the sampler gives batches; 0 at its end.

        Raises KeyError if none begins there.
        """
        return self._sizes[epoch][place] if place < self.count(epoch) else 0

    def batches(self, epoch: int) -> int:
        """The number of mini-batches of an epoch, if the sampler gives batches."""
        self._keys_of(epoch)
        return len(self._sizes[epoch])

    def _keys_of(self, epoch: int) -> Any:
        if epoch not in self._keys:
            if len(self._keys) > 1:  # two epochs: mini-batches of the next are loaded during one
                self._sizes.pop(oldest := min(self._keys), None)
                del self._keys[oldest]
            self._keys[epoch] = self._draw(epoch)
        return self._keys[epoch]

    def _draw(self, epoch: int) -> Any:
        seed = draw_seed("order", self.seed, epoch)
        if self.sampler is None:
            return torch.randperm(length(self.dataset), generator=torch.Generator().manual_seed(seed))
        with all_generators_kept(), _SAMPLING:
            seed_all(seed)
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            given = [*self.sampler]
            if not self.gives_batches:
                return given
            batches = [[*batch] for batch in given]
        if not all(batches):
            raise Misuse(mistakes.BATCH_OF_SAMPLER_IS_EMPTY)
        self._sizes[epoch], place = {}, 0
        for batch in batches:
            self._sizes[epoch][place], place = len(batch), place + len(batch)
        return [key for batch in batches for key in batch]


def length(dataset: Any) -> int:
    """The number of items of a dataset that has a length."""
    with _COUNTING:
        return len(dataset)


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is iterable, and not map-style. Raises `Misuse` if it is neither, or can be read only once."""
    with _COUNTING:
        if isinstance(dataset, torch.utils.data.IterableDataset):
            return True
        if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
            return False
        is_iterable = hasattr(dataset, "__iter__") and not hasattr(dataset, "__next__")
    if not is_iterable:
        raise mistakes.dataset_has_neither_keys_nor_order(kind=type(dataset).__name__)
    return True


def length_of_stream(dataset: Any) -> int | None:
    """The number of items in an epoch of an iterable dataset, or None if the dataset has no length."""
    if not hasattr(dataset, "__len__"):
        return None
    with _COUNTING:
        try:
            return len(dataset)
        except (TypeError, NotImplementedError):
            return None


def require_enough(items: int, share: Share) -> None:
    """Raises `Misuse` unless an epoch has enough items for a mini-batch."""
    if items < share.items:
        raise mistakes.dataset_is_too_small(items=items, formula=share.formula)
