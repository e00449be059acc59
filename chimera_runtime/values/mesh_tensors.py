"""Tensors that are spread over a mesh: by FSDP2 or tensor parallelism each rank of the mesh has a part of a tensor.

No two ranks of a mesh are of one pipeline. A tensor is spread if it is a DTensor. That class is not imported here: a
user who spreads a module has imported it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from chimera_runtime.errors import stage as mistakes

# Weights of stages that were built on the meta device: they get memory, but no values until weights are loaded.

_MARK = "_has_no_value_yet"


def give_memory(module: torch.nn.Module, device: torch.device, where: str) -> None:
    """Gives memory, filled with zeros, to the parameters and buffers of a module that are on the meta device.

    A parameter remains the same object, so if it has two names, both still mean one parameter. Raises `Misuse` if a
    buffer on the meta device is not in the state dict, so that nothing could fill it; ``where`` names the stage.
    """
    saved = module.state_dict(keep_vars=True)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.is_meta:
            continue
        if name not in saved:
            raise mistakes.buffer_has_no_values(where=where, name=name)
        real: torch.Tensor = torch.zeros_like(tensor, device=device)
        if isinstance(tensor, torch.nn.Parameter):
            real = torch.nn.Parameter(real, tensor.requires_grad)
        real.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]
        setattr(tensor, _MARK, True)


def is_unfilled(tensor: torch.Tensor) -> bool:
    """Whether a tensor still has no values."""
    return hasattr(tensor, _MARK)


def fill(tensor: torch.Tensor) -> None:
    """Marks a tensor as filled. Call after its values are written."""
    if hasattr(tensor, _MARK):
        delattr(tensor, _MARK)


def require_values(tensors: Mapping[str, torch.Tensor], remedy: str) -> None:
    """Raises `Misuse` if some tensors have no values; ``remedy`` says what gives them values."""
    empty = [name for name, tensor in tensors.items() if is_unfilled(tensor)]
    if empty:
        raise mistakes.tensors_have_no_values(names=empty, remedy=remedy)


_WRAPPERS = ("torch.nn.parallel", "torch.distributed.fsdp.fully_sharded_data_parallel")
_SPREADING = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed._tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor as a view without a graph; the whole tensor if it is not spread."""
    detached: Any = tensor.detach()
    part: torch.Tensor = detached.to_local() if is_spread(tensor) else detached
    return part


def whole(tensor: Any) -> torch.Tensor:
    """Returns a spread tensor as a whole. All ranks over which the tensor is spread must call it."""
    full: torch.Tensor = tensor.full_tensor() if is_spread(tensor) else tensor
    return full


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with its values: with tensor parallelism, the sum over ranks that makes it may be under way."""
    return tensor.clone() if hasattr(tensor, "trigger_wait") else tensor


def laid_out_like(parameter: Any, gradient: Any) -> torch.Tensor:
    """Returns a gradient in the layout of its parameter; if autograd left it as parts to be summed, they are summed."""
    if is_spread(gradient) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    spread: torch.Tensor = gradient
    return spread


def spread_like(tensor: Any, part: torch.Tensor) -> torch.Tensor:
    """Makes a tensor spread like ``tensor``, of which ``part`` is this rank's part, without a copy."""
    if not is_spread(tensor):
        return part
    mesh, placements = tensor.device_mesh, tensor.placements
    spread: torch.Tensor = type(tensor).from_local(
        part, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return spread


def spread_out(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    """Spreads a whole tensor in the layout of ``like``. All ranks of the layout must call it, with the same tensor."""
    if not is_spread(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    spread: torch.Tensor = distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return spread


def is_spread(tensor: object) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "device_mesh")


def mesh_of(tensor: object) -> Any:
    """The mesh of ranks that a tensor is spread over; None for a plain tensor."""
    return getattr(tensor, "device_mesh", None)


def meshes_of(tensors: Iterable[object]) -> list[Any]:
    """The meshes that any of the tensors is spread over, in the order of the tensors."""
    return [mesh for mesh in dict.fromkeys(map(mesh_of, tensors)) if mesh is not None]


def reduce_over(mesh: Any, numbers: torch.Tensor, wait: Callable[[Any], object], largest: bool = False) -> None:
    """Replaces numbers by their means, or by the largest, over the ranks of a mesh, which all call it."""
    operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    for group in mesh.get_all_groups():
        wait(dist.all_reduce(numbers, operation, group=group, async_op=True))
    if not largest:
        numbers /= mesh.size()


def norms(tensors: Iterable[torch.Tensor], norm_type: float) -> list[float]:
    """Returns norms of tensors, one for each layout over a mesh, as torch takes only tensors of one layout."""
    by_layout: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        layout = (tensor.device_mesh, tensor.placements) if is_spread(tensor) else None  # type: ignore[attr-defined]
        by_layout.setdefault(layout, []).append(tensor)
    return [float(whole(torch.nn.utils.get_total_norm(group, norm_type))) for group in by_layout.values()]


def rest(module: torch.nn.Module) -> None:
    """Reshards a module of FSDP, which may have gathered parameters after a forward, so that an optimizer can step."""
    for part in module.modules():
        if _made_by(part, _SPREADING):
            part.reshard()  # type: ignore[operator]


def misplaced(module: torch.nn.Module, members: Sequence[int] | None) -> str | None:
    """Returns why a pipeline cannot train a module that is wrapped or spread so, with advice; None if it can.

    ``members`` are the ranks of the pipelines, no two of which may hold parts of one tensor. Without a flush it is
    None, and nothing may be spread.
    """
    tensors = [*module.parameters(), *module.buffers()]
    wrapper = next((name for part in module.modules() if (name := _made_by(part, _WRAPPERS))), None)
    if wrapper is not None and members is not None:
        return (
            f"{wrapper}, which sums gradients on its own after every backward; use fully_shard(module, mesh=...), or "
            "the plain module: gradients are summed over copies of the pipelines"
        )
    spreading = (name for part in (*module.modules(), *tensors) if (name := _made_by(part, _WRAPPERS + _SPREADING)))
    if members is None and (name := next(spreading, None)):
        return (
            f"{name}; FSDP, DDP and tensor parallelism cannot be used within a stage of a schedule without a flush: "
            "return the plain module, its replicas are kept equal and their gradients summed already. A Pipeline with "
            "a flush over one dimension of a mesh (group=) leaves the others to them"
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
    return next((kind.__name__ for kind in type(value).__mro__ if kind.__module__.startswith(modules)), None)
