"""Feed of a pipeline: keeps the mini-batches that `Pipeline.step` was given, and cuts them into micro-batches.

Also makes facts about the data, such as digests and positions, which the ranks of a copy compare: see `agreement`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from chimera_runtime.blame import UserCode
from chimera_runtime.data.micro_batch_source import Batches, CutBatch, MicroBatchSource
from chimera_runtime.data.mini_batch import (
    KEYWORDS,
    POSITION_NAMES,
    CutSlice,
    MicroBatchParts,
    MiniBatch,
    Triple,
    as_triple,
    by_item,
    length_of,
    micro_batches_of,
    require_cut,
    require_no_graph,
    require_rows,
)
from chimera_runtime.errors import FAILED
from chimera_runtime.errors import data as mistakes
from chimera_runtime.program.job import Job
from chimera_runtime.ranks.agreement import POSITION, Fact, Key, fact_of, short
from chimera_runtime.values.boundary import KeywordNames, Whole, borders_in
from chimera_runtime.values.fingerprint import sampled
from chimera_runtime.values.nested import Tensors, lengths, taken_apart
from chimera_runtime.values.shared_memory import versions


def position(numbers: tuple[int, ...]) -> Fact:
    """Makes a fact of a position in the data, at which a mini-batch of a `Loader` begins."""
    return fact_of(dict(zip(POSITION_NAMES, numbers, strict=False)))


def sample(digest: int) -> Fact:
    """Makes a fact of a digest of some of the values in inputs, targets or keyword arguments."""
    return short(digest), lambda: {"a digest of a sample": f"{digest:x}"}


def digests(triple: Triple, start: int = 0, count: int | None = None) -> Iterator[tuple[int, int]]:
    """Yields (number, digest of some values) for inputs (0), targets (1) and keyword arguments (2) that have values.

    ``start`` and ``count`` choose rows, as in `sampled`, of all that is not whole.
    """
    for component, part in enumerate(by_item(triple)):
        wholes = (
            [value for name, value in triple[2].items() if isinstance(name, Whole)] if component == KEYWORDS else []
        )
        sampled_parts = [sampled(part, start, count) if component < KEYWORDS or part else None, *map(sampled, wholes)]
        if found := [digest for digest in sampled_parts if digest is not None]:
            yield component, found[0] if len(found) == 1 else hash((*found,))


class EvaluationDataFacts:
    """Collects facts about all batches of an evaluation, which the ranks of a copy compare at its end."""

    def __init__(self, copy: int) -> None:
        self._copy = copy
        self._count = 0
        self._counts = [0, 0, 0]
        self._digests = [0, 0, 0]
        self._positions: list[tuple[int, ...]] = []

    def note(self, batch: Any) -> Any:
        """Notes the facts of a batch, and returns the batch."""
        self._count += 1
        if isinstance(batch, MiniBatch):
            self._positions.append(batch.position)
        elif not callable(batch):
            for component, digest in digests(as_triple(batch, "a batch of an evaluation")):
                self._counts[component] += 1
                self._digests[component] = short(hash((self._digests[component], digest)))
        return batch

    def facts(self) -> dict[Key, Fact]:
        """Returns a digest of each part of which every batch had one, and a position if every batch had a position."""
        facts: dict[Key, Fact] = {
            ("data", self._copy, component): sample(self._digests[component])
            for component, count in enumerate(self._counts)
            if count == self._count > 0
        }
        if self._positions and len(self._positions) == self._count:
            facts[POSITION] = short(hash((*self._positions,))), position(self._positions[-1])[1]
        return facts


UNKNOWN = -1
"""The number of micro-batches of a mini-batch of which this rank has no tensor."""

Pair = tuple[Any, Any] | Triple
"""A micro-batch: an input and a target, as pytrees, and keyword arguments if there are any."""

_LOADING = UserCode("the function that was given to step", FAILED)


@dataclass
class Feed(MicroBatchSource):
    """Keeps the mini-batches of this copy that are in use, by their update, and cuts micro-batches from them.

    ``size`` is B. An update has N micro-batches; if there are programs for other ``numbers`` too, it has as many as its
    mini-batch, and those of a round are counted from ``start`` on. ``names`` are those of keyword arguments, None until
    the start has found which names the stages take.
    If micro-batches ``varies``, the last one of a mini-batch in one piece may have fewer items, and those of functions,
    lists and loaders any shapes. If it ``keeps`` what a function makes, the function is called once for each
    micro-batch, however often that is read.
    """

    job: Job
    size: int
    copy: int = 0
    names: KeywordNames | None = None
    cut_slice: CutSlice | None = None
    varies: bool = False
    start: int = 0
    _numbers: dict[int, int] = field(default_factory=dict)  # of micro-batches, by update
    _items: dict[int, int] = field(default_factory=dict)  # of a mini-batch in one piece, by update
    _pairs: dict[int, Callable[[int], Pair] | Batches | CutBatch | Triple] = field(default_factory=dict)
    _facts: dict[int, dict[Key, Fact]] = field(default_factory=dict)
    _tensors: dict[int, Tensors] = field(default_factory=dict)
    _versions: dict[int, list[int]] = field(default_factory=dict)
    _cut: dict[int, dict[int, Sequence[Any]]] = field(default_factory=dict)  # by update and component, cut once
    keeps: bool = False
    _kept: dict[int, dict[int, Triple]] = field(default_factory=dict)  # by update and micro-batch
    _checked: tuple[Any, Triple] | None = None
    _has_looked: bool = False  # for borders in a mini-batch

    def put(self, update: int, batch: Any, number: int | None = None) -> None:
        """Takes the mini-batch of an update in one of the forms of `Pipeline.step`; ``number`` is that of micro-batches
        that a function gives.

        Raises `Misuse` if it has none of these forms, not B*N items, other keyword arguments, or parts that cannot be
        cut.
        """
        if number is not None and (not callable(batch) or isinstance(batch, MiniBatch)):
            raise mistakes.number_is_of_functions(kind=f"a {type(batch).__name__}")
        self._numbers[update] = self.job.micro_batches if number is None else number
        self._facts.pop(update, None)
        self._tensors.pop(update, None)
        self._cut[update] = {}
        self._kept.pop(update, None)
        if isinstance(batch, MiniBatch):
            if not self.job.numbers and not (self.varies and batch.number == self.job.micro_batches):
                batch.require_whole()
            if batch.items % self.size and not self.varies:
                raise mistakes.items_fill_no_micro_batch(name="a mini-batch", items=batch.items, size=self.size)
            self._facts[update] = {POSITION: position(batch.position)}
        if callable(batch) or isinstance(batch, Batches | CutBatch):
            if isinstance(batch, CutBatch):
                for micro, triple in enumerate(batch.triples):
                    require_no_graph(triple, f"micro-batch {micro}")
                self._numbers[update] = len(batch.triples) // self.job.parts
            if isinstance(batch, MiniBatch):
                self._numbers[update] = batch.number
            self._pairs[update] = batch
        else:
            triple = as_triple(batch, "a batch", self.names)
            require_no_graph(triple, "a batch")
            count = self._numbers[update] = self._number_in(triple)
            items = self._items[update] = self._items_in(triple, count)
            if count * self.job.row_parts > 1:
                require_cut(triple, items, "a batch")
                self._require_parts(items % self.size, "the last micro-batch")
            if self.job.slices > 1:
                self._parts.require(triple, "a batch")
            require_rows(triple, items, "a batch", mistakes.all_of_step(self.size, count))
            self._pairs[update] = triple
            self._tensors[update] = taken_apart(triple)[0]
            if count > 0:
                start = update % count * self.size
                self._note_facts(update, triple, start, min(self.size, items - start))

    def _number_in(self, triple: Triple) -> int:
        """The number of micro-batches in a mini-batch of one piece."""
        if not self.job.numbers:
            return self.job.micro_batches
        items = max(lengths(by_item(triple)), default=None)
        if items is None:  # this rank uses none of it
            return UNKNOWN
        if items % self.size and not self.varies:
            raise mistakes.items_fill_no_micro_batch(name="a batch", items=items, size=self.size)
        return -(-items // self.size)

    def _items_in(self, triple: Triple, count: int) -> int:
        """The items that a mini-batch in one piece must have: those of ``count`` micro-batches, the last one of which
        may have fewer if they vary.
        """
        full = self.size * count
        items = max(lengths(by_item(triple)), default=full) if self.varies else full
        return items if full - self.size < items < full else full

    def _require_parts(self, items: int, name: str) -> None:
        """Raises `Misuse` if the items of a micro-batch cannot be cut into equal parts."""
        if items % self.job.row_parts:
            raise mistakes.items_are_not_cut(name=name, items=items, parts=self.job.row_parts, scheme=self.job.name)

    def number(self, update: int) -> int:
        """The number of micro-batches of an update, or `UNKNOWN` where this rank cannot see it."""
        return self._numbers[update]

    def set_number(self, update: int, number: int) -> None:
        """Sets the number of micro-batches of an update, on which the ranks have agreed."""
        self._numbers[update] = number

    def put_example(self, example: "Pair | Batches | CutBatch") -> None:
        """Takes the example for the start of a pipeline: a pair, a triple or a whole dataset; errors as in `put`."""
        if isinstance(example, Batches):
            self.cut_slice = example.cut_slice
        if not isinstance(example, Batches | CutBatch):
            triple = as_triple(example, "the example")
            require_no_graph(triple, "the example")
            self._parts.require(triple, "the example")
        self._numbers[0] = self.job.micro_batches
        self._pairs[0] = example if isinstance(example, Batches | CutBatch) else lambda _micro: example

    def remarks_on(self, batch: Any) -> list[str]:
        """A remark on the first mini-batch in one piece, if by its numbers a keyword argument should not be cut."""
        if self._has_looked or callable(batch) or isinstance(batch, Batches | CutBatch):
            return []
        self._has_looked = True
        name = borders_in(as_triple(batch, "a batch", self.names)[2])
        return [] if name is None else [mistakes.looks_like_borders(name)]

    def put_micro_batches(self, update: int, pairs: Sequence[Pair]) -> None:
        """Takes the micro-batches of an update. Raises `Misuse` if there are not N, or a keyword argument is new."""
        if len(pairs) != self.job.micro_batches and not self.job.numbers:
            raise mistakes.wrong_number_of_pairs(
                program=self.job.name, micro_batches=self.job.micro_batches, pairs=len(pairs)
            )
        listed = pairs if isinstance(pairs, (list, tuple)) else ()
        for micro, pair in enumerate(listed):
            if isinstance(pair, (tuple, list)) and len(pair) in (2, 3):  # what this rank does not use may be anything
                name = f"micro-batch {micro}"
                require_no_graph(pair, name)
                inputs, target, keywords = as_triple(pair, name, self.names if len(pair) == 3 else None)
                if not self.varies:
                    self._require_rows((_unless_empty(inputs), _unless_empty(target), keywords), name)
        self._numbers[update] = len(pairs)
        self._facts.pop(update, None)
        self._kept.pop(update, None)
        self._pairs[update] = pairs.__getitem__
        self._tensors[update] = taken_apart([*listed])[0]

    def is_in_one_piece(self, update: int) -> bool:
        """Whether the mini-batch of an update was given as tensors of all its items, which every rank sees."""
        return isinstance(self._pairs[update], tuple)

    def drop(self, update: int) -> None:
        """Frees the mini-batch of an update."""
        del self._pairs[update], self._numbers[update]
        self._items.pop(update, None)
        self._tensors.pop(update, None)
        self._cut.pop(update, None)
        self._kept.pop(update, None)
        self._checked = None

    def note_versions(self) -> None:
        """Notes the version counters of the tensors in use at the end of a step, for `require_unwritten_batches`."""
        self._versions = {update: versions(tensors) for update, tensors in self._tensors.items()}

    def require_unwritten_batches(self) -> None:
        """Raises `Misuse` if the loop has written a mini-batch in use since the last step ended."""
        for update, before in self._versions.items():
            if versions(self._tensors[update]) != before:
                raise mistakes.mini_batch_was_written(update=update)

    def facts(self, update: int) -> dict[Key, Fact]:
        """Removes and returns the facts about the mini-batch of an update, which ranks of a copy compare.

        They are digests of micro-batch number ``update % N``, if this rank has loaded it, and the position of the
        mini-batch.
        """
        facts = self._facts.pop(update, {})
        for earlier in [number for number in self._facts if number < update]:
            del self._facts[earlier]
        return facts

    def _note_facts(self, update: int, triple: Triple, start: int = 0, count: int | None = None) -> None:
        self._facts[update] = {
            ("data", self.copy, component): sample(digest) for component, digest in digests(triple, start, count)
        }

    def component(self, update: int, micro: int, number: int) -> Any:
        """Cuts inputs, targets or keyword arguments from the mini-batch; ``micro`` counts parts of micro-batches."""
        parts = self.job.parts
        later, place = divmod(micro, self.job.micro_batches * parts)
        update += later
        place += self.start * parts
        uncut, part = divmod(place, parts)
        pairs = self._pairs[update]
        if type(pairs) is not tuple and isinstance(pairs, Batches | CutBatch):
            as_triple((None, None, pairs.keywords(update, place)), "a micro-batch of the dataset", self.names)
            return pairs.component(update, place, number)
        if isinstance(pairs, tuple):  # a mini-batch, which was checked when it came
            cut = self._cut[update]
            if number not in cut:
                cut[number] = micro_batches_of(pairs[number], number, self.size, self._items[update])
            value = cut[number][uncut]
            items = min(self.size, self._items[update] - uncut * self.size)
        else:
            triple = self._loaded(update, pairs, uncut)
            value, items = triple[number], self.size
            if self.varies:
                items = self._items_of(triple)
            else:
                used = [part if place == number else None for place, part in enumerate(triple)]
                self._require_rows((used[0], used[1], used[2] or {}), f"micro-batch {uncut}")
        return value if parts == 1 else self._parts_of(items).part(value, number, part)

    def _loaded(self, update: int, load: Callable[[int], Pair], micro: int) -> Triple:
        """The micro-batch that the user's function makes; the last one is kept, so it is made once for its parts."""
        key = update, load, micro
        if self._checked is not None and self._checked[0] == key:
            return self._checked[1]
        if micro in self._kept.get(update, ()):
            return self._kept[update][micro]
        with _LOADING:
            loaded = load(micro)
        triple = as_triple(loaded, f"micro-batch {micro}", self.names)
        require_no_graph(triple, f"micro-batch {micro}")
        items = self.size
        if self.varies:
            items = self._items_of(triple)
            self._require_parts(items, f"micro-batch {micro}")
        self._parts_of(items).require(triple, f"micro-batch {micro}")
        if micro == update % self._numbers[update] and update not in self._facts:
            self._note_facts(update, triple)
        self._checked = key, triple
        if self.keeps:
            self._kept.setdefault(update, {})[micro] = triple
        return triple

    @property
    def _parts(self) -> MicroBatchParts:
        return self._parts_of(self.size)

    def _parts_of(self, items: int) -> MicroBatchParts:
        return MicroBatchParts(items, self.job.parts, self.job.slices, self.cut_slice, self.job.lengths)

    def _items_of(self, triple: Triple) -> int:
        """The items of a micro-batch; a rank may have given less of what it does not use."""
        return max(lengths(by_item(triple)), default=self.size)

    def _require_rows(self, triple: Triple, name: str) -> None:
        require_rows(triple, self.size, name, mistakes.as_in_example(size=self.size))


def _unless_empty(part: Any) -> Any:
    """None if all tensors have no item, as where a rank gives nothing that it does not use."""
    tensors = taken_apart(part)[0]
    return None if tensors and all(t.dim() and not t.size(0) for t in tensors) else part


def items_of(example: Any) -> int:
    """Micro-batch size B: the items along dimension 0 of an example. Raises `Misuse` if tensors differ in it."""
    if isinstance(example, Batches | CutBatch):
        return example.micro_batch_size
    return length_of(as_triple(example, "the example"), "the example")
