"""Sources of micro-batches: they return the inputs, targets and keyword arguments of a micro-batch of an update.

`Batches` is a whole dataset, for the start of a pipeline or a check; `CutBatch` is one mini-batch that the user has
cut.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from chimera_runtime.data.item_order import ItemOrder, Share, is_stream, length_of_stream, require_enough
from chimera_runtime.data.mini_batch import ALL, CutSlice, ItemLoading, MicroBatchParts, Triple
from chimera_runtime.data.readers import IterableReader, ReadBatch, ReadPosition
from chimera_runtime.errors.data import order_of_iterable
from chimera_runtime.values.boundary import Keywords
from chimera_runtime.values.nested import all_generators_kept


class MicroBatchSource(ABC):
    """Source of micro-batches, counted from the first one of ``update``: a number of N or more is of a later update."""

    def input(self, update: int, micro: int) -> Any:
        """The inputs of a micro-batch, for stage 0."""
        return self.component(update, micro, 0)

    def target(self, update: int, micro: int) -> Any:
        """The targets of a micro-batch, for the loss."""
        return self.component(update, micro, 1)

    def keywords(self, update: int, micro: int) -> Keywords:
        """The keyword arguments of a micro-batch, for the stages that take them."""
        keywords: Keywords = self.component(update, micro, 2)
        return keywords

    @abstractmethod
    def component(self, update: int, micro: int, number: int) -> Any:
        """The inputs (``number`` 0), the targets (1) or the keyword arguments (2) of a micro-batch."""


@dataclass(frozen=True)
class CutBatch(MicroBatchSource):
    """A mini-batch that the user has cut: ``triples`` has inputs, targets and keyword arguments of each micro-batch.

    Where the schedule cuts micro-batches into parts, there is a triple for each part, and ``micro_batch_size`` is the
    number of parts of a micro-batch. Triples may hold anything that stages and loss take.
    """

    triples: Sequence[Triple]
    micro_batch_size: int

    def component(self, _update: int, micro: int, number: int) -> Any:
        """The inputs, the targets or the keyword arguments of a micro-batch, as they were given."""
        return self.triples[micro][number]


@dataclass(frozen=True)
class Batches(MicroBatchSource):
    """The micro-batches of one copy of the pipelines, from the beginning of a dataset.

    Sizes are as in `Share`, ``cut_slice`` and ``lengths`` as in `MicroBatchParts`. If micro-batches are cut into
    ``parts``, numbers of micro-batches count parts.
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
    slices: int = 1
    cut_slice: CutSlice | None = None
    lengths: tuple[int, ...] = ()
    _triples: dict[tuple[int, int], Triple] = field(default_factory=dict)
    _read: list[ReadBatch] = field(default_factory=list)
    _stream: list[Any] = field(default_factory=list)

    def check(self) -> None:
        """Raises `Misuse` if the dataset is not map-style or iterable, too small, or iterable and has a sampler."""
        if not is_stream(self.dataset):
            require_enough(self._order.count(0), self._share)
            return
        if self.sampler is not None:
            raise order_of_iterable(name="a sampler")
        if (count := length_of_stream(self.dataset)) is not None:
            require_enough(count, self._share)

    @property
    def _share(self) -> Share:
        return Share(self.micro_batch_size, self.micro_batches, self.copies, self.copy)

    @property
    def _parts(self) -> MicroBatchParts:
        return MicroBatchParts(self.micro_batch_size, self.parts, self.slices, self.cut_slice, self.lengths)

    @property
    def _order(self) -> ItemOrder:
        return ItemOrder(self.dataset, self.seed, sampler=self.sampler)

    def component(self, update: int, micro: int, number: int) -> Any:
        """Returns inputs, targets or keyword arguments of a micro-batch; the micro-batch collated last is kept."""
        later, place_in_update = divmod(micro, self.micro_batches * self.parts)
        uncut, part = divmod(place_in_update, self.parts)
        place = update + later, uncut
        if place not in self._triples:
            self._triples.clear()
            with all_generators_kept():
                self._triples[place] = self._loaded(*place)
            self._parts.require(self._triples[place], "a micro-batch of the dataset")
        return self._parts.part(self._triples[place][number], number, part)

    def _loaded(self, update: int, micro: int) -> Triple:
        loading, share = ItemLoading(self.dataset, self.seed, self.collate), self._share
        if is_stream(self.dataset):
            return self._read_until(loading, update).micro_batches[micro]
        order, count = self._order, self._order.count(0)
        epoch, place = divmod(update, count // share.items)
        start = place * share.items + share.start(micro)
        keys = order.keys(epoch, start, start + share.micro_batch_size)
        return loading.collated(loading.items(epoch, keys), epoch, start, keys)

    def _read_until(self, loading: ItemLoading, update: int) -> ReadBatch:
        if not self._stream:
            uses = dict.fromkeys(range(self.micro_batches), ALL)
            self._stream.append(iter(IterableReader(loading, self._share, uses, True, ReadPosition())))
        while len(self._read) <= update:
            if (batch := next(self._stream[0])).items:  # else the next epoch begins
                self._read.append(batch)
        return self._read[update]
