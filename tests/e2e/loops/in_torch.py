"""Schedules that were written for torch, on torch's own runtime: losses and gradients are those of one process.

torchrun --nproc-per-node=4 in_torch.py FORM FILE.csv [FORM FILE.csv ..]
"""

import csv
import re
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

WIDTH, ITEMS = 6, 2


def layer(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def check(file: str, form: str) -> None:
    """One update in torch beside the same in this process alone."""
    rank = dist.get_rank()
    with open(file, newline="") as text:
        rows = [*csv.reader(text)]
    forwards = [{(int(s), int(m)) for s, m in re.findall(r"(\d+)F(\d+)", " ".join(row))} for row in rows]
    every = set().union(*forwards)
    depth, micro_batches = 1 + max(s for s, _ in every), 1 + max(m for _, m in every)
    held = sorted({s for s, _ in forwards[rank]})
    modules = [layer(stage) for stage in range(depth)]
    stages = [PipelineStage(modules[s], s, depth, torch.device("cpu")) for s in held]
    schedule = _PipelineScheduleRuntime(stages, micro_batches, loss_fn=nn.functional.mse_loss)
    schedule._load_csv(file, format=form)
    torch.manual_seed(100)
    x, y = (torch.randn(ITEMS * micro_batches, WIDTH) for _ in range(2))
    losses: list[torch.Tensor] = []
    last = depth - 1 in held
    schedule.step(*([x] if 0 in held else []), **({"target": y, "losses": losses} if last else {}))
    # The same in one process: micro-batch by micro-batch, in the order of their numbers.
    whole = nn.Sequential(*map(layer, range(depth)))
    parts = zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)
    expected = [nn.functional.mse_loss(whole(part), target) for part, target in parts]
    torch.stack(expected).mean().backward()
    for stage in held:
        for mine, theirs in zip(modules[stage].parameters(), whole[stage].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    if last:
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-12, atol=1e-14)


dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)
words = iter(sys.argv[1:])
for form, file in zip(words, words, strict=True):
    check(file, form)
    print(f"{form} {file}: equal")
dist.destroy_process_group()
