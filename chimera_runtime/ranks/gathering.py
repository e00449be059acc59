"""Results of ranks put together, outside of the schedule."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.ranks.world import World
from chimera_runtime.values.nested import mapped
from chimera_runtime.values.shards import meshes_of, reduce_over


def added_over_all(world: World, *numbers: float) -> list[float]:
    """The sums over all ranks, of each number by itself: the same everywhere.

    Raises
    ------
    PeerLost
        If a rank does not answer in time, or has ended.
    """
    sums = torch.tensor(numbers, dtype=torch.float64)
    with world.waiting(_SUMS):
        work = dist.all_reduce(sums, group=world.chat, async_op=True)
    world.settle(work, _SUMS)
    return [float(total) for total in sums]


def averaged_in_mesh(world: World, numbers: Sequence[float], mesh: Any) -> list[float]:
    """The means of numbers over the ranks of a mesh, which all call it; errors as in `added_over_all`."""
    means = torch.tensor(numbers, dtype=torch.float64, device=world.device)
    with world.waiting(_WEIGHTS):
        reduce_over(mesh, means, lambda work: world.settle(work, _WEIGHTS))
    return means.tolist()


def largest_of_rows(world: World, modules: Iterable[torch.nn.Module], number: float) -> float:
    """The largest of a number over all pipelines that hold parts of the same parameters; errors as in `added_over_all`.

    Every rank of them calls it, with its modules.
    """
    if len(world.members) == dist.get_world_size():
        return number
    largest = torch.tensor([number], dtype=torch.float64, device=world.device)
    with world.waiting(_WEIGHTS):
        for mesh in meshes_of(p for module in modules for p in module.parameters()):
            reduce_over(mesh, largest, lambda work: world.settle(work, _WEIGHTS), largest=True)
        work = dist.all_reduce(largest := largest.cpu(), dist.ReduceOp.MAX, group=world.chat, async_op=True)
    world.settle(work, _WEIGHTS)
    return float(largest)


def gathered(world: World, workers: Sequence[int], mine: dict[int, Any]) -> dict[int, Any]:
    """What some workers of a copy know by micro-batch, on every rank of the copy, in order, on the CPU.

    Raises
    ------
    PeerLost
        If a rank does not answer in time, or has ended.
    """
    place = world.place
    known: dict[int, Any] = {}
    ranks = [place.rank_of(place.copy, worker) for worker in range(place.workers)]
    for worker in workers:
        source = ranks[worker]
        if source == place.rank:
            content = mapped(mine, torch.Tensor.cpu)
            bits = _packed(content)
            for rank in (rank for rank in ranks if rank != source):
                world.send(torch.tensor([len(bits)]), rank, _OUTPUTS)
                world.send(bits, rank, _OUTPUTS)
        else:
            length = torch.zeros(1, dtype=torch.int64)
            world.recv(length, source, _OUTPUTS)
            received = bytearray(int(length))
            world.recv(torch.frombuffer(received, dtype=torch.uint8), source, _OUTPUTS)
            content = torch.load(io.BytesIO(received), weights_only=False)
        known |= content
    return {micro: known[micro] for micro in sorted(known)}


def _packed(content: Any) -> torch.Tensor:
    """A value with tensors as bytes; of a tensor that is a view, its part alone."""
    buffer = io.BytesIO()
    torch.save(mapped(content, torch.Tensor.clone), buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


_SUMS = "for the loss of an evaluation"
_WEIGHTS = "for what a mini-batch counts on the other ranks of a mesh"
_OUTPUTS = "for the outputs of an evaluation"
