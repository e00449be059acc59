"""Training with a compiled schedule: torchrun --nproc-per-node=4 ours.py, beside schedule.out."""

import torch
import torch.distributed as dist

from chimera_runtime import Pipeline
from model import STEPS, B, batch, layer, loss

dist.init_process_group("gloo")
x, y = batch(0)
with Pipeline("schedule.out", lambda stage, _: layer(stage), loss, example=(x[:B], y[:B])) as pipe:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for step in range(STEPS):
        outcome = pipe.step(batch(step))
        norm = pipe.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {outcome.loss:.4f}  norm {norm:.4f}")
dist.destroy_process_group()
