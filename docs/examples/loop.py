"""Training in a loop of one's own: torchrun --nproc-per-node=4 docs/examples/loop.py, beside chimera.out."""

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from chimera_runtime import Pipeline
from tiny import build_stage, dataset, loss

dist.init_process_group("gloo")
items = dataset()
example = default_collate([items[i] for i in range(4)])  # one micro-batch: it tells sizes and shapes
with Pipeline("chimera.out", build_stage, loss, example) as pipe:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for batch in pipe.loader(items, shuffle=True):
        outcome = pipe.step(batch)  # now .grad is the gradient of the mini-batch, the sum over all replicas
        norm = pipe.clip_grad_norm_(1.0)  # of the whole model
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:  # the numbers are the same on every rank
            print(f"loss {outcome.loss:.4f}  norm {norm:.4f}")
dist.destroy_process_group()
