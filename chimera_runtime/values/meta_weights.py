"""Stages that were built on the meta device: they have memory of their own, and no values until weights are loaded."""

from collections.abc import Mapping

import torch

from chimera_runtime.errors import Misuse

_MARK = "_has_no_value_yet"


def give_memory(module: torch.nn.Module, device: torch.device, where: str) -> None:
    """Gives memory, for now of zeros, to the parameters and buffers of a module that are on the meta device.

    They remain the same objects, so that what a module has under two names stays one parameter.

    Raises
    ------
    Misuse
        If one is a buffer that no state dict has, so that nothing could fill it; ``where`` says of what.
    """
    kept = module.state_dict(keep_vars=True)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.is_meta:
            continue
        if name not in kept:
            raise Misuse(
                f"{where} has the buffer {name} on the meta device, which no file of weights has (persistent=False): "
                'compute it on a real device, as under torch.device("cpu")'
            )
        real: torch.Tensor = torch.zeros_like(tensor, device=device)
        if isinstance(tensor, torch.nn.Parameter):
            real = torch.nn.Parameter(real, tensor.requires_grad)
        real.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]
        setattr(tensor, _MARK, True)


def is_unfilled(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no value yet."""
    return hasattr(tensor, _MARK)


def fill(tensor: torch.Tensor) -> None:
    """A tensor has got its value."""
    if hasattr(tensor, _MARK):
        delattr(tensor, _MARK)


def require_values(tensors: Mapping[str, torch.Tensor], to_do: str) -> None:
    """Passes if all tensors have values.

    Raises
    ------
    Misuse
        If some have none; ``to_do`` is what gives them some.
    """
    empty = [name for name, tensor in tensors.items() if is_unfilled(tensor)]
    if empty:
        further = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise Misuse(f"{empty[0]}{further} of this rank were built on the meta device and have no values: {to_do}")
