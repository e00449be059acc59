"""Mini-batches as a training loop has them, taken apart into micro-batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.data.batches import Batches
from chimera_runtime.data.loading import MiniBatch, Triple, as_triple, require_cut
from chimera_runtime.data.mini_batch_facts import digests, position, sample
from chimera_runtime.errors import FAILED, Misuse
from chimera_runtime.program.job import Job
from chimera_runtime.ranks.agreement import POSITION, Fact, Key
from chimera_runtime.values.aliases import versions
from chimera_runtime.values.keywords import KeywordNames, Keywords
from chimera_runtime.values.nested import leaves, lengths, rows, taken_apart
from chimera_runtime.values.tensors import Tensors

Pair = tuple[Any, Any] | Triple
"""An input and a target, as pytrees; as a third there may be keyword arguments."""

_LOADING = UserCode("the function that was given to step", FAILED)


@dataclass
class Feed:
    """The mini-batches of this copy that are under way, by their update.

    ``size`` is B, the items of a micro-batch along dimension 0 of every tensor; ``copy`` is the number of the copy.
    ``names`` are those of keyword arguments, once the stages have said which they take.
    """

    job: Job
    size: int
    copy: int = 0
    names: KeywordNames | None = None
    _pairs: "dict[int, Callable[[int], Pair] | Batches | _WholeMiniBatch]" = field(default_factory=dict)
    _facts: dict[int, dict[Key, Fact]] = field(default_factory=dict)
    _tensors: dict[int, Tensors] = field(default_factory=dict)
    _versions: dict[int, list[int]] = field(default_factory=dict)

    def put(self, update: int, batch: Any) -> None:
        """Takes the mini-batch of an update in one of the forms of `Pipeline.step`.

        Raises
        ------
        Misuse
            If it is none of these, has another number of items than B*N or other keyword arguments than the example,
            or holds something that cannot be cut into micro-batches.
        """
        self._facts.pop(update, None)
        self._tensors.pop(update, None)
        if isinstance(batch, MiniBatch):
            batch.require_whole()
            self._facts[update] = {POSITION: position(batch.position)}
        if callable(batch) or isinstance(batch, Batches):
            self._pairs[update] = batch
        else:
            triple = as_triple(batch, "a batch")
            self._require_names(triple, "a batch")
            self._pairs[update] = _WholeMiniBatch(triple, self.size, self.job.micro_batches, self.job.parts)
            self._tensors[update] = taken_apart(triple)[0]
            self._note(update, triple, self._looked_at(update) * self.size)

    def put_example(self, example: "Pair | Batches") -> None:
        """Takes what the first update is to begin with: one micro-batch, or all that there are; errors as in `put`."""
        if not isinstance(example, Batches):
            triple = as_triple(example, "the example")
            if self.job.parts > 1:
                require_cut(triple, self.size, "the example")
        self._pairs[0] = example if isinstance(example, Batches) else lambda _micro: example

    def put_micro_batches(self, update: int, pairs: Sequence[Pair]) -> None:
        """Takes the micro-batches of an update.

        Raises
        ------
        Misuse
            If they are not N, or one has a keyword argument that the example lacks.
        """
        if len(pairs) != self.job.micro_batches:
            raise Misuse(
                f"{self.job.name} has N = {self.job.micro_batches}: a step takes so many pairs, not {len(pairs)}"
            )
        for micro, pair in enumerate(pairs if isinstance(pairs, (list, tuple)) else ()):
            if isinstance(pair, tuple) and len(pair) == 3:  # what this rank does not use may be anything
                self._require_names(as_triple(pair, f"micro-batch {micro}"), f"micro-batch {micro}")
        self._facts.pop(update, None)
        self._pairs[update] = pairs.__getitem__
        self._tensors[update] = taken_apart([*pairs] if isinstance(pairs, (list, tuple)) else [])[0]

    def drop(self, update: int) -> None:
        """Lets a mini-batch go."""
        del self._pairs[update]
        self._tensors.pop(update, None)

    def hold(self) -> None:
        """The step ends: the mini-batches that are still under way must not be written before the next."""
        self._versions = {update: versions(tensors) for update, tensors in self._tensors.items()}

    def require_unwritten_batches(self) -> None:
        """Passes if the mini-batches under way are as they were when the last step ended.

        Raises
        ------
        Misuse
            If the loop has written one.
        """
        for update, before in self._versions.items():
            if versions(self._tensors[update]) != before:
                raise Misuse(
                    f"the mini-batch of update {update} was written after its step, and is still under way; give each "
                    "step tensors of its own, as .clone() makes them"
                )

    def facts(self, update: int) -> dict[Key, Fact]:
        """What the ranks of a copy compare of a mini-batch, once: of a micro-batch, the digests of its parts.

        It is another one in each update, of those that this rank has been given so far.
        """
        facts = self._facts.pop(update, {})
        for earlier in [number for number in self._facts if number < update]:
            del self._facts[earlier]
        return facts

    def _looked_at(self, update: int) -> int:
        """The micro-batch that ranks compare."""
        return update % self.job.micro_batches

    def _note(self, update: int, triple: Triple, start: int = 0) -> None:
        """Takes down what the ranks compare of the micro-batch that starts there, before anything can change it."""
        self._facts[update] = {
            ("data", self.copy, which): sample(digest) for which, digest in digests(triple, start, self.size)
        }

    def input(self, update: int, micro: int) -> Any:
        """The inputs of a micro-batch, counted from the first of an update."""
        return self._part(update, micro, 0)

    def target(self, update: int, micro: int) -> Any:
        """The targets of a micro-batch, counted from the first of an update."""
        return self._part(update, micro, 1)

    def keywords(self, update: int, micro: int) -> Keywords:
        """The keyword arguments of a micro-batch, counted from the first of an update."""
        keywords: Keywords = self._part(update, micro, 2)
        return keywords

    def _part(self, update: int, micro: int, which: int) -> Any:
        later, number = divmod(micro, self.job.passes)
        whole, part = divmod(number, self.job.parts)
        pairs = self._pairs[update + later]
        if isinstance(pairs, Batches):
            self._require_names((None, None, pairs.keywords(update + later, number)), "a micro-batch of the dataset")
            return (pairs.input, pairs.target, pairs.keywords)[which](update + later, number)
        if isinstance(pairs, _WholeMiniBatch):
            value = pairs.part(whole, which)
        else:
            with _LOADING:
                loaded = pairs(whole)
            triple = as_triple(loaded, "a batch")
            self._require_names(triple, f"micro-batch {whole}")
            if self.job.parts > 1:
                require_cut(triple, self.size, f"micro-batch {whole}")
            if whole == self._looked_at(update + later) and update + later not in self._facts:
                self._note(update + later, triple)
            value = triple[which]
            if wrong := next(_other_sizes(value, self.size), None):
                raise Misuse(
                    f"micro-batch {whole}: dimension 0 of a tensor is {wrong}, and was {self.size} in the example"
                )
        size = self.size // self.job.parts
        return value if self.job.parts == 1 else rows(value, part * size, size)

    def _require_names(self, triple: Triple, what: str) -> None:
        if self.names is not None:
            self.names.require(triple[2], what)


class _WholeMiniBatch:
    """The micro-batches of a mini-batch in one piece."""

    def __init__(self, batch: Triple, size: int, count: int, parts: int) -> None:
        if count * parts > 1:
            require_cut(batch, size * count, "a batch")
        if wrong := next(_other_sizes(batch, size * count), None):
            raise Misuse(
                f"dimension 0 of a tensor of the mini-batch is {wrong}, and a step takes B*N = {size}*{count} = "
                f"{size * count} on every rank: micro-batches as large as the example"
            )
        self._batch = batch
        self._size = size

    def part(self, micro: int, which: int) -> Any:
        """The inputs of a micro-batch, its targets or its keyword arguments."""
        return rows(self._batch[which], micro * self._size, self._size)


def _other_sizes(value: Any, size: int) -> Iterator[int]:
    """Of tensors with another number of items: how many they have."""
    for leaf in leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.size(0) != size:
            yield leaf.size(0)


def items_of(example: Any) -> int:
    """B: the items along dimension 0 of an example's tensors.

    Raises
    ------
    Misuse
        If it has no tensor with a dimension 0, or tensors that differ in it.
    """
    if isinstance(example, Batches):
        return example.micro_batch_size
    sizes = lengths(example)
    if len(sizes) != 1:
        said = f"tensors with {' and '.join(map(str, sorted(sizes)))} there" if sizes else "no tensor"
        raise Misuse(f"the example is to be one micro-batch (input, target), items in dimension 0, and has {said}")
    return sizes.pop()
