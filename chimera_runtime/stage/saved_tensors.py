"""What autograd keeps between forward and backward, in bytes, as torch's own hooks for saved tensors see it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from chimera_runtime.values.nested import leaves

Memory = tuple[torch.device, int]
"""A piece of memory: its device and address; on the meta device, where there is none, what would hold it."""


@dataclass(frozen=True)
class Footprint:
    """What one forward of a stage leaves behind, in bytes; each piece of memory counts once.

    ``activations`` is M_a: what is saved for the backward, in whatever tensors, weights aside. Where it is saved that
    includes the input and what is handed on, ``saved_inputs`` and ``saved_results``; ``inputs`` and ``results`` are
    the whole of those. ``targets`` is what comes beside the input: what the loss is given beside the result, and
    keyword arguments.

    Where backwards are split, ``released`` is what the first half lets go of, inputs aside; ``operands`` are the
    gradients that are kept from the first half to the second, ``received_operands`` those of them that the stage was
    given.
    """

    activations: int
    inputs: int
    saved_inputs: int
    results: int
    saved_results: int
    targets: int
    released: int = 0
    operands: int = 0
    received_operands: int = 0

    def with_halves(self, released: int, operands: int, received_operands: int) -> "Footprint":
        """The same of a stage whose backwards are split."""
        return replace(self, released=released, operands=operands, received_operands=received_operands)


class SavedTensors:
    """The memory of tensors that are saved for a backward, each piece counted once; weights are left out.

    ``weights`` tells the parameters as they are when a tensor is saved: where weights have versions, in the memory of
    the version that is being read. ``sizes`` are the pieces that are saved now, ``peak`` is how many bytes those were
    at most.
    """

    def __init__(self, weights: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._weights = weights
        self._users: Counter[Memory] = Counter()
        self.sizes: dict[Memory, int] = {}
        self.peak = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """What is saved inside is counted, for as long as it stays saved."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    def footprint(self, inputs: Any, results: Any, targets: Any) -> Footprint:
        """What a forward has left behind; nothing else was watched."""
        given, handed_on = memory_of(inputs), memory_of(results)
        return Footprint(
            activations=sum(self.sizes.values()),
            inputs=sum(given.values()),
            saved_inputs=sum(given[piece] for piece in given.keys() & self.sizes.keys()),
            results=sum(handed_on.values()),
            saved_results=sum(handed_on[piece] for piece in handed_on.keys() & self.sizes.keys()),
            targets=sum(memory_of(targets).values()),
        )

    def _pack(self, tensor: torch.Tensor) -> "_SavedTensor":
        """Counts a tensor; it is kept without its graph, or the graph would keep itself alive."""
        memory = memory_of(tensor)
        if memory.keys() <= memory_of(list(self._weights())).keys():
            return _SavedTensor(tensor.detach(), lambda: None)
        ((piece, size),) = memory.items()
        self._users[piece] += 1
        if self._users[piece] == 1:
            self.sizes[piece] = size
            self.peak = max(self.peak, sum(self.sizes.values()))
        return _SavedTensor(tensor.detach(), lambda: self._release(piece))

    def _release(self, piece: Memory) -> None:
        self._users[piece] -= 1
        if self._users[piece] == 0:
            del self.sizes[piece]


class _SavedTensor:
    """A saved tensor; ``gone`` is called when the graph lets go of it."""

    __slots__ = ("gone", "tensor")

    def __init__(self, tensor: torch.Tensor, gone: Callable[[], None]) -> None:
        self.tensor = tensor
        self.gone = gone

    def __del__(self) -> None:
        self.gone()


def _unpack(held: _SavedTensor) -> torch.Tensor:
    return held.tensor


def memory_of(value: Any) -> dict[Memory, int]:
    """The pieces of memory that the tensors of a value lie in; sparse ones are passed over."""
    storages = [t.untyped_storage() for t in leaves(value) if isinstance(t, torch.Tensor) and t.layout == torch.strided]
    return {(s.device, s._cdata if s.device.type == "meta" else s.data_ptr()): s.nbytes() for s in storages}
