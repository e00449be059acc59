"""Digests of data from a sample of their bytes: enough to see whether two ranks have the same mini-batch."""

import ctypes
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch

from chimera_runtime.values.nested import leaves

_PIECES, _PIECE = 8, 64
"""Number of pieces of a tensor that a digest reads, and bytes of each; a small tensor is read as a whole."""

_SPREAD = 0x9E3779B1
"""An odd number whose multiples, modulo the size of a tensor, are spread as if at random."""

_KINDS = (torch.Tensor, torch.nn.Parameter)


def sampled(value: Any, start: int = 0, count: int | None = None) -> int | None:
    """Returns a digest of the leaves of a value; None if all leaves are None.

    For a tensor of the CPU the digest covers shape, dtype and a few hundred bytes of ``count`` rows from ``start`` on,
    by default of all rows. For a tensor of another device it covers shape and dtype alone: reading bytes would wait for
    the device.
    """
    digest, is_empty = 0, True
    for leaf in leaves(value):
        if leaf is not None:
            is_empty = False
            digest = _of_tensor(leaf, start, count, digest) if isinstance(leaf, torch.Tensor) else _of(leaf, digest)
    return None if is_empty else digest


def _of_tensor(tensor: torch.Tensor, start: int, count: int | None, digest: int) -> int:
    if type(tensor) not in _KINDS or tensor.layout is not torch.strided:
        return crc32(f"{tuple(tensor.shape)}".encode(), digest)
    head, row, pieces = _layout(tensor.shape, tensor.stride(), tensor.dtype, count)
    digest = crc32(head, digest)
    if tensor.is_cpu:
        first = tensor.data_ptr() + start * row
        for offset, size in pieces:
            digest = crc32(ctypes.string_at(first + offset, size), digest)
    return digest


def _of(leaf: Any, digest: int) -> int:
    text = repr(leaf) if isinstance(leaf, bool | int | float | str) else type(leaf).__name__
    return crc32(text.encode(), digest)


@lru_cache(256)
def _layout(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, count: int | None
) -> tuple[bytes, int, tuple[tuple[int, int], ...]]:
    """Returns, for a tensor's layout, a triple: shape and dtype as bytes, bytes from row to row, and pieces to read.

    A piece is a pair (offset, size) in the tensor's memory, in bytes. All its bytes belong to the tensor.
    """
    rows = tuple(shape) if count is None or not shape else (count, *shape[1:])
    head, size = f"{rows} {dtype}".encode(), dtype.itemsize
    row = strides[0] * size if shape else 0
    if 0 in rows:
        return head, row, ()
    # The last dimensions that lie behind each other in memory are one run of `run` elements.
    run, outside = 1, len(rows)
    while outside and (strides[outside - 1] == run or rows[outside - 1] == 1):
        outside -= 1
        run *= rows[outside]
    runs = torch.Size(rows[:outside]).numel()
    if runs == 1 and run * size <= _PIECES * _PIECE:
        return head, row, ((0, run * size),)
    # Pieces are spread over the runs, and within each run.
    length = min(run, max(1, _PIECE // size))
    pieces = []
    for number in range(_PIECES):
        place, offset = number * _SPREAD % runs, number * _SPREAD // runs % (run - length + 1)
        for extent, stride in zip(reversed(rows[:outside]), reversed(strides[:outside]), strict=True):
            place, index = divmod(place, extent)
            offset += index * stride
        pieces.append((offset * size, length * size))
    return head, row, tuple(dict.fromkeys(pieces))
