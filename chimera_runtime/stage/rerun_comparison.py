"""Comparison of the two runs of a recomputed forward.

If the first run is over one micro-batch, the second must give the same bits. If the first run is over several
micro-batches, there is a second run for each of them alone, which may round differently: then samples are compared with
a tolerance, and the comparison finds items that influence each other.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from chimera_runtime.errors import BadModel
from chimera_runtime.errors import stage as mistakes
from chimera_runtime.ranks.device_to_host import Numbers, Reader
from chimera_runtime.values.mesh_tensors import local
from chimera_runtime.values.nested import rows
from chimera_runtime.values.tensors import plain

_AT_FIRST, _EVERY = 3, 100

_BLOCK = 2**20
"""Numbers that a digest takes at once, in eight bytes each."""

_SAMPLE = 4096
"""Largest number of values of a tensor in a sample."""

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 5e-3}
"""Largest relative difference of two samples, by the coarsest dtype of outputs and weights; 5e-2 for half precision."""

_FACTOR = 0x9E3779B97F4A7C1

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type for each number of bytes."""


def in_some(update: int) -> bool:
    """Whether an update is one of the first 3, or its number a multiple of 100: by default these are compared."""
    return update < _AT_FIRST or update % _EVERY == 0


class ForwardDigest(NamedTuple):
    """Short form of a forward's result for one micro-batch.

    ``kinds`` has shape and dtype of each tensor of the result. ``numbers`` has for each tensor a hash of all bits or,
    to compare with a tolerance, a sample of the elements.
    """

    kinds: list[tuple[tuple[int, ...], torch.dtype]]
    numbers: list[torch.Tensor]


class RerunComparison:
    """Comparisons of the two runs of a stage's forwards.

    ``dtypes`` are those of the stage's weights; ``read`` reads the results of comparisons from the device."""

    def __init__(self, stage: int, dtypes: Iterable[torch.dtype], read: Reader) -> None:
        self._stage = stage
        self._dtypes = frozenset(dtypes)
        self._read = read
        self._open: dict[int, list[tuple[BadModel, Numbers]]] = {}

    def compare(self, update: int, micro: int, count: int, first: ForwardDigest, second: ForwardDigest) -> None:
        """Begins to compare the two runs of a forward. The first run was over ``count`` micro-batches.

        Raises `BadModel` on the CPU if the runs differ. On a GPU the result is known later, and `check` raises it.
        """
        if count == 1:
            error = mistakes.second_run_differs(self._stage, micro, update + 1)
        else:
            error = mistakes.items_influence_each_other(self._stage, micro, update + 1, count - 1)
        if first.kinds != second.kinds:
            raise error
        if not first.numbers:
            return
        if count == 1:
            differ = (torch.stack(first.numbers) != torch.stack(second.numbers)).any()
        else:
            differ = torch.stack([*map(self._far, first.kinds, first.numbers, second.numbers)]).any()
        self._open.setdefault(update, []).append((error, self._read([differ])))
        if differ.device.type == "cpu":
            self.check(update)

    def check(self, update: int) -> None:
        """Reads the comparisons of an update; errors as in `compare`."""
        for error, numbers in self._open.pop(update, ()):
            if any(numbers()):
                raise error

    def _far(
        self, kind: tuple[tuple[int, ...], torch.dtype], first: torch.Tensor, second: torch.Tensor
    ) -> torch.Tensor:
        """Whether two samples of a tensor of this ``kind``, shape and dtype, differ by more than rounding explains.

        Differences that are NaN count as 0.
        """
        dtypes = {dtype for dtype in {kind[1], *self._dtypes} if dtype.is_floating_point or dtype.is_complex}
        tolerance = max(_TOLERANCES.get(dtype.to_real(), 5e-2) for dtype in dtypes)
        difference = (first - second).nan_to_num(0.0).abs().square().sum()
        return difference > tolerance**2 * first.nan_to_num(0.0).abs().square().sum()


def whole(tensors: Iterable[torch.Tensor]) -> ForwardDigest:
    """Returns the digest of a forward over one micro-batch, for a comparison bit by bit."""
    compared = _comparable(tensors)
    return ForwardDigest([_kind(t) for t in compared], [*map(digest, compared)])


def parts(tensors: Iterable[torch.Tensor], count: int) -> Iterator[ForwardDigest]:
    """Yields a digest with samples for each micro-batch of a forward over ``count`` micro-batches."""
    compared = _comparable(tensors)
    for number in range(count):
        yield sampled([rows(t, number * (len(t) // count), len(t) // count) for t in compared])


def sampled(tensors: Iterable[torch.Tensor]) -> ForwardDigest:
    """Returns a digest with samples of a forward over one micro-batch, to compare with one of the `parts`."""
    compared = [t for t in _comparable(tensors) if t.is_floating_point() or t.is_complex()]
    return ForwardDigest([_kind(t) for t in compared], [*map(_sample, compared)])


def _comparable(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the dense tensors on the device of the first of them; of spread tensors, this rank's part."""
    with_values = [t for t in map(local, tensors) if t.layout == torch.strided and not t.is_meta and not t.is_quantized]
    return [t for t in with_values if t.device == with_values[0].device]


def _kind(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    numbers = tensor.reshape(-1)
    sample = numbers[:: -(-numbers.numel() // _SAMPLE) or 1]
    return sample.to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of the bits of a tensor, in the order of its memory if that has no gaps; computed on its device."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    numbers = plain(torch.view_as_real(tensor) if tensor.is_complex() else tensor.permute(order)).reshape(-1)
    bits = numbers.view(INTEGERS[numbers.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _BLOCK):
        block = bits[start : start + _BLOCK].long()
        places = _mixed(torch.arange(1, block.numel() + 1, device=tensor.device))
        total = total * _FACTOR + (_mixed(block) * (places | 1)).sum()
    return total


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Mixes the bits of numbers, so that each depends on many others."""
    numbers = numbers * _FACTOR
    return (numbers ^ (numbers >> 15)) * _FACTOR


IsCompared = Callable[[int], bool]
"""Function that says whether the forwards of an update are compared; updates are counted from the start of the run."""
