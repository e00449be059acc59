"""What a checkpoint costs the steps beside it: asynchronous, waited for, and none, in turns on the same pipeline.

torchrun --nproc-per-node=2 benchmarks/ranks/saving.py DIRECTORY FOLDER
"""

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import Checkpoints, Pipeline

WIDTH, SIZE, STEPS, ROUNDS = 1024, 16, 6, 7
"""A stage has 8 * WIDTH**2 parameters; a round has so many steps of each kind, and saves after the first."""


def build_stage(_stage: int, _stages: int) -> nn.Module:
    """Eight layers of 4 MiB of weights each."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over a micro-batch."""
    return (output - target).square().mean()


def main() -> None:
    """Prints medians relative to those of steps without a checkpoint."""
    dist.init_process_group("gloo")
    directory, folder = sys.argv[1:]
    x, y = torch.randn(2, SIZE, WIDTH)
    pipe = Pipeline(directory, build_stage, loss, (x, y))
    optimizer = torch.optim.AdamW(pipe.parameters())
    checkpoints = Checkpoints(Path(folder), pipe, optimizer, keep=1)
    batch = tuple(torch.randn(2, SIZE * pipe.micro_batches, WIDTH))

    def step() -> None:
        pipe.step(batch)
        optimizer.step()
        optimizer.zero_grad()

    def timed(kind: str) -> float:
        """Seconds of a round."""
        checkpoints.wait()
        dist.barrier()
        start = time.perf_counter()
        for number in range(STEPS):
            step()
            if not number and kind != "none":
                checkpoints.save()
            if not number and kind == "waited for":
                checkpoints.wait()
        dist.barrier()
        return time.perf_counter() - start

    kinds = ("none", "asynchronous", "waited for")
    for kind in kinds:
        timed(kind)
    rounds = [{kind: timed(kind) for kind in kinds} for _ in range(ROUNDS)]
    if dist.get_rank() == 0:
        saved = sum(p.nbytes for p in pipe.parameters()) * 3 / 2**20
        step_of = statistics.median(each["none"] for each in rounds) / STEPS
        print(f"{saved:.0f} MiB per rank: weights and two moments; {STEPS} steps to a checkpoint")
        for kind in kinds[1:]:
            ratio = statistics.median(each[kind] / each["none"] for each in rounds)
            steps = statistics.median((each[kind] - each["none"]) / step_of for each in rounds)
            print(f"{kind:12}  {ratio:.2f} of the time without one; a checkpoint costs {steps:.2f} steps")
    checkpoints.close()
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
