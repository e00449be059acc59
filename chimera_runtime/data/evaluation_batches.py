"""Batches of an evaluation, cut into rounds. A round is one pass of micro-batches through the pipes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from chimera_runtime.blame import UserCode
from chimera_runtime.data.mini_batch import (
    CutSlice,
    MicroBatchParts,
    MiniBatch,
    Triple,
    as_triple,
    by_item,
    length_of,
    require_cut,
    rows_of,
)
from chimera_runtime.errors import FAILED, Misuse
from chimera_runtime.errors import data as mistakes
from chimera_runtime.program.job import Job
from chimera_runtime.values.boundary import KeywordNames
from chimera_runtime.values.nested import lengths

_BATCH = "a batch of an evaluation"
_LOADING = UserCode("the function that gives the micro-batches of an evaluation", FAILED)


@dataclass(frozen=True)
class EvaluationBatch:
    """The micro-batches of one round: ``sizes`` in items, 0 if absent; ``load(m)`` returns the triple of m."""

    sizes: Sequence[int]
    load: Callable[[int], Triple]


def evaluation_batches(
    job: Job, size: int, batch: Any, names: KeywordNames | None = None, cut_slice: CutSlice | None = None
) -> Iterator[EvaluationBatch]:
    """Yields the rounds of an evaluation, into which a batch of any size is cut; a micro-batch has ``size`` items.

    The batch is a pair of inputs and targets with any number of items in dimension 0; or a function from the number of
    a micro-batch to a pair with ``size`` items, for one round; or a mini-batch of a `Loader`.

    Raises `Misuse` if the batch is none of these, has keyword arguments without ``names``, or cannot be cut.
    """
    parts, count = MicroBatchParts(size, job.parts, job.slices, cut_slice, job.lengths), job.evaluated * job.row_parts
    part_size = parts.items_of_part

    def sizes_of(items: int) -> tuple[int, ...]:
        rows_of_parts = [max(0, min(part_size, items - part_size * place)) for place in range(count)]
        return tuple([rows_of_part for rows_of_part in rows_of_parts for _ in range(job.slices)])

    def cut(triple: Triple, start: int, micro: int, size: int) -> Triple:
        """Returns ``size`` rows from ``start`` on or, if sequences are cut, slice number ``micro`` of them."""
        items = [rows_of(value, i, start, size) for i, value in enumerate(triple)]
        if job.slices > 1 and size:
            items = [parts.part(value, i, micro % job.slices) for i, value in enumerate(items)]
        return items[0], items[1], items[2]

    def round_of(start: int, sizes: Sequence[int]) -> EvaluationBatch:
        return EvaluationBatch(
            sizes, lambda micro: cut(batch, start + part_size * (micro // job.slices), micro, sizes[micro])
        )

    if callable(batch):
        items = batch.items if isinstance(batch, MiniBatch) else None

        def load(micro: int) -> Triple:
            return _loaded(batch, size, micro, names) if items is None else as_triple(batch(micro), _BATCH, names)

        def part(start: int, sizes: Sequence[int], micro: int) -> Any:
            triple = load(start + micro // job.parts)
            _require(triple, max(lengths(by_item(triple)), default=0) if job.row_parts > 1 else None, parts)
            return cut(triple, micro % job.parts // job.slices * part_size, micro, sizes[micro])

        for start in range(0, 1 if items is None else max(1, -(-items // size)), job.evaluated):
            sizes = sizes_of(part_size * count if items is None else items - start * size)
            yield EvaluationBatch(sizes, partial(part, start, sizes))
        return
    batch = as_triple(batch, _BATCH, names)
    items = _items(batch)
    _require(batch, items if items > part_size else None, parts)
    for start in range(0, items, part_size * count):
        yield round_of(start, sizes_of(items - start))


def _require(batch: Triple, cut: int | None, parts: MicroBatchParts) -> None:
    if cut is not None:
        require_cut(batch, cut, _BATCH)
    if parts.slices > 1:
        parts.require(batch, _BATCH)


def _loaded(load: Callable[[int], Any], size: int, number: int, names: KeywordNames | None) -> Triple:
    with _LOADING:
        loaded = load(number)
    batch = as_triple(loaded, _BATCH, names)
    if _items(batch) != size:
        raise mistakes.evaluated_micro_batch_has_another_size(micro=number, items=_items(batch), size=size)
    return batch


def _items(batch: Triple) -> int:
    items = length_of(batch, _BATCH)
    if not items:
        raise Misuse(mistakes.EVALUATION_BATCH_IS_EMPTY)
    return items
