"""Tensors that are spread over ranks beside the pipelines; here all of each is on the only rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from chimera_runtime.ranks.world import World
from chimera_runtime.stage.gradient_sums import scale_down, total_norm
from chimera_runtime.update.updates import Accumulation
from chimera_runtime.values.mesh_tensors import (
    is_spread,
    laid_out_like,
    local,
    misplaced,
    norms,
    rest,
    spread_like,
    whole,
)


@pytest.fixture
def mesh(alone: World) -> DeviceMesh:
    return DeviceMesh("cpu", [0])


def spread(mesh: DeviceMesh, *values: float) -> Any:
    return distribute_tensor(torch.tensor(values), mesh, [Shard(0)])


def test_what_is_here_of_a_tensor_lies_in_its_memory_and_has_no_graph(mesh: DeviceMesh) -> None:
    for parameter in (nn.Parameter(torch.ones(2)), nn.Parameter(spread(mesh, 1.0, 1.0))):
        part = local(parameter)
        part.mul_(3)
        assert not is_spread(part)
        assert not part.requires_grad
        assert whole(parameter).tolist() == [3, 3]


def test_a_tensor_is_made_in_the_layout_of_another_one_without_a_copy(mesh: DeviceMesh) -> None:
    memory = torch.zeros(2)
    made = spread_like(spread(mesh, 1.0, 2.0), memory)
    memory.fill_(5)
    assert is_spread(made)
    assert whole(made).tolist() == [5, 5]
    assert spread_like(torch.ones(2), memory) is memory


def test_a_gradient_takes_the_layout_of_its_parameter(mesh: DeviceMesh) -> None:
    parameter = distribute_tensor(torch.ones(2), mesh, [Replicate()])
    gradient = type(parameter).from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    assert laid_out_like(parameter, gradient).placements == (Replicate(),)  # type: ignore[attr-defined]
    assert laid_out_like(parameter, parameter) is parameter


def test_norms_and_clipping_take_plain_tensors_and_parts_together(alone: World, mesh: DeviceMesh) -> None:
    gradients = [torch.tensor([3.0]), spread(mesh, 0.0, 4.0), torch.zeros(1)]
    assert norms(gradients, 2.0) == [3.0, 4.0]
    norm = total_norm(alone.control_group, alone.job, {(0,): gradients, (1,): []}, 2.0)
    assert float(norm) == 5.0
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    scale_down(parameters, 1.0, norm)
    assert [whole(g).tolist() for g in gradients] == [pytest.approx(v, rel=1e-5) for v in ([0.6], [0, 0.8], [0])]


def test_parts_of_gradients_accumulate(mesh: DeviceMesh) -> None:
    parameter = nn.Parameter(spread(mesh, 0.0, 0.0))
    accumulation = Accumulation({"weight": parameter})
    for step, value in enumerate((2.0, 4.0)):
        accumulation.begin(step > 0)
        parameter.grad = spread(mesh, value, 0.0)
        accumulation.end(SimpleNamespace(weight=1.0))  # type: ignore[arg-type]
    assert whole(parameter.grad).tolist() == [3, 0]


def test_after_a_forward_a_module_has_the_parameters_of_its_optimizer_again(mesh: DeviceMesh) -> None:
    module = fully_shard(nn.Linear(2, 2), mesh=mesh)
    stepped = [*module.parameters()]
    with torch.no_grad():
        module(torch.ones(1, 2))
    assert not any(map(is_spread, module.parameters()))
    rest(module)
    assert [*map(id, module.parameters())] == [*map(id, stepped)]


def test_a_stage_may_be_spread_over_ranks_of_other_pipelines_alone(mesh: DeviceMesh) -> None:
    """The mesh has rank 0; what it says of more ranks is put in its place."""
    module = fully_shard(nn.Linear(2, 2), mesh=mesh)
    assert "FSDPLinear; FSDP, DDP and tensor" in (misplaced(module, None) or "")
    assert misplaced(module, (0, 1)) is None
    assert misplaced(nn.Linear(2, 2), None) is None

    class Pretended(nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([SimpleNamespace(device_mesh=SimpleNamespace(mesh=torch.tensor([0, 1])))])

    assert "the ranks 0, 1, which are all of one pipeline" in (misplaced(Pretended(), (0, 1)) or "")
    assert misplaced(Pretended(), (0, 2)) is None


def test_a_wrapper_that_sums_on_its_own_is_refused_over_other_ranks_as_well(alone: World) -> None:
    module = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    assert "use fully_shard(module, mesh=...)" in (misplaced(module, (0, 1)) or "")
    assert "FSDP, DDP and tensor parallelism cannot be used" in (misplaced(module, None) or "")
