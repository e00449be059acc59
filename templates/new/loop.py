"""A training loop of your own, on the model file beside it:

    chimera new model.py
    chimera compile chimera
    torchrun --nproc-per-node=4 loop.py

The process group, the data, the optimizer and the loop are yours; the pipeline computes losses and gradients.
"""

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from chimera_runtime import Layers, Pipeline
from model import dataset, layers, loss, optimizer

OUTPUT = "chimera.out"  # what `chimera compile` wrote
MICRO_BATCH_SIZE = 8
STEPS = 20

torch.manual_seed(0)
dist.init_process_group("gloo")  # "nccl" on GPUs
items = dataset()
example = default_collate([items[i] for i in range(MICRO_BATCH_SIZE)])  # it tells sizes, shapes and types
with Pipeline(OUTPUT, Layers(layers()), loss, example) as pipe:
    stepper = optimizer(pipe.parameters())  # of the stages that this rank holds
    for step, batch in zip(range(STEPS), pipe.loader(items, shuffle=True)):
        outcome = pipe.step(batch)  # forwards, backwards and sums: .grad is that of the whole mini-batch
        pipe.clip_grad_norm_(1.0)
        stepper.step()
        stepper.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}/{STEPS}  loss {outcome.loss:.4f}", flush=True)
dist.destroy_process_group()
