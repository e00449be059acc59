"""Facts about the data that a training loop gives to the ranks of a copy, which compare them: see `agreement`."""

from collections.abc import Iterator
from typing import Any

from chimera_runtime.data.mini_batch import POSITION_NAMES, MiniBatch, Triple, as_triple
from chimera_runtime.ranks.agreement import POSITION, Fact, Key, short
from chimera_runtime.values.sampled_digests import sampled


def position(numbers: tuple[int, ...]) -> Fact:
    """Returns as a fact the position in the data at which a loader's mini-batch begins."""
    return short(hash(numbers)), lambda: {
        name: f"{value}" for name, value in zip(POSITION_NAMES, numbers, strict=False)
    }


def sample(digest: int) -> Fact:
    """Returns as a fact the digest of a sample of the values in inputs, targets or keyword arguments."""
    return short(digest), lambda: {"a digest of a sample": f"{digest:x}"}


def digests(triple: Triple, start: int = 0, count: int | None = None) -> Iterator[tuple[int, int]]:
    """Yields number and digest (see `sampled`) of inputs, targets and keyword arguments, if they are not absent."""
    for component, part in enumerate(triple):
        if (component < 2 or part) and (digest := sampled(part, start, count)) is not None:
            yield component, digest


class EvaluationDataFacts:
    """Collector of the facts about all batches of an evaluation, which the ranks of a copy compare."""

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
        """Returns the facts of all batches together: for each part that all have, and for positions if all have one."""
        facts: dict[Key, Fact] = {
            ("data", self._copy, component): sample(self._digests[component])
            for component, count in enumerate(self._counts)
            if count == self._count > 0
        }
        if self._positions and len(self._positions) == self._count:
            facts[POSITION] = short(hash((*self._positions,))), position(self._positions[-1])[1]
        return facts
