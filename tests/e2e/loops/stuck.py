"""A rank that is stuck outside of the pipeline: torchrun --nproc-per-node=2 stuck.py DIRECTORY."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import Pipeline

dist.init_process_group("gloo")
dist.barrier()  # the time-out is for what happens in the pipeline, and not for ranks that start late
x = torch.ones(8, 4)
pipe = Pipeline(sys.argv[1], lambda *_: nn.Linear(4, 4), nn.functional.mse_loss, example=(x[:2], x[:2]), timeout=5)
pipe.step((x, x))
if dist.get_rank() == 0:
    time.sleep(1000)
pipe.clip_grad_norm_(1.0)
