"""The micro-batches of a dataset, loaded by update and number: for the start of a pipeline and for a check."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from chimera_runtime.data.item_order import ItemOrder, Share, is_stream, length_of_stream, require_enough
from chimera_runtime.data.iterable_reader import IterableReader, ReadBatch, ReadPosition
from chimera_runtime.data.mini_batch import ALL, ItemLoading, MiniBatch, Triple, require_cut
from chimera_runtime.errors.data import order_of_iterable
from chimera_runtime.values.keywords import Keywords
from chimera_runtime.values.nested import rows
from chimera_runtime.values.tensors import all_generators_kept


class MicroBatchSource(Protocol):
    """Source of micro-batches; ``micro`` counts from the first micro-batch of an update."""

    def input(self, update: int, micro: int) -> Any:
        """The inputs of a micro-batch, for stage 0."""

    def target(self, update: int, micro: int) -> Any:
        """The targets of a micro-batch, for the loss."""

    def keywords(self, update: int, micro: int) -> Keywords:
        """The keyword arguments of a micro-batch, for the stages that take them."""


@dataclass(frozen=True)
class Batches:
    """The micro-batches of one copy of the pipelines, from the beginning of the data.

    `Share` has the sizes, `ItemOrder` the order of a map-style dataset; an iterable dataset has its own order. If
    micro-batches are cut into ``parts``, the items go to these in order, and ``micro`` counts parts.
    """

    dataset: Any
    micro_batch_size: int
    micro_batches: int
    parts: int
    copies: int
    copy: int
    seed: int
    collate: Callable[[list[Any]], Any] | None = None
    sampler: Iterable[Any] | None = None
    _triples: dict[tuple[int, int], Triple] = field(default_factory=dict)
    _read: list[MiniBatch] = field(default_factory=list)
    _stream: list[Any] = field(default_factory=list)

    def check(self) -> None:
        """Passes if the dataset can be trained on.

        Raises `Misuse` if it is neither map-style nor iterable, too small for one update, or iterable and has a
        sampler.
        """
        if not is_stream(self.dataset):
            require_enough(self._order.count(0), self._share)
            return
        if self.sampler is not None:
            raise order_of_iterable("a sampler")
        if (count := length_of_stream(self.dataset)) is not None:
            require_enough(count, self._share)

    def input(self, update: int, micro: int) -> Any:
        """The collated inputs of a micro-batch, counted from the first of an update."""
        return self._part(update, micro)[0]

    def target(self, update: int, micro: int) -> Any:
        """The collated targets of a micro-batch, counted from the first of an update."""
        return self._part(update, micro)[1]

    def keywords(self, update: int, micro: int) -> Keywords:
        """The collated keyword arguments of a micro-batch, counted from the first of an update."""
        return self._part(update, micro)[2]

    @property
    def _share(self) -> Share:
        return Share(self.micro_batch_size, self.micro_batches, self.copies, self.copy)

    @property
    def _order(self) -> ItemOrder:
        return ItemOrder(self.dataset, self.seed, sampler=self.sampler)

    def _part(self, update: int, micro: int) -> Triple:
        later, number = divmod(micro, self.micro_batches * self.parts)
        uncut, part = divmod(number, self.parts)
        place = update + later, uncut
        if place not in self._triples:
            self._triples.clear()
            with all_generators_kept():
                self._triples[place] = self._loaded(*place)
            if self.parts > 1:
                require_cut(self._triples[place], self.micro_batch_size, "a micro-batch of the dataset")
        size = self.micro_batch_size // self.parts
        triple: Triple = rows(self._triples[place], part * size, size) if self.parts > 1 else self._triples[place]
        return triple

    def _loaded(self, update: int, micro: int) -> Triple:
        loading, share = ItemLoading(self.dataset, self.seed, self.collate), self._share
        if is_stream(self.dataset):
            return self._mini_batch(loading, update)(micro)
        order, count = self._order, self._order.count(0)
        epoch, place = divmod(update, count // share.items)
        start = place * share.items + share.start(micro)
        keys = order.keys(epoch, start, start + share.micro_batch_size)
        return loading.collated(loading.items(epoch, keys), epoch, start, keys)

    def _mini_batch(self, loading: ItemLoading, update: int) -> MiniBatch:
        """The mini-batch of an update of an iterable dataset; earlier ones are kept, as only a few are ever read."""
        if not self._stream:
            uses = dict.fromkeys(range(self.micro_batches), ALL)
            self._stream.append(iter(IterableReader(loading, self._share, uses, True, ReadPosition())))
        while len(self._read) <= update:
            match next(self._stream[0]):
                case ReadBatch(batch):
                    self._read.append(batch)
                case _:
                    pass  # the next epoch begins
        return self._read[update]
