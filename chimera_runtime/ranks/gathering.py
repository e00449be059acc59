"""Sums, means, maxima and outputs that ranks exchange outside of the schedule."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.ranks.control_group import ControlGroup
from chimera_runtime.values.mesh_tensors import meshes_of, reduce_over
from chimera_runtime.values.nested import mapped

_SUMS = "for the loss of an evaluation"
_WEIGHTS = "for what a mini-batch counts on the other ranks of a mesh"
_OUTPUTS = "for the outputs of an evaluation"


def added_over_all(control_group: ControlGroup, *numbers: float) -> list[float]:
    """Returns the sum of each number over all ranks. Raises `PeerLost` if a rank is late, or has ended."""
    sums = torch.tensor(numbers, dtype=torch.float64)
    control_group.reduce(sums, _SUMS)
    return sums.tolist()


def averaged_in_mesh(
    control_group: ControlGroup, numbers: Sequence[float], mesh: Any, *, device: torch.device
) -> list[float]:
    """Returns the means of numbers over the ranks of a mesh, which all call it; errors as in `added_over_all`."""
    means = torch.tensor(numbers, dtype=torch.float64, device=device)
    with control_group.waiting(_WEIGHTS):
        reduce_over(mesh, means, lambda work: control_group.settle(work, _WEIGHTS))
    return means.tolist()


def largest_of_rows(
    control_group: ControlGroup, modules: Iterable[torch.nn.Module], number: float, device: torch.device
) -> float:
    """Returns the largest ``number`` over the ranks of all pipelines that hold parts of the same parameters.

    Every rank of these pipelines calls it, with its modules. Errors as in `added_over_all`.
    """
    if len(control_group.members) == dist.get_world_size():
        return number
    largest = torch.tensor([number], dtype=torch.float64, device=device)
    with control_group.waiting(_WEIGHTS):
        for mesh in meshes_of(p for module in modules for p in module.parameters()):
            reduce_over(mesh, largest, lambda work: control_group.settle(work, _WEIGHTS), largest=True)
    largest = largest.cpu()
    control_group.reduce(largest, _WEIGHTS, dist.ReduceOp.MAX)
    return float(largest)


def gathered(
    control_group: ControlGroup, workers: Sequence[int], outputs: dict[int, Any], *, everywhere: bool = True
) -> dict[int, Any]:
    """Returns the outputs of all micro-batches, by micro-batch in ascending order, with tensors on the CPU.

    ``workers`` are the workers of this copy that have computed outputs; ``outputs`` has those of this rank. All ranks
    of the copy call it and get the result; if not ``everywhere``, the ``workers`` alone do.

    Raises `PeerLost` if a rank does not answer in time, or has ended.
    """
    place = control_group.place
    by_micro: dict[int, Any] = {}
    ranks = {worker: place.rank_of(place.copy, worker) for worker in (range(place.workers) if everywhere else workers)}
    for worker in workers:
        source = ranks[worker]
        if source == place.rank:
            content = mapped(outputs, torch.Tensor.cpu)
            bits = _packed(content)
            for rank in (rank for rank in ranks.values() if rank != source):
                control_group.send(torch.tensor([len(bits)]), rank, _OUTPUTS)
                control_group.send(bits, rank, _OUTPUTS)
        else:
            length = torch.zeros(1, dtype=torch.int64)
            control_group.recv(length, source, _OUTPUTS)
            received = bytearray(int(length))
            control_group.recv(torch.frombuffer(received, dtype=torch.uint8), source, _OUTPUTS)
            content = torch.load(io.BytesIO(received), weights_only=False)
        by_micro |= content
    return {micro: by_micro[micro] for micro in sorted(by_micro)}


def _packed(content: Any) -> torch.Tensor:
    """Returns a value with tensors as a tensor of bytes, to be sent; of a view only the visible elements are stored."""
    buffer = io.BytesIO()
    torch.save(mapped(content, torch.Tensor.clone), buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
