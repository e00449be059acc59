"""Updates with another number of micro-batches each, beside the same in one process.

torchrun --nproc-per-node=4 several_numbers.py DIRECTORY UPDATES [counts] [functions | lists | loader] [sharded]

Copies have other numbers, also none. With ``counts`` the loss is a sum and a count, which differs by micro-batch. Step
gets tensors, functions of a micro-batch, lists of them, or mini-batches of a loader.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import Pipeline

SIZE, WIDTH, LARGEST = 2, 6, 16
ASKED = {*sys.argv[3:]}
COUNTS = "counts" in ASKED


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(value))


def build(stage: int, _stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return Part().double()


def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
    squares = (output - target).square()
    return (squares.sum(), (target > 0).sum()) if COUNTS else squares.mean()


class Drawn(torch.utils.data.Dataset):
    """Items of which a mini-batch takes any number."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, item: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(item)
        return tuple(torch.randn(WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))


class Batches:
    """Mini-batches over all copies, of as many items as `numbers_of` says."""

    def __init__(self, updates: int, copies: int) -> None:
        self.sizes = [SIZE * sum(numbers_of(update, copies)) for update in range(updates)]

    def __iter__(self) -> Iterator[list[int]]:
        items = iter(range(10_000))
        for size in self.sizes:
            yield [next(items) for _ in range(size)]


def numbers_of(update: int, copies: int) -> list[int]:
    drawn = random.Random(update)
    numbers = [drawn.randint(0 if copies > 1 else 1, LARGEST) for _ in range(copies)]
    return numbers if any(numbers) else [1] * copies


def mini_batch(update: int, copy: int, number: int, numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    if "loader" in ASKED:  # of one order, which the loader spreads over the copies
        first = sum(sum(numbers_of(earlier, len(numbers))) for earlier in range(update)) + sum(numbers[:copy])
        drawn = [Drawn()[item] for item in range(first * SIZE, (first + number) * SIZE)]
        return tuple(torch.stack(part) for part in zip(*drawn, strict=True)) if drawn else (torch.zeros(0),) * 2
    generator = torch.Generator().manual_seed(1000 * update + copy)
    shape = number * SIZE, WIDTH
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))


class Alone:
    """The model in one process: it takes all micro-batches of all copies, one after the other."""

    def __init__(self, stages: int) -> None:
        self.model = nn.Sequential(*(build(stage, stages) for stage in range(stages)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, update: int, numbers: list[int]) -> float:
        total, count = torch.zeros((), dtype=torch.float64), 0.0
        for copy, number in enumerate(numbers):
            inputs, targets = mini_batch(update, copy, number, numbers)
            for start in range(0, number * SIZE, SIZE):
                value = loss(self.model(inputs[start : start + SIZE]), targets[start : start + SIZE])
                total, count = (total + value[0], count + float(value[1])) if COUNTS else (total + value, count + 1)
        mean = total / count
        mean.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(mean.detach())


def main() -> None:
    directory, updates = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    example = tuple(torch.randn(SIZE, WIDTH, dtype=torch.float64) for _ in range(2))
    with Pipeline(directory, build, loss, example=example) as pipe:
        alone = Alone(pipe.job.stages)
        make = lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01)  # noqa: E731
        optimizer = pipe.sharded_optimizer(make) if "sharded" in ASKED else make([*pipe.named_parameters()])
        if "loader" in ASKED:
            loaded = iter(pipe.loader(Drawn(), batch_sampler=Batches(updates, pipe.copies)))
        for number in pipe.numbers[::3]:
            pairs = mini_batch(0, pipe.copy, number, [number] * pipe.copies)
            print(pipe.check(pairs)) if dist.get_rank() == 0 else pipe.check(pairs)
        for update in range(updates):
            numbers = numbers_of(update, pipe.copies)
            number = numbers[pipe.copy]
            batch = mini_batch(update, pipe.copy, number, numbers)
            pairs = [tuple(value[m * SIZE : (m + 1) * SIZE] for value in batch) for m in range(number)]
            if "functions" in ASKED:
                outcome = pipe.step(pairs.__getitem__, number=number)
            elif "lists" in ASKED:
                outcome = pipe.step(micro_batches=pairs)
            else:
                outcome = pipe.step(next(loaded) if "loader" in ASKED else batch)
            expected = alone.step(update, numbers)
            assert outcome.loss == pytest.approx(expected, rel=1e-9), (update, numbers)
            pipe.clip_grad_norm_(1e6)
            optimizer.step()
            optimizer.zero_grad()
        for stage, module in pipe.stages.items():
            for here, there in zip(module.parameters(), alone.model[stage].parameters(), strict=True):
                torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-12)
        if dist.get_rank() == 0:
            print("remarks:", len(pipe.remarks), *pipe.remarks[:2], sep="\n")
            print(f"{updates} updates as in one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
