"""Memory that autograd keeps between forward and backward, in bytes, counted by torch's hooks for saved tensors."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from chimera_runtime.values.nested import leaves
from chimera_runtime.values.tensors import Tensors

Memory = tuple[torch.device, int]
"""Key of a tensor's storage: its device and address; on the meta device, which has no addresses, an id."""


@dataclass(frozen=True)
class Footprint:
    """Memory that one forward of a stage keeps, in bytes; a storage that tensors share counts once.

    ``activations`` is M_a: everything that is saved for the backward except weights. ``saved_inputs`` is the part of
    ``activations`` that belongs to the input of the forward, ``saved_results`` the part that belongs to its results.
    ``made_results`` is ``saved_results`` without inputs that the stage hands on as results. ``inputs`` and ``results``
    are all bytes of input and results, saved or not. ``targets`` are the targets of the loss and the keyword arguments.

    For split backwards, ``released`` is the memory that the first half frees, except inputs. ``operands`` are the
    gradients that are kept from the first half to the second; ``received_operands`` are the ones among them that the
    next stage has sent. ``kept_results`` is the part of ``made_results`` that is kept until the second half.

    Of a slice, ``carry`` is the memory that its carry adds to the carries of earlier slices, saved for the backward or
    not; it is not part of ``activations``. ``carry_gradients`` are the gradients of the whole carry.
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
    kept_results: int = 0
    carry: int = 0
    carry_gradients: int = 0
    made_results: int = 0

    def activations_with_inputs(self, is_fed: bool) -> int:
        """M_a; if another stage sends the inputs (``is_fed``), with all inputs, saved for the backward or not."""
        return self.activations + (self.inputs - self.saved_inputs if is_fed else 0)

    def resident(self, is_fed: bool) -> int:
        """The part of `activations_with_inputs` that is left on the device by an offload: inputs and results."""
        return self.made_results + (self.inputs if is_fed else self.saved_inputs)

    def resident_operands(self, is_fed: bool, received: int) -> int:
        """Bytes that stay on the device when operands, kept between two halves of a backward, move to the host.

        They are inputs, results that are kept as long, and ``received`` bytes of gradients that another stage has sent.
        """
        return self.kept_results + (self.inputs if is_fed else self.saved_inputs) + received


_LEAST = ("saved_inputs", "saved_results", "made_results", "released", "received_operands", "kept_results")
"""Fields of a `Footprint` in which the slice with the least memory stands for all slices."""


class SavedTensors:
    """The memory of tensors that are saved for a backward, each storage counted once; weights are left out.

    ``weights`` returns the parameters; it is called whenever a tensor is saved, because a weight with several versions
    lies in the memory of the selected one. ``sizes`` has the bytes of each storage that is saved now, ``peak`` is the
    largest sum that they have had.
    """

    def __init__(self, weights: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._weights = weights
        self._users: Counter[Memory] = Counter()
        self.sizes: dict[Memory, int] = {}
        self.peak = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what is saved inside, for as long as it stays saved."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield

    def footprint(self, inputs: Any, results: Any, targets: Any, before: Tensors = (), left: Tensors = ()) -> Footprint:
        """Returns the footprint of a forward. Only this forward may have been counted.

        ``before`` are the tensors of the carry that it has read, ``left`` the tensors of the carry that it has
        returned.
        """
        of_inputs, of_results, earlier, carried = map(memory_of, (inputs, results, before, left))
        # A carry counts apart from activations; an input that the stage leaves as its carry counts as an input.
        saved = self.sizes.keys()
        pieces = saved - (earlier.keys() | (carried.keys() - of_inputs.keys()))
        return Footprint(
            activations=sum(self.sizes[piece] for piece in pieces),
            inputs=sum(of_inputs.values()),
            saved_inputs=sum(of_inputs[piece] for piece in of_inputs.keys() & pieces),
            results=sum(of_results.values()),
            saved_results=sum(of_results[piece] for piece in of_results.keys() & saved),
            targets=sum(memory_of(targets).values()),
            carry=sum(size for piece, size in carried.items() if piece not in earlier.keys() | of_inputs.keys()),
            carry_gradients=sum(t.numel() * t.element_size() for t in left if t.requires_grad),
            made_results=sum(of_results[piece] for piece in (of_results.keys() & pieces) - of_inputs.keys()),
        )

    def _pack(self, tensor: torch.Tensor) -> "_SavedTensor":
        """Counts a tensor as saved, and returns what the graph keeps of it: the tensor without its graph.

        With its graph, the graph would keep itself alive.
        """
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


def footprint_of_slices(footprints: Sequence[Footprint], lengths: Sequence[int] = ()) -> Footprint:
    """Returns one footprint that can be used for each slice of a micro-batch.

    The slices that are kept at any moment are the first k of a micro-batch. So ``activations`` and ``carry`` are the
    largest mean over the first k slices, for any k. A field in `_LEAST` is the smallest of all slices, any other field
    the largest. If slices have unequal ``lengths``, the footprint is that of a whole micro-batch: a slice has a share
    of it in proportion to its length.
    """
    whole, counts = sum(lengths) or 1, lengths or (1,) * len(footprints)

    def mean(name: str) -> int:
        return largest_mean([getattr(footprint, name) for footprint in footprints], lengths)

    def largest(name: str) -> int:
        return largest_by_length([getattr(footprint, name) for footprint in footprints], lengths)

    def least(name: str) -> int:
        sizes: Iterable[int] = (getattr(footprint, name) for footprint in footprints)
        return min(size * whole // length for size, length in zip(sizes, counts, strict=True))

    # The gradients of a carry count by the length of the slice after that which left the carry: it makes them.
    return Footprint(
        activations=mean("activations"),
        carry=mean("carry"),
        carry_gradients=largest_by_length([f.carry_gradients for f in (*footprints[-1:], *footprints[:-1])], lengths),
        **{name: largest(name) for name in ("inputs", "results", "targets", "operands")},
        **{name: least(name) for name in _LEAST},
    )


def largest_mean(sizes: Sequence[int], lengths: Sequence[int]) -> int:
    """Returns the largest mean of the first k ``sizes``, for any k: sizes of the slices of a micro-batch, in bytes.

    If slices have unequal ``lengths``, a mean is bytes per length, and the result is multiplied by the length of the
    whole micro-batch.
    """
    whole, counts = sum(lengths) or 1, lengths or (1,) * len(sizes)
    sums = accumulate(sizes)
    return max(-(-total * whole // count) for count, total in zip(accumulate(counts), sums, strict=True))


def largest_by_length(sizes: Sequence[int], lengths: Sequence[int]) -> int:
    """Returns the largest of ``sizes``: sizes of the slices of a micro-batch, in bytes.

    If slices have unequal ``lengths``, the largest size per length counts, and the result is multiplied by the length
    of the whole micro-batch.
    """
    whole = sum(lengths) or 1
    return max(-(-size * whole // length) for size, length in zip(sizes, lengths or (1,) * len(sizes), strict=True))


@dataclass(slots=True)
class _SavedTensor:
    """A saved tensor; ``release`` is called when the graph frees it."""

    tensor: torch.Tensor
    release: Callable[[], None]

    def __del__(self) -> None:
        self.release()


def memory_of(value: Any) -> dict[Memory, int]:
    """The bytes of each storage that holds tensors of a value, except sparse ones."""
    storages = [t.untyped_storage() for t in leaves(value) if isinstance(t, torch.Tensor) and t.layout == torch.strided]
    return {(s.device, s._cdata if s.device.type == "meta" else s.data_ptr()): s.nbytes() for s in storages}
