"""Tensors of micro-batches, their digests, and the seeds of random numbers."""

import ctypes
import math
import pickle
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b, sha256
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]


def part(tensors: Tensors, start: int, stop: int, of: int) -> Tensors:
    """Returns the rows of micro-batches ``start .. stop-1`` from tensors that hold ``of`` micro-batches."""
    return tuple(t.narrow(0, start * (t.shape[0] // of), (stop - start) * (t.shape[0] // of)) for t in tensors)


def join(messages: Sequence[Tensors]) -> Tensors:
    """Joins the tensors of several micro-batches to one message, along dimension 0."""
    return tuple(torch.cat(tensors) for tensors in zip(*messages, strict=True))


def first_part(memory: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns a view of the first elements of ``memory`` in another shape."""
    return memory.view(-1)[: math.prod(shape)].view(shape)


def draw_seed(use: str, *parts: object) -> int:
    """Returns a seed, the same on every machine: 63 bits of the BLAKE2b hash of "use/part/part/..."."""
    text = "/".join([use, *map(str, parts)]).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_torch(seed: int) -> None:
    """Seeds torch's generators of the devices in use, far faster than torch.manual_seed, which seeds all devices."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Context that restores the generators of torch at its end."""
    in_use = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        in_use.append(torch.cuda.default_generators[torch.cuda.current_device()])
    states = [generator.get_state() for generator in in_use]
    try:
        yield
    finally:
        for generator, state in zip(in_use, states, strict=True):
            generator.set_state(state)


def seed_all(seed: int) -> None:
    """Seeds the generators of torch, Python, and NumPy if it is imported, from which a dataset may draw."""
    seed_torch(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def has_drawn(states: tuple[Any, Any]) -> bool:
    """Whether the generators of Python or NumPy have drawn since `states_beside_torch` returned ``states``."""
    before, now = states, states_beside_torch()
    return before[0] != now[0] or pickle.dumps(before[1]) != pickle.dumps(now[1])


def states_beside_torch() -> tuple[Any, Any]:
    """States of the generators of Python, and of NumPy if it is imported."""
    numpy: Any = sys.modules.get("numpy")
    return random.getstate(), numpy and numpy.random.get_state(legacy=False)


@contextmanager
def all_generators_kept() -> Iterator[None]:
    """Context that restores all generators that `seed_all` seeds. Call `seed_all` inside, before the draws."""
    python, numpy_state = states_beside_torch()
    try:
        with generators_kept():
            yield
    finally:
        random.setstate(python)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in contiguous memory, to be sent: without a mark that it is conjugate or negative."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def payload(results: Iterable[torch.Tensor]) -> Tensors:
    """Returns results in the form of a message: without a graph, contiguous."""
    return tuple([plain(t.detach()) for t in results])


def digest(tensors: Iterable[torch.Tensor | None]) -> str:
    """Returns a hash of the bits of tensors."""
    bits = sha256()
    for tensor in tensors:
        data = None if tensor is None else plain(tensor.detach().cpu())
        bits.update(b"none" if data is None else ctypes.string_at(data.data_ptr(), data.nbytes))
    return bits.hexdigest()
