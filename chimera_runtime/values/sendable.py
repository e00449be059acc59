"""What a stage may hand to another worker: dense tensors on the rank's device, of a dtype that the backend knows."""

from collections.abc import Iterable

import torch

from chimera_runtime.errors import Misuse

_OF_NCCL = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
}
"""As torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp lists them; complex numbers travel as pairs. gloo sends bytes."""


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device; the CPU is one device, whatever its number."""
    if tensor.device.type != device.type:
        return False
    return device.type != "cuda" or device.index in (None, tensor.device.index)


def require_here(stage: int, outputs: Iterable[torch.Tensor], device: torch.device) -> None:
    """Passes if what a stage returned is on the rank's device.

    Raises
    ------
    Misuse
        If a tensor is elsewhere.
    """
    for output in outputs:
        if not is_on(output, device):
            raise Misuse(
                f"stage {stage} returned a tensor on {output.device}, and its rank computes on {device}: make what a "
                "forward makes on the device of its input, as in torch.zeros(.., device=x.device)"
            )


def require_sendable(stage: int, outputs: Iterable[torch.Tensor], backend: str) -> None:
    """Passes if a backend can send what a stage returned.

    Raises
    ------
    Misuse
        If a tensor is sparse, nested or quantised, or of a dtype that NCCL does not know.
    """
    for output in outputs:
        if output.layout != torch.strided:
            raise Misuse(
                f"stage {stage} returned a tensor of layout {output.layout}, which is no message: return a dense one, "
                "as to_dense() makes it"
            )
        if output.is_quantized:
            raise Misuse(
                f"stage {stage} returned a quantised tensor, of {output.dtype}, which is no message: return "
                "dequantize(), or its int_repr() and its scale as tensors"
            )
        if backend == "nccl" and output.dtype.to_real() not in _OF_NCCL:
            raise Misuse(
                f"stage {stage} returned a tensor of {output.dtype}, which the backend nccl cannot send: return it "
                "in another dtype, as torch.int32 or torch.uint8, or use the backend gloo"
            )
