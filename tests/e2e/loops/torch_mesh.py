"""A schedule of torch's interface over one dimension of a mesh, with FSDP2 over the other; as one process trains.

torchrun --nproc-per-node=4 torch_mesh.py SCHEDULE, a class of torch or a directory for two workers.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

from chimera_runtime import CompiledSchedule, stages_of

B, N, WIDTH, STAGES, ROWS = 2, 4, 6, 2, 2


def layer(stage: int) -> nn.Sequential:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, WIDTH)).double()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def main() -> None:
    torch.set_num_threads(1)
    (how,) = sys.argv[1:]
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (ROWS, STAGES), mesh_dim_names=("dp", "pp"))
    row, group = mesh["dp"].get_local_rank(), mesh["pp"].get_group()
    held = stages_of(how, dist.get_rank(group)) if Path(how).is_dir() else (dist.get_rank(group),)
    stages = [
        PipelineStage(fully_shard(layer(s), mesh=mesh["dp"]), s, STAGES, torch.device("cpu"), group=group) for s in held
    ]
    if Path(how).is_dir():
        schedule = CompiledSchedule(how, stages, loss)
    else:
        schedule = getattr(schedules, how)(stages, N, loss)
    whole = nn.Sequential(*map(layer, range(STAGES)))
    optimizers = [
        torch.optim.AdamW(parameters, lr=0.05)
        for parameters in (whole.parameters(), [p for stage in stages for p in stage.submod.parameters()])
    ]
    generator = torch.Generator().manual_seed(3)
    worst = 0.0
    for _ in range(3):
        x, y = torch.randn(2, ROWS, B * N, WIDTH, generator=generator, dtype=torch.float64)
        losses: list[torch.Tensor] = []
        inputs = (x[row],) if any(stage.is_first for stage in stages) else ()
        if any(stage.is_last for stage in stages):
            schedule.step(*inputs, target=y[row], losses=losses)
            expected = loss(whole(x[row]), y[row])
            worst = max(worst, float((torch.stack(losses).mean() - expected).abs()))
        else:
            schedule.step(*inputs)
        loss(whole(x.flatten(0, 1)), y.flatten(0, 1)).backward()
        for stage in stages:
            of_whole = whole[stage.stage_index].parameters()
            for mine, theirs in zip(stage.submod.parameters(), of_whole, strict=True):
                worst = max(worst, float((mine.grad.full_tensor() - theirs.grad).abs().max()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    print(f"rank {dist.get_rank()}: off by {worst:.1e}", flush=True)
    dist.destroy_process_group()


main()
