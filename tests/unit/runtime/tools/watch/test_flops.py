"""Floating-point operations by hand, and the peaks of devices."""

import pytest
import torch
from torch import nn

from chimera_runtime.errors import Misuse
from chimera_runtime.ranks.world import World
from chimera_runtime.tools.watch.memory import computing_dtype, of_stage, peak_of, peak_seconds
from tests.unit.runtime.models import facts, model, setting
from tests.unit.runtime.thread_ranks import alone_job, job, together, worlds

B = 3
FIRST, LAST = 2 * B * 2 * 2, 2 * B * 2
"""A product of B by 2 with 2 by 2 numbers, and one with 2 by 1: a sum and a product for each number of either."""


def test_a_backward_computes_twice_what_a_forward_does_but_for_the_input_of_the_first_stage(alone: World) -> None:
    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world, options=f"--micro-batch-size {B}")
        assert of_stage(made, built[0], 0) == 2 * FIRST
        assert of_stage(made, built[1], 1) == 3 * LAST


def test_a_stage_is_as_it_was_after_it_was_counted(alone: World) -> None:
    class Noisy(nn.Module):
        def __init__(self, *_: int) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)  # type: ignore[no-any-return]

    with worlds(alone, alone_job(stages=1)) as (world,):
        made, built = setting(world, facts(0), model(Noisy), options=f"--micro-batch-size {B}")
        before, drawn = {k: v.clone() for k, v in built[0].state_dict().items()}, torch.get_rng_state()
        assert of_stage(made, built[0], 0) == 2 * FIRST
    assert all(torch.equal(tensor, before[name]) for name, tensor in built[0].state_dict().items())
    assert all(parameter.grad is None for parameter in built[0].parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_all_ranks_together_need_the_time_of_an_update_at_their_peaks(alone: World) -> None:
    """Two workers, two copies, two micro-batches; every stage is counted once, and all four devices take part."""
    with worlds(alone, job(), copies=2) as ranks:

        def seconds(world: World) -> float:
            made, built = setting(world, facts(world.place.worker), options=f"--micro-batch-size {B}")
            return peak_seconds(made, built, 0.5, torch.float64)

        found = together([lambda world=world: seconds(world) for world in ranks])  # type: ignore[misc]
    operations = 2 * 2 * (2 * FIRST + 3 * LAST)
    assert found == [pytest.approx(operations / (4 * 0.5e12))] * 4


def test_the_peak_of_a_cpu_has_to_be_given(alone: World) -> None:
    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world)
        with pytest.raises(
            Misuse, match="--device-peak auto: the peak of cpu in float64 is not known; give its TFLOPS"
        ):
            peak_seconds(made, built, None, torch.float64)


@pytest.mark.parametrize(
    ("device", "dtype", "tensor_float", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, False, 312e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, True, 156e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, False, 19.5e12),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", torch.bfloat16, False, None),
        ("NVIDIA H100 80GB HBM3", torch.float16, False, 989.5e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, False, 756.5e12),
        ("NVIDIA H200 NVL", torch.bfloat16, False, 835.5e12),
        ("NVIDIA GH200 480GB", torch.float64, False, 67e12),
        ("NVIDIA GB200", torch.bfloat16, False, 2500e12),
        ("NVIDIA A10G", torch.bfloat16, False, None),
        ("NVIDIA L4", torch.float64, False, None),
        ("NVIDIA H100 PCIe", torch.float8_e4m3fn, False, None),
        ("cpu", torch.float32, False, None),
    ],
)
def test_a_device_is_known_by_words_of_its_name(
    device: str, dtype: torch.dtype, tensor_float: bool, peak: float | None
) -> None:
    assert peak_of(device, dtype, tensor_float) == peak


def test_products_are_in_the_dtype_of_autocast_or_of_most_weights() -> None:
    modules = {0: nn.Linear(9, 9).bfloat16(), 1: nn.LayerNorm(9)}
    assert computing_dtype(modules, None) is torch.bfloat16
    assert computing_dtype(modules, torch.float16) is torch.float16
    assert computing_dtype({}, None) is torch.float32
