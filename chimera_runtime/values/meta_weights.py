"""Weights of stages that were built on the meta device: they get memory, but no values until weights are loaded."""

from collections.abc import Mapping

import torch

from chimera_runtime.errors import values as mistakes

_MARK = "_has_no_value_yet"


def give_memory(module: torch.nn.Module, device: torch.device, where: str) -> None:
    """Gives memory, filled with zeros, to the parameters and buffers of a module that are on the meta device.

    A parameter remains the same object, so if it has two names, both still mean one parameter.

    Raises `Misuse` if a buffer on the meta device is not in the state dict, so that nothing could fill it; ``where``
    names the stage.
    """
    saved = module.state_dict(keep_vars=True)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.is_meta:
            continue
        if name not in saved:
            raise mistakes.buffer_has_no_values(where, name)
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
        raise mistakes.tensors_have_no_values(empty, remedy)
