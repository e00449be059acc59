"""What a stage must not hand on, and which dtypes go where: gloo sends bytes, NCCL numbers that it knows."""

from typing import Any

import pytest
import torch

from chimera_runtime.errors import Misuse
from chimera_runtime.values.nested import is_on, require_here, require_sendable

CPU = torch.device("cpu")


def refused(output: torch.Tensor, backend: str = "gloo") -> str:
    with pytest.raises(Misuse) as error:
        require_sendable(3, [torch.zeros(1), output], backend)
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.uint32, torch.uint64])
def test_what_nccl_does_not_know_is_refused_there_alone(dtype: torch.dtype) -> None:
    output = torch.zeros(2, dtype=dtype)
    require_sendable(3, [output], "gloo")
    assert refused(output, "nccl").startswith(
        f"stage 3 returned a tensor of {dtype}, which the backend nccl cannot send: return it in another dtype"
    )


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
    ],
)
def test_what_nccl_knows_passes_and_complex_numbers_as_pairs(dtype: torch.dtype) -> None:
    require_sendable(3, [torch.zeros(2, dtype=dtype)], "nccl")


@pytest.mark.parametrize("backend", ["gloo", "nccl", "strict"])
def test_a_sparse_tensor_is_no_message(backend: str) -> None:
    assert "stage 3 returned a tensor of layout torch.sparse_coo" in refused(torch.eye(2).to_sparse(), backend)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
def test_a_quantised_tensor_is_no_message() -> None:
    output: Any = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    assert refused(output).startswith("stage 3 returned a quantised tensor, of torch.qint8, which is no message")


def test_a_tensor_elsewhere_is_refused_with_both_devices() -> None:
    require_here(3, [torch.zeros(2)], CPU)
    with pytest.raises(Misuse, match="stage 3 returned a tensor on meta, and its rank computes on cpu: make what"):
        require_here(3, [torch.zeros(2), torch.zeros(2, device="meta")], CPU)


def test_the_cpu_is_one_device_and_a_gpu_one_of_several() -> None:
    on_cpu = torch.zeros(1, device="cpu:0")
    assert is_on(on_cpu, CPU)
    assert not is_on(on_cpu, torch.device("cuda", 0))
    with torch._subclasses.fake_tensor.FakeTensorMode():
        on_gpu = torch.zeros(1, device="cuda:1")
    assert [is_on(on_gpu, torch.device(name)) for name in ("cuda:1", "cuda", "cuda:0", "cpu")] == [
        *(True, True, False, False)
    ]
