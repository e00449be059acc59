"""Tensors that are spread over ranks beside the pipelines; here all of each is on the only rank."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from chimera_runtime.errors import BadCheckpoint, Misuse
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.gradient_sums import scale_down, total_norm
from chimera_runtime.update.updates import Accumulation
from chimera_runtime.values.mesh_tensors import (
    give_memory,
    is_spread,
    is_unfilled,
    laid_out_like,
    local,
    misplaced,
    norms,
    rest,
    spread_like,
    whole,
)
from tests.unit.runtime.kept import Loop, compiled, mini_batch, pipeline, stage


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


# Stages on the meta device: nothing runs before weights are loaded, and then they are what other stages are.


CPU = torch.device("cpu")


def without_memory(number: int, stages: int) -> nn.Module:
    with torch.device("meta"):
        return stage(number, stages)


def test_what_has_two_names_stays_one_parameter_and_keeps_what_was_said_of_it() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    real = nn.Parameter(torch.ones(2), requires_grad=False)
    module[0].bias = real
    module[1].weight = module[0].weight
    weight = module[0].weight
    weight.decays = False
    give_memory(module, CPU, "model.py: stage 0")
    assert module[1].weight is module[0].weight is weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.device, weight.requires_grad, weight.decays) == (CPU, True, False)
    assert module[0].bias is real
    assert float(real.sum()) == 2, "what had a value keeps it"
    assert (is_unfilled(weight), is_unfilled(real)) == (True, False)


def test_a_buffer_that_no_file_has_is_refused() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.arange(4.0), persistent=False)

    with torch.device("meta"):
        module = Rotary()
    with pytest.raises(Misuse, match=r"model.py: stage 1 has the buffer angles on the meta device, which no file of"):
        give_memory(module, CPU, "model.py: stage 1")


def fails_to_run(pipe: Pipeline, folder: Path) -> None:
    asked = (
        lambda: pipe.step(mini_batch(0)),
        lambda: pipe.evaluate([mini_batch(0)]),
        lambda: next(iter(pipe.predict([mini_batch(0)]))),
        lambda: pipe.export_weights(folder / "none.pt"),
    )
    for call in asked:
        with pytest.raises(Misuse, match=r"were built on the meta device and have no values: load a file"):
            call()
    assert not (folder / "none.pt").exists()


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_file_of_weights_fills_them(alone: World, one_worker: Path, tmp_path: Path, suffix: str) -> None:
    with pipeline(one_worker) as whole, pipeline(one_worker, without_memory) as pipe:
        fails_to_run(pipe, tmp_path)
        whole.export_weights(tmp_path / f"model.{suffix}")
        assert pipe.load_weights(tmp_path / f"model.{suffix}") == []
        mine, theirs = pipe.step(mini_batch(0)), whole.step(mini_batch(0))
        assert mine is not None
        assert theirs is not None
        assert mine.loss == theirs.loss
        for parameter, other in zip(pipe.parameters(), whole.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad)


def test_a_file_without_buffers_is_not_enough(alone: World, one_worker: Path, tmp_path: Path) -> None:
    with pipeline(one_worker) as whole, pipeline(one_worker, without_memory) as pipe:
        torch.save({name: p.detach() for name, p in whole.named_parameters()}, tmp_path / "model.pt")
        pipe.load_weights(tmp_path / "model.pt")
        with pytest.raises(Misuse, match=r"stages.0.1.running_mean and 5 more of this rank were built on the meta"):
            pipe.step(mini_batch(0))
        torch.save({}, tmp_path / "empty.pt")
        with pytest.raises(BadCheckpoint, match="it has no parameter"):
            pipe.load_weights(tmp_path / "empty.pt")


def test_a_run_resumes_into_them_as_if_they_had_been_trained(alone: World, one_worker: Path, tmp_path: Path) -> None:
    loop = Loop(one_worker, tmp_path / "saved")
    loop.train(3)
    loop.checkpoints.save()
    loop.checkpoints.wait()
    after = loop.train(5)
    resumed = Loop(one_worker, tmp_path / "saved", without_memory)
    assert resumed.checkpoints.resume() is not None
    assert resumed.train(5) == after
    resumed.close()
    loop.close()


def test_the_end_of_a_tie_that_has_no_value_is_filled_with_the_other(alone: World, tmp_path: Path) -> None:
    directory = compiled(tmp_path / "out", 2, 0, 1)
    tied = [[(0, "0.weight"), (1, "0.weight")]]
    with pipeline(directory, tied=tied) as whole, pipeline(directory, without_memory, tied=tied) as pipe:
        whole.export_weights(tmp_path / "model.pt")
        pipe.load_weights(tmp_path / "model.pt")
        mine, theirs = pipe.step(mini_batch(0)), whole.step(mini_batch(0))
        assert mine is not None
        assert theirs is not None
        assert mine.loss == theirs.loss
