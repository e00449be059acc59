"""Stages that are spread over the other dimension of a mesh, beside one process; every rank prints how far it is off.

torchrun --nproc-per-node=4 mesh.py shards|tensors DIRECTORY..
"""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from chimera_runtime import Checkpoints, Misuse, Pipeline

B, N, WIDTH, ROWS, STAGES = 2, 2, 6, 2, 2


def plain(stage: int, _stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, WIDTH), nn.LayerNorm(WIDTH)).double()


def shards(mesh: DeviceMesh, stage: int, stages: int) -> nn.Module:
    module = plain(stage, stages)
    fully_shard(module[0], mesh=mesh)
    return fully_shard(module, mesh=mesh)


def tensors(mesh: DeviceMesh, stage: int, stages: int) -> nn.Module:
    return parallelize_module(plain(stage, stages), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def skipped(pipe: Pipeline, optimizer: torch.optim.Optimizer, batch: torch.Tensor, row: int) -> None:
    """Infinity in one row of the mesh is known in all."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = batch
    pipe.step((x * (torch.inf if row else 1.0), y), scaler=scaler)
    before = [whole(p).detach().clone() for p in pipe.parameters()]
    pipe.unscale_(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(whole(p), weight) for p, weight in zip(pipe.parameters(), before, strict=True))


def saved(pipe: Pipeline, optimizer: torch.optim.Optimizer, directory: str, row: int) -> None:
    """The rows are one model, which resumes as it was; those of several models are refused."""
    checkpoints = Checkpoints(directory, pipe, optimizer)
    checkpoints.save()
    before = [whole(p).detach().clone() for p in pipe.parameters()]
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    checkpoints.wait()
    assert checkpoints.resume() is not None
    assert all(torch.equal(whole(p), weight) for p, weight in zip(pipe.parameters(), before, strict=True))
    checkpoints.close()
    refused = [f"{directory}.{row}"]
    plain = next((p for p in pipe.parameters() if not hasattr(p, "device_mesh")), None)
    if plain is not None:
        plain.data.add_(row)
        refused.append(directory)
    for name in refused:
        with pytest.raises(Misuse, match="all ranks save one model in one directory"):
            Checkpoints(name, pipe, optimizer)


def train(directory: str, how: str) -> None:
    mesh = init_device_mesh("cpu", (ROWS, STAGES), mesh_dim_names=("other", "pp"))
    build = partial({"shards": shards, "tensors": tensors}[how], mesh["other"])
    rows, row = (ROWS, mesh["other"].get_local_rank()) if how == "shards" else (1, 0)
    generator = torch.Generator().manual_seed(3)
    batches = torch.randn(5, 2, rows, B * N, WIDTH, generator=generator, dtype=torch.float64)

    example = batches[0, :, row, :B]
    pipe = Pipeline(directory, build, loss, (example[0], example[1]), group=mesh["pp"].get_group())
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    reference = nn.Sequential(*[plain(stage, STAGES) for stage in range(STAGES)])
    alone = torch.optim.AdamW(reference.parameters(), lr=0.05)

    said, worst = f"rank {dist.get_rank()}: {Path(directory).name}", 0.0
    for several in (batches[:1], batches[1:2], batches[2:4], batches[4:]):
        for number, (x, y) in enumerate(several[:, :, row]):
            pipe.step((x, y), accumulate=number > 0)
        judged = pipe.evaluate([(x, y), (x[:3], y[:3])])
        norm = pipe.clip_grad_norm_(0.05)
        with torch.no_grad():
            wanted = (loss(reference(x), y) * len(x) + loss(reference(x[:3]), y[:3]) * 3) / (len(x) + 3)
        worst = max(worst, abs(judged - float(wanted)))
        x, y = several.transpose(0, 1).reshape(2, -1, WIDTH)
        loss(reference(x), y).backward()
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        worst = max(worst, float(abs(norm - wanted)))
        for stage, module in pipe.stages.items():
            for mine, theirs in zip(module.parameters(), reference[stage].parameters(), strict=True):
                worst = max(worst, float((whole(mine.grad) - theirs.grad).abs().max()))
        for optimizer_of_one in (optimizer, alone):
            optimizer_of_one.step()
            optimizer_of_one.zero_grad()
        for stage, module in pipe.stages.items():
            for mine, theirs in zip(module.parameters(), reference[stage].parameters(), strict=True):
                worst = max(worst, float((whole(mine) - theirs).detach().abs().max()))
    if how == "shards":
        skipped(pipe, optimizer, batches[0, :, row], mesh["other"].get_local_rank())
    for remark in pipe.remarks:
        print(f"{said}: {remark}", flush=True)
    kinds = {type(p).__name__ for p in pipe.parameters()}
    print(f"{said}: {' '.join(sorted(kinds))}: off by {worst:.1e}", flush=True)
    saved(pipe, optimizer, f"{directory}.{how}", mesh["other"].get_local_rank())
    with pipe:
        pass


def main() -> None:
    """One after the other: what torch finds out about DTensors stays known."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    how, *directories = sys.argv[1:]
    for directory in directories:
        train(directory, how)
    dist.destroy_process_group()


main()
