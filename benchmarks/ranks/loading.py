"""Steps on items that take 5 ms to load, by data workers and by the rank itself, and on instant ones, in turns.

torchrun --nproc-per-node=2 benchmarks/ranks/loading.py DIRECTORY WORKERS
"""

import json
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import Pipeline

WIDTH, SIZE, SECONDS = 1024, 4, 0.005
STEPS, ROUNDS = 10, 20
"""A round has so many steps of each kind that count, behind as many as data workers have loaded meanwhile."""


class Items:
    """Random vectors, each of which takes some time to load, as from a disk or a decoder that is elsewhere."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, _number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._seconds:
            time.sleep(self._seconds)
        return torch.rand(WIDTH), torch.rand(WIDTH)


def build_stage(_stage: int, _stages: int) -> nn.Module:
    """Enough computing for loading to hide behind: matrix products on the CPU, which the ranks share with workers."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def main() -> None:
    """Prints, as JSON, the items of a mini-batch, and the seconds of a step of each kind in each round."""
    warnings.filterwarnings("ignore", "This DataLoader will create")  # they sleep
    dist.init_process_group("gloo")
    directory, workers = sys.argv[1], int(sys.argv[2])
    example = torch.rand(2, SIZE, WIDTH).unbind()
    pipe = Pipeline(directory, build_stage, nn.functional.mse_loss, example)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
    worked = pipe.loader(Items(SECONDS), shuffle=True, num_workers=workers)
    loaders = {
        "instant": pipe.loader(Items(0.0), shuffle=True),
        f"5 ms, {workers} data workers": worked,
        "5 ms, no data worker": pipe.loader(Items(SECONDS), shuffle=True),
    }
    iterators = {kind: iter(loader) for kind, loader in loaders.items()}

    def steps(batches: Iterator[Any], before: int) -> float:
        """Seconds of a step, over those that count; some before them do not."""
        for number, batch in enumerate(islice(batches, before + STEPS)):
            if number == before:
                dist.barrier()
                start = time.perf_counter()
            pipe.step(batch)
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        return (time.perf_counter() - start) / STEPS

    samples: dict[str, list[float]] = {kind: [] for kind in loaders}
    for number in range(ROUNDS + 1):
        for kind, batches in iterators.items():
            seconds = steps(batches, 3 * workers if loaders[kind] is worked else 1)
            if number:
                samples[kind].append(seconds)
    if dist.get_rank() == 0:
        print(json.dumps([SIZE * pipe.micro_batches, samples]))
    for loader in loaders.values():
        loader.close()
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
