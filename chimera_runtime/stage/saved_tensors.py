"""Memory that autograd keeps between forward and backward, in bytes, counted by torch's hooks for saved tensors."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from chimera_runtime.errors import stage as mistakes
from chimera_runtime.program.kept_bytes import largest_mean
from chimera_runtime.ranks.devices import CpuAccelerator
from chimera_runtime.ranks.messages import LinkToHost, Room
from chimera_runtime.stage.engine import Roots, edge_of
from chimera_runtime.stage.recomputation import SavedGraph, SavedInput
from chimera_runtime.stage.splitting import HalfBackward, Operand, SecondHalf, reachable, saved_tensors_of
from chimera_runtime.values.nested import Tensors, leaves
from chimera_runtime.values.shared_memory import is_handed_on, is_shared

# Moves of what a micro-batch keeps, to the host and, before it is needed, back to the device.
#
#     offload         takes all saved tensors out of the graph, which gets a `SavedView` in place of each. A storage
#                     moves once, however many tensors lie in it: its copy to the host is launched
#     wait offload    the storages on the device are released
#     reload          takes new memory on the device, and launches the copies into it
#     wait reload     the memory on the host is released
#     backward        autograd asks the views for their tensors, which lie in the new memory
#
# Before a backward, or its first half, this moves what autograd saved. Between two halves (``offload_operands`` and so
# on) it moves what the second half needs: gradients, and what is still saved in the part of the graph that they lead
# to.
#
# A storage moves if nothing but the graph, or the half backward, holds it. So weights, carries and inputs stay where
# they are, and so does what a module keeps, what micro-batches share, and what is still being sent. What stages hand on
# to one another, and what comes from the dataset, stays in any case; so do small storages, whose move takes longer than
# it is worth.

SMALLEST = 1024
"""Smallest storage that moves, in bytes."""


class Geometry(NamedTuple):
    """Place of a tensor in its storage."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(eq=False)
class SavedStorage:
    """A storage of ``size`` bytes with tensors that a graph or a half backward keeps. ``memory`` has its bytes on the
    device from the first move on, None while they are on the host; ``views`` stand for tensors that have not moved yet.
    """

    stage: int
    device: torch.device
    size: int
    memory: torch.Tensor | None = None
    views: list["SavedView"] = field(default_factory=list)

    def pack(self, tensor: torch.Tensor) -> "SavedView":
        """Returns a view that a graph keeps in place of a tensor in this storage (a hook of autograd)."""
        geometry = Geometry(tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
        view = SavedView(self, geometry, tensor._version, tensor.detach())
        self.views.append(view)
        return view

    def can_move(self) -> bool:
        """Whether only ``views`` and ``memory`` hold the storage, so that it can move. Call it when all is packed."""
        tensors = [tensor for view in self.views if (tensor := view.tensor) is not None]
        holders = len(tensors) + (self.memory is not None)
        tensor = self.memory if self.memory is not None else tensors[0]
        if is_shared(tensor, holders):
            self.views = []
            return False
        if self.memory is None:
            self.memory = torch.empty(0, dtype=torch.uint8, device=self.device).set_(tensor.untyped_storage())
        return True

    def release(self) -> None:
        """Releases the memory on the device. Raises `BadModel` if it was written since the graph saved it."""
        for view in self.views:
            view.release()
        self.views, self.memory = [], None

    def allocate(self) -> torch.Tensor:
        """Takes and returns new memory on the device."""
        self.memory = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        return self.memory


@dataclass(eq=False)
class SavedView:
    """Stand-in for a tensor that a graph keeps; ``tensor`` is None once the storage has moved. ``version`` is the
    tensor's version counter at the time when it was saved.
    """

    storage: SavedStorage
    geometry: Geometry
    version: int
    tensor: torch.Tensor | None

    def unpacked(self) -> torch.Tensor:
        """Returns the tensor (a hook of autograd). Raises `BadModel` if it is on the host, or was written since."""
        if self.tensor is not None:
            return self.unwritten(self.tensor)
        memory, (dtype, offset, shape, stride) = self.storage.memory, self.geometry
        if memory is None:
            raise mistakes.saved_tensor_is_on_the_host(stage=self.storage.stage)
        return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), offset, shape, stride)

    def unwritten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor. Raises `BadModel` if it was written after autograd saved it: autograd does not check."""
        if tensor._version != self.version:
            raise mistakes.saved_tensor_was_written(stage=self.storage.stage, shape=tuple(self.geometry.shape))
        return tensor

    def release(self) -> None:
        """Lets go of the tensor, whose storage moves; errors as in `unwritten`."""
        if self.tensor is not None:
            self.unwritten(self.tensor)
        self.tensor = None


class Storages:
    """Finds the storages of tensors that are taken out of a graph or a half backward. Raises torch's error if a saved
    tensor was written since it was saved.
    """

    def __init__(self, stage: int, device: torch.device) -> None:
        self._stage = stage
        self._device = device
        self._storages: dict[int, SavedStorage] = {}

    def movable(self) -> list[SavedStorage]:
        """Returns the storages that can move."""
        return [storage for storage in self._storages.values() if storage.can_move()]

    def pack(self, operand: Operand) -> Operand:
        """Returns a `SavedView` in place of a gradient that can move; anything else as it is."""
        if isinstance(operand, torch.Tensor) and _is_ordinary(operand, self._device):
            return self._storage_of(operand).pack(operand)
        return operand

    def take_saved(self, nodes: Iterable[Node]) -> None:
        """Takes the tensors that ``nodes`` and all nodes behind them have saved out of the graph."""
        for node in reachable(nodes):
            for saved, unpack in saved_tensors_of(node):
                view = getattr(saved, "data", None)
                if isinstance(view, SavedView):
                    self._take_again(view)
                elif getattr(saved, "unpack_hook", None) is None:
                    self._take(saved, unpack)
                # Else the user's code saves it in a way of its own, as torch.utils.checkpoint does.

    def _take(self, saved: Any, unpack: Callable[[], torch.Tensor | None]) -> None:
        tensor = unpack()
        if tensor is not None and _is_ordinary(tensor, self._device):
            storage = self._storage_of(tensor)
            saved.register_hooks(storage.pack, SavedView.unpacked)

    def _take_again(self, view: "SavedView") -> None:
        """Takes a view that an earlier move left in the graph: its tensor may move now, even if it did not then."""
        memory = view.storage.memory if view.tensor is None else view.tensor
        if memory is not None:
            self._storages.setdefault(memory.untyped_storage()._cdata, view.storage)
        if view.tensor is not None:
            view.storage.views.append(view)

    def _storage_of(self, tensor: torch.Tensor) -> SavedStorage:
        memory = tensor.untyped_storage()
        return self._storages.setdefault(memory._cdata, SavedStorage(self._stage, tensor.device, memory.nbytes()))


def saved_storages(stage: int, roots: Roots) -> list[SavedStorage]:
    """Takes the saved tensors out of the graph behind some ``roots``; returns their storages that can move. Errors as
    in `Storages`.
    """
    if not roots:
        return []
    edges = [*map(edge_of, roots)]
    storages = Storages(stage, edges[0].node._input_metadata[edges[0].output_nr].device)
    storages.take_saved(edge.node for edge in edges)
    return storages.movable()


def operand_storages(stage: int, second_half: SecondHalf) -> list[SavedStorage]:
    """Takes out of the second half of a backward what it keeps; returns the storages that can move. Errors as in
    `Storages`.
    """
    device = next((operand.device for operand in second_half.operands if isinstance(operand, torch.Tensor)), None)
    if device is None:
        return []
    storages = Storages(stage, device)
    storages.take_saved(second_half.nodes)
    second_half.replace_operands(storages.pack)
    return storages.movable()


def _is_ordinary(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is an ordinary one on the device, in a storage that is large enough and not handed on."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.device != device:
        return False
    is_large = tensor.untyped_storage().nbytes() >= SMALLEST
    return is_large and not (tensor.is_conj() or tensor.is_neg() or is_handed_on(tensor))


@dataclass
class MovingStorages:
    """Storages of a micro-batch that move: their memory on the host, and the event at the end of the last copy."""

    storages: Sequence[SavedStorage]
    rooms: Sequence[Room]
    copied: Any


class TensorMoves:
    """The moves of a stage, by micro-batch, over the ``link`` of its rank to the host.

    ``saved`` has what the forward of each micro-batch has saved; nothing moves for a forward that keeps only its input.
    ``half_backwards`` has the micro-batches whose first half of a backward is done and whose second half is not.
    """

    def __init__(
        self,
        stage: int,
        saved: Mapping[int, SavedGraph | SavedInput],
        half_backwards: Mapping[int, HalfBackward],
        link: LinkToHost | None,
    ) -> None:
        self._stage = stage
        self._saved = saved
        self._half_backwards = half_backwards
        self._link = LinkToHost(CpuAccelerator()) if link is None else link
        self._under_way: dict[int, MovingStorages] = {}

    def offload(self, micro: int) -> None:
        """Launches the copies of activations to the host; raises torch's error if a saved tensor was written."""
        saved = self._saved[micro]
        self._launch(micro, saved_storages(self._stage, saved.all_roots if isinstance(saved, SavedGraph) else ()))

    def offload_operands(self, micro: int) -> None:
        """Launches the copies of what the second half of a backward needs to the host; errors as in `offload`."""
        self._launch(micro, operand_storages(self._stage, self._half_backwards[micro].second_half))

    def _launch(self, micro: int, storages: Sequence[SavedStorage]) -> None:
        rooms, copied = self._link.to_host([s.memory for s in storages if s.memory is not None])
        self._under_way[micro] = MovingStorages(storages, rooms, copied)

    def wait_offload(self, micro: int) -> None:
        """Releases the memory on the device; errors as in `SavedStorage.release`."""
        moving = self._under_way[micro]
        self._link.wait(moving.copied)
        for storage in moving.storages:
            storage.release()

    def reload(self, micro: int) -> None:
        """Takes memory on the device, and launches the copies into it."""
        moving = self._under_way[micro]
        moving.copied = self._link.to_device([storage.allocate() for storage in moving.storages], moving.rooms)

    def wait_reload(self, micro: int) -> None:
        """Makes later operations of the device wait for the copies, and gives the memory of the host back."""
        moving = self._under_way.pop(micro)
        self._link.wait(moving.copied)
        self._link.free(moving.rooms)

    wait_offload_operands, reload_operands, wait_reload_operands = wait_offload, reload, wait_reload


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
        """Bytes that stay on the device when operands move to the host: inputs, results that are kept as long, and
        ``received`` bytes of gradients.
        """
        return self.kept_results + (self.inputs if is_fed else self.saved_inputs) + received


_LEAST = ("saved_inputs", "saved_results", "made_results", "released", "received_operands", "kept_results")
"""Fields of a `Footprint` in which the slice with the least memory stands for all slices."""


class SavedTensors:
    """The memory of tensors that are saved for a backward, each storage counted once; weights are left out.

    ``weights`` returns the parameters; it is called whenever a tensor is saved, because a weight with several versions
    lies in the memory of the selected one. ``sizes`` has the bytes of each storage that is saved now.
    """

    def __init__(self, weights: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._weights = weights
        self._users: Counter[Memory] = Counter()
        self.sizes: dict[Memory, int] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what is saved inside, for as long as it stays saved."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield

    def footprint(self, inputs: Any, results: Any, targets: Any, before: Tensors = (), left: Tensors = ()) -> Footprint:
        """Returns the footprint of the only forward that was counted; ``before`` are the tensors of the carry that it
        has read, ``left`` those of the carry that it has returned.
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
        """Counts a tensor as saved, and returns what the graph keeps: the tensor without its graph, which would keep
        itself alive.
        """
        memory = memory_of(tensor)
        if memory.keys() <= memory_of(list(self._weights())).keys():
            return _SavedTensor(tensor.detach(), lambda: None)
        ((piece, size),) = memory.items()
        self._users[piece] += 1
        if self._users[piece] == 1:
            self.sizes[piece] = size
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
    sizes: dict[str, list[int]] = {
        f.name: [getattr(of_slice, f.name) for of_slice in footprints] for f in fields(Footprint)
    }

    def largest(of_slices: Sequence[int]) -> int:
        return max(-(-size * whole // length) for size, length in zip(of_slices, counts, strict=True))

    def least(of_slices: Sequence[int]) -> int:
        return min(size * whole // length for size, length in zip(of_slices, counts, strict=True))

    # The gradients of a carry count by the length of the slice after that which left the carry: it makes them.
    *first, last = sizes["carry_gradients"]
    return Footprint(
        activations=largest_mean(sizes["activations"], lengths),
        carry=largest_mean(sizes["carry"], lengths),
        carry_gradients=largest([last, *first]),
        **{name: largest(sizes[name]) for name in ("inputs", "results", "targets", "operands")},
        **{name: least(sizes[name]) for name in _LEAST},
    )


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
