"""Facts of the data that a rank is given, which the ranks of a copy compare."""

from collections.abc import Iterator
from typing import Any

from chimera_runtime.data.loading import POSITION as NAMES
from chimera_runtime.data.loading import MiniBatch, Triple, as_triple
from chimera_runtime.ranks.agreement import POSITION, Fact, Key, short
from chimera_runtime.values.byte_samples import sampled


def position(numbers: tuple[int, ...]) -> Fact:
    """Where a mini-batch of a loader begins."""
    return short(hash(numbers)), lambda: {name: f"{value}" for name, value in zip(NAMES, numbers, strict=False)}


def sample(digest: int) -> Fact:
    """What a part of a batch holds."""
    return short(digest), lambda: {"a digest of a sample": f"{digest:x}"}


def digests(triple: Triple, start: int = 0, count: int | None = None) -> Iterator[tuple[int, int]]:
    """The number and a digest of each part of a batch that is there; see `samples.sampled`."""
    for which, part in enumerate(triple):
        if (which < 2 or part) and (digest := sampled(part, start, count)) is not None:
            yield which, digest


class EvaluationDataFacts:
    """The batches of an evaluation."""

    def __init__(self, copy: int) -> None:
        self._copy = copy
        self._count = 0
        self._counts = [0, 0, 0]
        self._digests = [0, 0, 0]
        self._positions: list[tuple[int, ...]] = []

    def look(self, batch: Any) -> Any:
        """Takes down what ranks compare of a batch, and returns it."""
        self._count += 1
        if isinstance(batch, MiniBatch):
            self._positions.append(batch.position)
        elif not callable(batch):
            for which, digest in digests(as_triple(batch, "a batch of an evaluation")):
                self._counts[which] += 1
                self._digests[which] = short(hash((self._digests[which], digest)))
        return batch

    def facts(self) -> dict[Key, Fact]:
        """The facts of all of them together: of the parts that each has, or of the positions if each has one."""
        facts: dict[Key, Fact] = {
            ("data", self._copy, which): sample(self._digests[which])
            for which, count in enumerate(self._counts)
            if count == self._count > 0
        }
        if self._positions and len(self._positions) == self._count:
            facts[POSITION] = short(hash((*self._positions,))), position(self._positions[-1])[1]
        return facts
