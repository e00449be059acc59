"""Checks that outputs of stages can be sent: dense tensors on the rank's device, of a dtype of the backend."""

from collections.abc import Iterable

import torch

from chimera_runtime.errors import values as mistakes

_OF_NCCL = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
}
"""dtypes that NCCL sends, from torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp; complex numbers go as pairs."""


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device; the number of a CPU does not matter."""
    if tensor.device.type != device.type:
        return False
    return device.type != "cuda" or device.index in (None, tensor.device.index)


def require_here(stage: int, outputs: Iterable[torch.Tensor], device: torch.device) -> None:
    """Raises `Misuse` unless the outputs of a stage are on the rank's device."""
    for output in outputs:
        if not is_on(output, device):
            raise mistakes.output_is_elsewhere(stage, str(output.device), str(device))


def require_sendable(stage: int, outputs: Iterable[torch.Tensor], backend: str) -> None:
    """Raises `Misuse` if an output of a stage is sparse, nested or quantised, or NCCL has no such dtype."""
    for output in outputs:
        if output.layout != torch.strided:
            raise mistakes.output_is_not_dense(stage, str(output.layout))
        if output.is_quantized:
            raise mistakes.output_is_quantised(stage, str(output.dtype))
        if backend == "nccl" and output.dtype.to_real() not in _OF_NCCL:
            raise mistakes.dtype_is_not_of_nccl(stage, str(output.dtype))
