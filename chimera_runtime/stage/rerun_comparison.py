"""Compares what a forward gives that is run again with what it gave first.

A forward over one micro-batch gives the same bits again. One over several at once, of which each is run again alone,
may round differently there: then a sample is compared with a tolerance, which finds items that influence each other.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from chimera_runtime.errors import BadModel
from chimera_runtime.ranks.readout import Numbers, Reader
from chimera_runtime.values.nested import rows
from chimera_runtime.values.shards import local
from chimera_runtime.values.tensors import plain

_AT_FIRST, _EVERY = 3, 100

_BLOCK = 2**20
"""How many numbers a digest takes at once, each in eight bytes."""

_SAMPLE = 4096
"""How many numbers of a tensor are compared where the first forward was over several micro-batches."""

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 5e-3}
"""How large the difference of two samples may be, as a part of the first, by the coarsest dtype of outputs and weights.

Other dtypes have eight or eleven digits: 5e-2.
"""

_FACTOR = 0x9E3779B97F4A7C1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

CAUSES = (
    "a stage that recomputes may depend on its inputs, its weights, what its module holds, and the generators of torch "
    "(those of Python and NumPy only if it draws from them for the first micro-batch, too), but on no clock, file or "
    "global, and its kernels must be deterministic (torch.use_deterministic_algorithms(True)); mend that, or compile "
    "without recomputation"
)
"""What may be behind a difference, and what to do."""


def in_some(update: int) -> bool:
    """Whether forwards of an update are compared, counted from the start of the run: of the first 3, of every 100th."""
    return update < _AT_FIRST or update % _EVERY == 0


def in_all(_update: int) -> bool:
    """Always: for a check."""
    return True


def in_none(_update: int) -> bool:
    """Never: where time is measured, or a forward that is run again is given something else."""
    return False


class ForwardDigest(NamedTuple):
    """What a forward gave for a micro-batch, in short: digests, or samples where it was over several at once."""

    kinds: list[tuple[tuple[int, ...], torch.dtype]]
    numbers: list[torch.Tensor]


class RerunComparison:
    """The comparisons of a stage; ``read`` is how their results are read, ``dtypes`` are those of the weights."""

    def __init__(self, stage: int, dtypes: Iterable[torch.dtype], read: Reader) -> None:
        self._stage = stage
        self._dtypes = frozenset(dtypes)
        self._read = read
        self._pending: dict[int, list[tuple[str, Numbers]]] = {}

    def compare(self, update: int, micro: int, of: int, first: ForwardDigest, second: ForwardDigest) -> None:
        """Begins to compare two forwards of a micro-batch, of which the first was over ``of`` micro-batches.

        Raises
        ------
        BadModel
            If it is known at once that they differ, as it is on the CPU.
        """
        said = self._said(update, micro, of)
        if first.kinds != second.kinds:
            raise BadModel(said)
        if not first.numbers:
            return
        if of == 1:
            differ = (torch.stack(first.numbers) != torch.stack(second.numbers)).any()
        else:
            differ = torch.stack([*map(self._far, first.kinds, first.numbers, second.numbers)]).any()
        self._pending.setdefault(update, []).append((said, self._read([differ])))
        if differ.device.type == "cpu":
            self.check(update)

    def check(self, update: int) -> None:
        """Reads the comparisons of an update; errors as in `compare`."""
        for said, numbers in self._pending.pop(update, ()):
            if any(numbers()):
                raise BadModel(said)

    def _far(
        self, kind: tuple[tuple[int, ...], torch.dtype], first: torch.Tensor, second: torch.Tensor
    ) -> torch.Tensor:
        """Whether two samples differ by more than rounding; what is no number in both is passed over."""
        known = {dtype for dtype in {kind[1], *self._dtypes} if dtype.is_floating_point or dtype.is_complex}
        tolerance = max(_TOLERANCES.get(dtype.to_real(), 5e-2) for dtype in known)
        difference = (first - second).nan_to_num(0.0).abs().square().sum()
        return difference > tolerance**2 * first.nan_to_num(0.0).abs().square().sum()

    def _said(self, update: int, micro: int, of: int) -> str:
        place = f"for micro-batch {micro} of update {update + 1}"
        if of == 1:
            return (
                f"stage {self._stage} gives something else {place} when its forward is run again for the backward, so "
                f"that gradients would be wrong: {CAUSES}"
            )
        return (
            f"stage {self._stage} gives something else {place} alone than together with {of - 1} other"
            f"{'s' if of > 2 else ''}, by more than rounding, so that gradients would be wrong: its items influence "
            "each other across dimension 0, as by batch statistics or a softmax over it, or it depends on how many "
            "there are; let each item be computed by itself, or compile a scheme whose forwards are over one "
            f"micro-batch each. If that is not so: {CAUSES}"
        )


def whole(tensors: Iterable[torch.Tensor]) -> ForwardDigest:
    """What a forward over one micro-batch gave."""
    compared = _comparable(tensors)
    return ForwardDigest([_kind(t) for t in compared], [*map(digest, compared)])


def parts(tensors: Iterable[torch.Tensor], count: int) -> Iterator[ForwardDigest]:
    """The same of a forward over several, for each of them."""
    compared = _comparable(tensors)
    for number in range(count):
        yield sampled([rows(t, number * (len(t) // count), len(t) // count) for t in compared])


def sampled(tensors: Iterable[torch.Tensor]) -> ForwardDigest:
    """What a forward over one micro-batch gave, to be compared with a part of one over several."""
    compared = [t for t in _comparable(tensors) if t.is_floating_point() or t.is_complex()]
    return ForwardDigest([_kind(t) for t in compared], [*map(_sample, compared)])


def _comparable(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Of tensors those with values, without a graph, on the device of the first of them."""
    here = [t for t in map(local, tensors) if t.layout == torch.strided and not t.is_meta and not t.is_quantized]
    return [t for t in here if t.device == here[0].device]


def _kind(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    numbers = tensor.reshape(-1)
    sample = numbers[:: -(-numbers.numel() // _SAMPLE) or 1]
    return sample.to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of a tensor's bits, in the order of its memory where that has no gaps; computed on its device."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    numbers = plain(torch.view_as_real(tensor) if tensor.is_complex() else tensor.permute(order)).reshape(-1)
    bits = numbers.view(_BITS[numbers.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _BLOCK):
        block = bits[start : start + _BLOCK].long()
        places = _mixed(torch.arange(1, block.numel() + 1, device=tensor.device))
        total = total * _FACTOR + (_mixed(block) * (places | 1)).sum()
    return total


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers each of whose bits depends on many of the old ones."""
    numbers = numbers * _FACTOR
    return (numbers ^ (numbers >> 15)) * _FACTOR


IsCompared = Callable[[int], bool]
"""Whether the forwards of an update are compared."""
