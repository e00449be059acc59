"""Memory that tensors share: whether anything else holds the memory of a tensor, and whether anything wrote it."""

import gc
from collections.abc import Callable, Container, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from chimera_runtime.errors import stage as mistakes
from chimera_runtime.values.nested import Tensors, in_message, part, plain, taken_apart

Views = Callable[[Tensors, int, int], Tensors]
"""Function (buffers of a slot, micro-batches of a message, the first of these) that returns the message's part of them.
"""

_COUNT: Any = getattr(torch._C, "_storage_Use_Count", None)
"""Private function of torch that counts the holders of a storage. Without it all memory counts as shared."""

_STORAGE: Any = torch.UntypedStorage
VERSION = attrgetter("_version")
"""Version number of a tensor that is none of inference mode, which grows with every write."""

_NOTE = "_handed_on"
"""Attribute of a storage, set by `lend`: the stage that handed it on last, the micro-batch, and the address."""


def _holders(tensor: torch.Tensor) -> int:
    return int(_COUNT(tensor.untyped_storage()._cdata))


_ALONE = 0 if _COUNT is None else _holders(torch.empty(1))


def is_shared(tensor: torch.Tensor, tensors: int = 1) -> bool:
    """Whether more than ``tensors`` tensors, itself included, or a graph hold a tensor's memory, as far as known."""
    return _COUNT is None or _holders(tensor) >= _ALONE + tensors


# What runs for every micro-batch counts holders itself, as `is_shared` does: a call takes longer than the count.


def unshared(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor if it is `plain` and nothing else holds its memory, else a plain copy."""
    if _COUNT is None or _COUNT(tensor.untyped_storage()._cdata) > _ALONE:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    elif tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return plain(tensor)


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """`VERSION` of each tensor; 0 for tensors of inference mode, which have none."""
    try:
        return [*map(VERSION, tensors)]
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def versions_of_value(value: Any) -> list[int]:
    """`versions` of the tensors in a value."""
    return [value._version] if type(value) is torch.Tensor else versions(taken_apart(value)[0])


def lend(stage: int, micro: int, results: Tensors, waiting: Container[int], inputs_of: Callable[[], Any]) -> Tensors:
    """Returns results `in_message` form. Notes which memory a stage hands on for a micro-batch, and refuses memory that
    an earlier one still needs.

    A module may write all of its outputs into one buffer. The version of a tensor does not always show it, as writes of
    a CUDA graph are not counted. The address does: the allocator gives out no memory that anything still holds.

    ``waiting`` has the micro-batches of the stage whose backward has not run. ``inputs_of`` returns the inputs of the
    stage, which may be the same memory for several micro-batches; the memory of others raises `BadModel`.
    """
    outputs = []
    for result in results:
        output = in_message(result)
        outputs.append(output)
        storage: Any = output.untyped_storage()
        note = stage, micro, output.data_ptr()
        earlier = getattr(storage, _NOTE, note)
        setattr(storage, _NOTE, note)
        is_repeated = earlier != note and earlier == (stage, earlier[1], note[2]) and earlier[1] in waiting
        if is_repeated and storage.nbytes():
            inputs = {tensor.untyped_storage()._cdata for tensor in taken_apart(inputs_of())[0]}
            if storage._cdata not in inputs:
                raise mistakes.memory_was_returned_twice(stage=stage, earlier=earlier[1], micro=micro)
    return tuple(outputs)


def note_received(values: Any) -> None:
    """Marks the memory of ``values``, inputs of the dataset or gradients of another stage, for `is_handed_on`."""
    for tensor in (values,) if type(values) is torch.Tensor else taken_apart(values)[0]:
        if tensor.layout == torch.strided:
            setattr(tensor.untyped_storage(), _NOTE, (None, None, tensor.data_ptr()))


def is_handed_on(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor has been handed on by a stage, or `note_received` knows it."""
    return hasattr(tensor.untyped_storage(), _NOTE)


class ReleasedTensors:
    """Finds out whether the memory of tensors is freed. Make it while the tensors are still referenced."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._memory = [tensor.untyped_storage()._weak_ref() for tensor in tensors]

    def are_kept(self) -> list[bool]:
        """Returns for each tensor whether something still holds its memory. Call it once."""
        if not all(map(_STORAGE._expired, self._memory)):
            gc.collect()
        are_held = [not _STORAGE._expired(memory) for memory in self._memory]
        for memory in self._memory:
            _STORAGE._free_weak_ref(memory)
        return are_held


class Slots:
    """Slots, the receive buffers of a stage for one direction: slot k has room for ``rooms[k]`` micro-batches.

    ``make(room)`` allocates the buffers of a slot; a message uses the part of them that ``views`` returns. The content
    of a slot may be needed for longer than the program says: by the graph of the next stage, if a stage hands its input
    on, or by a stage that keeps its input. Such a slot moves to new memory before its next message.
    """

    def __init__(
        self,
        rooms: Iterable[int] = (),
        make: Callable[[int], Tensors] = lambda _room: (),
        views: Views | None = None,
    ) -> None:
        self.rooms = tuple(rooms)
        self._memory = [make(room) for room in self.rooms]
        self._views = views

    def resize(self, views: Views) -> None:
        """Makes later messages use only the part of each slot that ``views`` returns."""
        self._views = views

    def vacant(self, number: int, micros: int | tuple[int, ...] | None = None) -> Tensors:
        """Returns the buffers of a slot for its next message, in memory that is free: what a message of ``micros``
        fills, or all.
        """
        memory, room = self._memory[number], self.rooms[number]
        for tensor in memory:
            if _COUNT is None or _COUNT(tensor.untyped_storage()._cdata) > _ALONE:
                memory = self._memory[number] = tuple(map(torch.empty_like, memory))
                break
        count, first = (len(micros), micros[0]) if isinstance(micros, tuple) else (1, micros)
        buffers = memory if self._views is None else self._part(number, first or 0)
        return buffers if first is None or count == room else part(buffers, 0, count, room)

    def __getitem__(self, number: int) -> Tensors:
        """The buffers of a slot, for a message that begins with micro-batch 0."""
        return self._part(number, 0)

    def _part(self, number: int, first: int) -> Tensors:
        memory = self._memory[number]
        return memory if self._views is None else self._views(memory, self.rooms[number], first)
