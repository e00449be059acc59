"""Stages that are spread over ranks beside the pipelines (FSDP2, tensor parallelism): tensors of which a part is here.

A tensor is spread if it is a DTensor. That class is not imported here: who has spread a module has imported it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_WRAPPERS = ("torch.nn.parallel", "torch.distributed.fsdp.fully_sharded_data_parallel")
_SPREADING = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed._tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds, in the same memory and without a graph: all, unless it is spread."""
    detached: Any = tensor.detach()
    part: torch.Tensor = detached.to_local() if is_spread(tensor) else detached
    return part


def whole(tensor: Any) -> torch.Tensor:
    """A tensor with all of its parts; all ranks that it is spread over call it."""
    full: torch.Tensor = tensor.full_tensor() if is_spread(tensor) else tensor
    return full


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with memory of its own: tensor parallelism may return one whose sum over ranks is still under way."""
    return tensor.clone() if hasattr(tensor, "trigger_wait") else tensor


def laid_out_like(parameter: Any, gradient: Any) -> torch.Tensor:
    """A gradient in the layout of its parameter: autograd may leave parts that are still to be summed."""
    if is_spread(gradient) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    spread: torch.Tensor = gradient
    return spread


def spread_like(tensor: Any, part: torch.Tensor) -> torch.Tensor:
    """A tensor in the layout of another one, of which this rank holds ``part``, in the memory of that."""
    if not is_spread(tensor):
        return part
    mesh, placements = tensor.device_mesh, tensor.placements
    made: torch.Tensor = type(tensor).from_local(
        part, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return made


def spread_out(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    """A whole tensor in the layout of another one; all ranks that it is spread over call it, with the same tensor."""
    if not is_spread(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    spread: torch.Tensor = distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return spread


def is_spread(tensor: object) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "device_mesh")


def mesh_of(tensor: object) -> Any:
    """The mesh of ranks that a tensor is spread over; None if it is a plain one."""
    return getattr(tensor, "device_mesh", None)


def meshes_of(tensors: Iterable[object]) -> list[Any]:
    """The meshes that any of the tensors is spread over, in the order of the tensors."""
    return [mesh for mesh in dict.fromkeys(map(mesh_of, tensors)) if mesh is not None]


def reduce_over(mesh: Any, numbers: torch.Tensor, wait: Callable[[Any], object], largest: bool = False) -> None:
    """Replaces numbers by their means over the ranks of a mesh, or by the largest; all of these ranks call it."""
    operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    for group in mesh.get_all_groups():
        wait(dist.all_reduce(numbers, operation, group=group, async_op=True))
    if not largest:
        numbers /= mesh.size()


def by_layout(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors in groups that one operation of torch takes together: plain ones, and those of each layout."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        layout = (tensor.device_mesh, tensor.placements) if is_spread(tensor) else None  # type: ignore[attr-defined]
        groups.setdefault(layout, []).append(tensor)
    return [*groups.values()]


def rest(module: torch.nn.Module) -> None:
    """Gives a module the parameters that an optimizer steps, where FSDP has left gathered ones after a forward."""
    for part in module.modules():
        if _made_by(part, _SPREADING):
            part.reshard()  # type: ignore[operator]


def misplaced(module: torch.nn.Module, members: Sequence[int] | None) -> str | None:
    """What spreads a module in a way that no pipeline can take, and what to do instead; None if nothing does.

    Parameters
    ----------
    members
        The ranks of the pipelines where there are others beside them, over which a module may be spread: then each of
        these may hold a part of its own, but no two of them parts of one tensor.
    """
    tensors = [*module.parameters(), *module.buffers()]
    wrapper = next((name for part in module.modules() if (name := _made_by(part, _WRAPPERS))), None)
    if wrapper is not None and members is not None:
        return f"{wrapper}, which sums gradients on its own after every backward; use fully_shard(module, mesh=...)"
    spreading = (name for part in (*module.modules(), *tensors) if (name := _made_by(part, _WRAPPERS + _SPREADING)))
    if members is None and (name := next(spreading, None)):
        return (
            f"{name}; FSDP, DDP and tensor parallelism cannot be used within a stage: return the plain module, its "
            "replicas are kept equal and their gradients summed already. A Pipeline with a flush over one "
            "dimension of a mesh (group=) leaves the others to them"
        )
    spread: list[Any] = [*filter(is_spread, tensors)]
    for tensor in spread:
        shared = sorted({*(members or ())}.intersection(tensor.device_mesh.mesh.flatten().tolist()))
        if len(shared) > 1:
            return (
                f"a DTensor over the ranks {', '.join(map(str, shared))}, which are all of one pipeline: spread it "
                "over another dimension of the mesh than the pipeline's"
            )
    return None


def _made_by(value: object, modules: tuple[str, ...]) -> str | None:
    """The name of the first class of a value that comes from some modules of torch."""
    return next((kind.__name__ for kind in type(value).__mro__ if kind.__module__.startswith(modules)), None)
