"""``--eval-every K``: mean loss over the held-out items of ``validation``, every K updates and at the end."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from chimera_runtime.blame import UserCode
from chimera_runtime.data.mini_batch import ItemLoading, Triple
from chimera_runtime.errors import MISUSED, Misuse
from chimera_runtime.errors import tools as mistakes
from chimera_runtime.evaluate.evaluation import EvaluationLoss
from chimera_runtime.model.model import ModelFile
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.program.job import Job, Place
from chimera_runtime.values.tensors import generators_kept

_COUNTING = UserCode("the length of validation()", MISUSED)
_EPOCH = -1
"""Epoch of the random numbers for held-out items; the training has none of this number."""


class Validation:
    """Evaluates the held-out items, each once; copy c of W has items c, c + W, ..

    Without ``--eval-every`` it is never due.

    Raises `Misuse` if the model file has no ``validation``, or ``validation`` does not return a map-style dataset with
    an item.
    """

    def __init__(self, model: ModelFile, options: argparse.Namespace, job: Job, place: Place) -> None:
        self._every: int | None = options.eval_every
        self._updates: int = options.steps
        self._size: int = options.micro_batch_size
        self._round = self._size * job.evaluated
        self._items: Sequence[int] = ()
        if self._every is None:
            return
        if model.validation is None:
            raise mistakes.validation_is_missing(f"{model.file}")
        dataset = model.held_out()
        with _COUNTING:
            is_map = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
            length = len(dataset) if is_map else 0
        if not length:
            raise Misuse(mistakes.VALIDATION_IS_NOT_MAP_STYLE)
        self._items = range(place.copy, length, place.copies)
        self._loading = ItemLoading(dataset, options.seed, model.collate, "validation()")

    def is_due(self, updates: int) -> bool:
        """Whether to evaluate after ``updates`` updates; the same on every rank."""
        return self._every is not None and (updates % self._every == 0 or updates == self._updates)

    def loss(self, pipe: Pipeline) -> EvaluationLoss:
        """Mean loss with the current weights; every rank calls it. Errors as of `Pipeline.evaluate`."""
        return pipe.evaluate(self._batches())

    def _batches(self) -> Iterator[Any]:
        """Yields the held-out items in rounds of an evaluation; items that fill no whole round come last, as one batch.

        Of a round a rank loads only the micro-batches that it needs; the last batch is loaded by all ranks.
        """
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
