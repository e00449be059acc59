"""Steps on items that take 5 ms to load, by data workers and by the rank itself, and on instant ones, in turns.

torchrun --nproc-per-node=2 benchmarks/ranks/loading.py DIRECTORY WORKERS computing|waiting
"""

import json
import multiprocessing
import sys
import time
import warnings
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import Pipeline

WIDTH, SIZE, SECONDS, FORWARD = 1024, 4, 0.005, 0.003
STEPS, ROUNDS = 10, 12
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


def computing(_stage: int, _stages: int) -> nn.Module:
    """Enough computing for loading to hide behind: matrix products on the CPU, which the ranks share with workers."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


class Waiting(nn.Module):
    """Sleeps about as long as the matrix products take: like a rank that waits for a GPU it leaves the CPU free."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The scaled input; a backward takes twice as long."""
        time.sleep(FORWARD)
        scaled = x * self.scale
        if scaled.requires_grad:
            scaled.register_hook(lambda _gradient: time.sleep(2 * FORWARD))
        return scaled


STAGES = {"computing": computing, "waiting": lambda _stage, _stages: Waiting()}


def cpu_of_children() -> float:
    """The CPU seconds of all data workers of this rank so far, by the clocks that Linux has for processes."""
    return sum(time.clock_gettime(~child.pid << 3 | 2) for child in multiprocessing.active_children() if child.pid)


def main() -> None:
    """Prints, as JSON, the items of a mini-batch, and per round and kind the seconds of a step and workers' CPU."""
    warnings.filterwarnings("ignore", "This DataLoader will create")  # they sleep
    dist.init_process_group("gloo")
    directory, workers, stages = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    example = torch.rand(2, SIZE, WIDTH).unbind()
    pipe = Pipeline(directory, STAGES[stages], nn.functional.mse_loss, example)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
    kinds = {
        f"{said}, {count} data workers": (seconds, count)
        for said, seconds in (("instant", 0.0), ("5 ms", SECONDS))
        for count in (0, workers)
    }
    loaders = {
        kind: pipe.loader(Items(seconds), shuffle=True, num_workers=count) for kind, (seconds, count) in kinds.items()
    }
    iterators = {kind: iter(loader) for kind, loader in loaders.items()}

    def steps(kind: str) -> list[float]:
        """Seconds of a step and CPU seconds of all data workers, over those that count; some before them do not."""
        before = 1 + 3 * kinds[kind][1]
        for number, batch in enumerate(islice(iterators[kind], before + STEPS)):
            if number == before:
                dist.barrier()
                cpu, start = cpu_of_children(), time.perf_counter()
            pipe.step(batch)
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        seconds, used = time.perf_counter() - start, torch.tensor(cpu_of_children() - cpu, dtype=torch.float64)
        dist.all_reduce(used)
        return [seconds / STEPS, used.item() / STEPS]

    samples: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for number in range(ROUNDS + 1):
        for kind, rounds in samples.items():
            sample = steps(kind)
            if number:
                rounds.append(sample)
    if dist.get_rank() == 0:
        print(json.dumps([SIZE * pipe.micro_batches, samples]))
    for loader in loaders.values():
        loader.close()
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
