"""``--eval-every K``: the mean loss over the held-out items of ``validation``, every K updates and at the end."""

from collections.abc import Iterator, Sequence
from typing import Any

from chimera_runtime.blame import UserCode
from chimera_runtime.data.mini_batch import ItemLoading, Triple
from chimera_runtime.errors import MISUSED, Misuse
from chimera_runtime.model.model import ModelFile
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.program.job import Job, Place
from chimera_runtime.values.tensors import generators_kept

_COUNTING = UserCode("the length of validation()", MISUSED)
_EPOCH = -1
"""Of what is drawn for held-out items: none of the training's."""


class Validation:
    """Every item counts once, whatever their number; copy c of W has items c, c + W, ..

    Parameters
    ----------
    every
        After how many updates they are evaluated, None if never.
    updates
        After how many they are evaluated as well: the last.
    size
        B, the items of a micro-batch.

    Raises
    ------
    Misuse
        If the model file has no ``validation``, or that returns no map-style dataset with an item.
    """

    def __init__(
        self, model: ModelFile, every: int | None, updates: int, size: int, job: Job, place: Place, seed: int
    ) -> None:
        self._every = every
        self._updates = updates
        self._size = size
        self._round = size * job.evaluated
        self._items: Sequence[int] = ()
        if every is None:
            return
        if model.validation is None:
            raise Misuse(
                f"--eval-every: {model.file} has no function validation() -> torch.utils.data.Dataset, with held-out "
                "items like those of dataset()"
            )
        dataset = model.held_out()
        with _COUNTING:
            is_map = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
            length = len(dataset) if is_map else 0
        if not length:
            raise Misuse("validation() must return a map-style dataset, one with __len__ and __getitem__, with an item")
        self._items = range(place.copy, length, place.copies)
        self._loading = ItemLoading(dataset, seed, model.collate, "validation()")

    def is_due(self, updates: int) -> bool:
        """Whether it is time to evaluate, after so many updates: the same on every rank."""
        return self._every is not None and (updates % self._every == 0 or updates == self._updates)

    def loss(self, pipe: Pipeline) -> float:
        """The mean loss on the weights as they are; every rank calls it. Errors as of `Pipeline.evaluate`."""
        return pipe.evaluate(self._batches())

    def _batches(self) -> Iterator[Any]:
        """Whole rounds, of which a rank loads the micro-batches that it needs, then what is left, which all load."""
        whole = len(self._items) // self._round * self._round
        for start in range(0, whole, self._round):
            yield lambda micro, start=start: self._load(start + micro * self._size, self._size)
        if rest := len(self._items) - whole:
            with generators_kept():
                last = self._load(whole, rest)
            yield last

    def _load(self, start: int, count: int) -> Triple:
        items = self._items[start : start + count]
        return self._loading.collated(self._loading.items(_EPOCH, items), _EPOCH, start, items)
