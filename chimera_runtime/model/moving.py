"""Stages come to the device of their rank, from the CPU or from nowhere; one of another device is a mistake."""

from collections.abc import Iterator

import torch

from chimera_runtime.blame import UserCode
from chimera_runtime.errors import MISUSED, Misuse
from chimera_runtime.values.sendable import is_on


def moved(module: torch.nn.Module, device: torch.device, stage: int, where: str) -> torch.nn.Module:
    """The module of a stage on a device; ``where`` says in messages which it is.

    Raises
    ------
    Misuse
        If it was built on another device than this one and the CPU, or a part of it stays where it was.
    ModelError
        If it cannot be moved.
    """
    for name, tensor in _tensors(module):
        if not is_on(tensor, device) and tensor.device.type != "cpu":
            raise Misuse(
                f"{where} has {name} on {tensor.device}, and its rank computes on {device}: build it on the CPU, from "
                "where it is moved, and leave the choice of a device to the pipeline (in train.py to --device)"
            )
    with UserCode(f"placing stage {stage} on {device}", MISUSED):
        placed = module.to(device)
    for name, tensor in _tensors(placed):
        if not is_on(tensor, device):
            raise Misuse(
                f"{where} has {name} on {tensor.device}, also after module.to({str(device)!r}): a stage has to be one "
                "that moves as a whole"
            )
    return placed


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
