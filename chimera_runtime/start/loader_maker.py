"""Loaders of a pipeline, and which parts of a mini-batch each worker uses: a rank loads no other parts."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakSet

from chimera_runtime.blame import Located
from chimera_runtime.data.data_workers import DataWorkers
from chimera_runtime.data.feed import Feed
from chimera_runtime.data.item_order import ItemOrder, Share, is_stream
from chimera_runtime.data.loader import Loader, Messages, ReaderMessages
from chimera_runtime.data.mini_batch import ItemLoading, Uses
from chimera_runtime.errors import Misuse
from chimera_runtime.errors import start as mistakes
from chimera_runtime.errors.data import order_of_iterable
from chimera_runtime.program.job import Job
from chimera_runtime.program.rank_facts import RankFacts, spread
from chimera_runtime.ranks.control_group import ControlGroup
from chimera_runtime.values.boundary import Traits

_INPUT, _TARGET, _KEYWORDS = range(3)


def needed_inputs(job: Job, facts: RankFacts, *, takes_keywords: bool, reads_shapes: bool) -> Uses:
    """Returns, for each micro-batch that a worker uses, the parts that it uses: input, target, keyword arguments.

    If a stage of the worker ``takes_keywords``, they are loaded for every micro-batch. If the worker ``reads_shapes``,
    it looks at the input and the keyword arguments of the first micro-batch.
    """
    parts: defaultdict[int, set[int]] = defaultdict(set)
    for part, runs in ((_INPUT, facts.inputs), (_TARGET, facts.targets)):
        for micro in spread(runs):
            parts[micro % job.micro_batches].add(part)
    if takes_keywords:
        for micro in range(job.micro_batches):
            parts[micro].add(_KEYWORDS)
    if reads_shapes:
        parts[0] |= {_INPUT, _KEYWORDS}
    return {micro: frozenset(parts[micro]) for micro in sorted(parts)}


@dataclass
class LoaderMaker:
    """Makes the loaders of a pipeline; every rank makes the same ones, in the same order.

    ``workers`` has the facts of each worker, ``traits`` the traits of each stage, with the names of the keyword
    arguments that the stage takes. ``varying`` says that updates may differ in shapes: then every rank looks at the
    shapes of each mini-batch. Loaders that are given no seed take ``seed``, that of the pipeline.
    """

    control_group: ControlGroup
    job: Job
    located: Located
    feed: Feed
    _: KW_ONLY
    workers: Iterable[RankFacts]
    traits: Sequence[Traits]
    varying: bool
    seed: int
    _messages: Messages = field(default_factory=Messages, init=False)
    _made: int = field(default=0, init=False)
    _loaders: WeakSet[Loader] = field(default_factory=WeakSet, init=False)

    @cached_property
    def _needed(self) -> list[Uses]:
        """The parts of a mini-batch that each worker uses: see `needed_inputs`."""
        return [
            needed_inputs(
                self.job,
                facts,
                takes_keywords=any(self.traits[stage].keywords for stage in facts.stages),
                reads_shapes=self.varying,
            )
            for facts in self.workers
        ]

    @property
    def needed(self) -> Uses:
        """The parts of a mini-batch that this rank uses, by micro-batch."""
        return self._needed[self.control_group.place.worker]

    def make(
        self,
        dataset: Any,
        workers: DataWorkers,
        *,
        shuffle: bool,
        sampler: Iterable[Any] | None,
        seed: int | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        drop_last: bool,
    ) -> Loader:
        """Makes a loader; arguments and errors are those of `Pipeline.loader`."""
        if workers.count < 0 or workers.ahead < 1:
            raise mistakes.loader_numbers_are_too_small(workers.count, workers.ahead)
        if is_stream(dataset) and (shuffle or sampler is not None):
            raise order_of_iterable("shuffle=True" if sampler is None else "a sampler")
        if shuffle and sampler is not None:
            raise Misuse(mistakes.SAMPLER_AND_SHUFFLE)
        if getattr(sampler, "num_replicas", 1) > 1:
            raise Misuse(mistakes.SAMPLER_OF_ONE_RANK)
        drawn_by, place = self.seed if seed is None else seed, self.control_group.place
        self._made += 1
        readers = frozenset(worker for worker, parts in enumerate(self._needed) if parts)
        loader = Loader(
            loading=ItemLoading(dataset, drawn_by, collate_fn, names=self.feed.names),
            share=Share(self.feed.size, self.job.micro_batches, place.copies, place.copy),
            uses=self.needed,
            order=ItemOrder(dataset, drawn_by, shuffle, sampler),
            reader_messages=ReaderMessages(self.control_group, readers, self._made, self._messages),
            located=self.located.for_loader(self.control_group.refusals.note_loading),
            workers=replace(workers, timeout=self.control_group.timeout),
            drop_last=drop_last,
        )
        self._loaders.add(loader)
        return loader

    def close(self) -> None:
        """Ends the data workers of all loaders."""
        for loader in self._loaders:
            loader.close()
