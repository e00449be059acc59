"""Fingerprints of values of any kind: equal for equal content, in every process."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from hashlib import sha256
from typing import Any

import torch

from chimera_runtime.values.mesh_tensors import local
from chimera_runtime.values.tensors import digest

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LONGEST = 40
"""Most characters of a value that is shown in full."""


def fingerprint(value: Any) -> str:
    """Returns a hash of the content of a value: containers, tensors, arrays, and other objects as pickle stores them.

    It does not depend on the order of a dict or a set, nor on whether two parts of the value are one object.

    Raises `TypeError` if the value has a part that cannot be pickled.
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
    """Yields texts to be hashed: the full name of a function or class, or hashes of the parts of a pickled object."""
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
