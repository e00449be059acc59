"""Schedules that were written for torch, on torch's own runtime: losses and gradients are those of one process.

A file for half of the ranks runs twice, with FSDP between the two copies of a stage.

    torchrun --nproc-per-node=4 in_torch.py FORM FILE.csv [FORM FILE.csv ..]
"""

import csv
import re
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor

WIDTH, ITEMS = 6, 2


def layer(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def check(file: str, form: str) -> None:
    """One update in torch beside the same in this process alone."""
    with open(file, newline="") as text:
        rows = [*csv.reader(text)]
    forwards = [{(int(s), int(m)) for s, m in re.findall(r"(\d+)F(\d+)", " ".join(row))} for row in rows]
    every = set().union(*forwards)
    depth, micro_batches = 1 + max(s for s, _ in every), 1 + max(m for _, m in every)
    copies = dist.get_world_size() // len(rows)
    mesh = init_device_mesh("cpu", (copies, len(rows)), mesh_dim_names=("copies", "ranks"))
    copy, rank = mesh["copies"].get_local_rank(), mesh["ranks"].get_local_rank()
    held = sorted({s for s, _ in forwards[rank]})
    modules = {stage: layer(stage) for stage in held}
    if copies > 1:
        for module in modules.values():
            fully_shard(module, mesh=mesh["copies"])
    device, group = torch.device("cpu"), mesh["ranks"].get_group()
    stages = [PipelineStage(module, s, depth, device, group=group) for s, module in modules.items()]
    schedule = _PipelineScheduleRuntime(stages, micro_batches, loss_fn=nn.functional.mse_loss)
    schedule._load_csv(file, format=form)
    torch.manual_seed(100)
    batches = [[torch.randn(ITEMS * micro_batches, WIDTH) for _ in range(2)] for _ in range(copies)]
    x, y = batches[copy]
    losses: list[torch.Tensor] = []
    last = depth - 1 in held
    schedule.step(*([x] if 0 in held else []), **({"target": y, "losses": losses} if last else {}))
    # The same in one process: micro-batch by micro-batch, in the order of their numbers.
    whole = nn.Sequential(*map(layer, range(depth)))
    expected = [
        nn.functional.mse_loss(whole(part), target)
        for batch in batches
        for part, target in zip(*(tensor.chunk(micro_batches) for tensor in batch), strict=True)
    ]
    torch.stack(expected).mean().backward()
    for stage, module in modules.items():
        for mine, theirs in zip(module.parameters(), whole[stage].parameters(), strict=True):
            gradient = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
            torch.testing.assert_close(gradient, theirs.grad, rtol=1e-12, atol=1e-14)
    if last:
        own = expected[copy * micro_batches : (copy + 1) * micro_batches]
        torch.testing.assert_close(torch.stack(losses), torch.stack(own), rtol=1e-12, atol=1e-14)


dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)
words = iter(sys.argv[1:])
for form, file in zip(words, words, strict=True):
    check(file, form)
    print(f"{form} {file}: equal")
dist.destroy_process_group()
