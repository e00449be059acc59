"""Fingerprints of values of any kind: equal for equal content, in every process."""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from hashlib import sha256
from typing import Any
from zlib import crc32

import torch

from chimera_runtime.values.mesh_tensors import local
from chimera_runtime.values.nested import digest, leaves

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type for each number of bytes."""


# Digests of data from a sample of their bytes: enough to see whether two ranks have the same mini-batch.

_PIECES, _PIECE = 8, 64
"""Number of pieces of a tensor that a digest reads, and bytes of each; a small tensor is read as a whole."""

_SPREAD = 0x9E3779B1
"""An odd number whose multiples, modulo the size of a tensor, are spread as if at random."""

_KINDS = (torch.Tensor, torch.nn.Parameter)


def sampled(value: Any, start: int = 0, count: int | None = None) -> int | None:
    """Returns a digest of the leaves of a value; None if all leaves are None.

    For a tensor of the CPU the digest covers shape, dtype and a few hundred bytes of ``count`` rows from ``start`` on,
    by default of all rows; elsewhere shape and dtype alone, as reading bytes would wait for the device.
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
    """Returns shape and dtype as bytes, bytes from row to row, and the pieces to read: (offset, size) in bytes."""
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


_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LONGEST = 40
"""Most characters of a value that is shown in full."""


def fingerprint(value: Any) -> str:
    """Returns a hash of the content of a value: containers, tensors, arrays, and other objects as pickle stores them.

    It depends neither on the order of a dict or a set, nor on whether two parts of the value are one object.
    """
    return _hash(value, ())


def shown(value: Any) -> str:
    """Returns a value for a message: as Python writes it if that is short, else its type and part of its hash."""
    text = repr(value) if isinstance(value, _PLAIN) else ""
    return text if 0 < len(text) <= _LONGEST else f"{type(value).__name__} {fingerprint(value)[:8]}"


def _hash(value: Any, outer: tuple[int, ...]) -> str:
    """Hash of a value; ``outer`` has the ids of the objects around it, so that a cycle ends."""
    if isinstance(value, _PLAIN):
        return _joined(type(value).__name__, repr(value))
    if id(value) in outer:
        return _joined("outer", f"{outer[::-1].index(id(value))}")
    within = (*outer, id(value))
    if isinstance(value, torch.Tensor):
        return _joined("tensor", f"{value.dtype} {tuple(value.shape)}", "" if value.is_meta else digest([local(value)]))
    if hasattr(value, "__array_interface__") and not value.dtype.hasobject:
        return _joined("array", f"{value.dtype} {value.shape}", value.tobytes().hex())
    if isinstance(value, Mapping):
        return _joined("map", *sorted(_hash(k, within) + _hash(v, within) for k, v in value.items()))
    if isinstance(value, Set):
        return _joined("set", *sorted(_hash(part, within) for part in value))
    if isinstance(value, Sequence):
        return _joined("list", *(_hash(part, within) for part in value))
    return _joined(*_parts(value, within))


def _parts(value: Any, within: tuple[int, ...]) -> Iterator[str]:
    if isinstance(value, type | Callable) and hasattr(value, "__qualname__"):
        yield f"{value.__module__}.{value.__qualname__}"
        return
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        yield f"{type(value).__module__}.{reduced}"
        return
    for part in reduced:
        yield _hash(list(part) if isinstance(part, Iterator) else part, within)


def _joined(*parts: str) -> str:
    bits = sha256()
    for part in parts:
        encoded = part.encode(errors="surrogatepass")
        bits.update(b"%d:" % len(encoded) + encoded)
    return bits.hexdigest()
