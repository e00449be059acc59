"""Training with torch.distributed.pipelining: torchrun --nproc-per-node=4 theirs.py."""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from model import MICRO_BATCHES, STAGES, STEPS, batch, layer, loss

dist.init_process_group("gloo")
rank = dist.get_rank()
module = layer(rank)
stage = PipelineStage(module, rank, STAGES, torch.device("cpu"))
schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
for step in range(STEPS):
    x, y = batch(step)
    losses = []
    if rank == 0:
        schedule.step(x)
    elif rank == STAGES - 1:
        schedule.step(target=y, losses=losses)
    else:
        schedule.step()
    squares = torch.tensor([sum(float(p.grad.square().sum()) for p in module.parameters())])
    dist.all_reduce(squares)
    norm = squares.sqrt().squeeze()
    torch.nn.utils.clip_grads_with_norm_(module.parameters(), 0.1, norm)
    optimizer.step()
    optimizer.zero_grad()
    mean = torch.stack(losses).mean() if losses else torch.zeros(())
    dist.broadcast(mean, src=STAGES - 1)
    if rank == 0:
        print(f"step {step}  loss {float(mean):.4f}  norm {float(norm):.4f}")
dist.destroy_process_group()
