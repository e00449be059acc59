"""Updates with another number of micro-batches each, beside the same in one process.

torchrun --nproc-per-node=4 several_numbers.py DIRECTORY UPDATES [counts] [functions | lists | loader] [sharded]
    [dropout] [differ] [killed=UPDATE] [checkpoints=FOLDER]

Copies have other numbers, also none. With ``counts`` the loss is a sum and a count, which differs by micro-batch. Step
gets tensors, functions of a micro-batch, lists of them, or mini-batches of a loader. With ``dropout`` no process is
compared: the losses are written down, for another directory to have the same. ``differ`` gives ranks of a copy other
numbers. The ranks save after each update, are ``killed`` in one, and resume if there is a checkpoint.
"""

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import Checkpoints, Outcome, Pipeline

SIZE, WIDTH, LARGEST = 2, 6, 16
ASKED = dict(word.partition("=")[::2] for word in sys.argv[3:])
COUNTS = "counts" in ASKED
CHECKED = 3  # programs of which each is compared by `Pipeline.check`


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3 if "dropout" in ASKED else 0.0)

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(self.dropout(sum(values))))


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

    def __init__(self, feeding: list[tuple[int, ...]]) -> None:
        self.feeding = feeding
        self.model = nn.ModuleList(build(stage, len(feeding)) for stage in range(len(feeding)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def output(self, value: torch.Tensor) -> torch.Tensor:
        made: list[torch.Tensor] = []
        for module, feeding in zip(self.model, self.feeding, strict=True):
            made.append(module(*([made[stage] for stage in feeding] or [value])))
        return made[-1]

    def step(self, update: int, numbers: list[int]) -> float:
        total, count = torch.zeros((), dtype=torch.float64), 0.0
        for copy, number in enumerate(numbers):
            inputs, targets = mini_batch(update, copy, number, numbers)
            for start in range(0, number * SIZE, SIZE):
                value = loss(self.output(inputs[start : start + SIZE]), targets[start : start + SIZE])
                total, count = (total + value[0], count + float(value[1])) if COUNTS else (total + value, count + 1)
        mean = total / count
        mean.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(mean.detach())


def step(pipe: Pipeline, update: int, numbers: list[int], loaded: Iterator[Any] | None) -> Outcome:
    number = numbers[pipe.copy]
    if "differ" in ASKED and update == 1:
        number += pipe.worker == 1
    batch = mini_batch(update, pipe.copy, number, numbers)
    if loaded is not None:
        return pipe.step(next(loaded))
    pairs = [tuple(value[m * SIZE : (m + 1) * SIZE] for value in batch) for m in range(number)]
    if "functions" in ASKED:
        return pipe.step(pairs.__getitem__, number=number)
    return pipe.step(micro_batches=pairs) if "lists" in ASKED else pipe.step(batch)


def main() -> None:
    directory, updates = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    example = tuple(torch.randn(SIZE, WIDTH, dtype=torch.float64) for _ in range(2))
    with Pipeline(directory, build, loss, example=example) as pipe:
        alone = Alone([*pipe.job.feeding])
        made = lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01)  # noqa: E731
        optimizer = pipe.sharded_optimizer(made) if "sharded" in ASKED else made([*pipe.named_parameters()])
        loader = pipe.loader(Drawn(), batch_sampler=Batches(updates, pipe.copies)) if "loader" in ASKED else None
        shared = {} if loader is None else {"data": loader}
        folder = ASKED.get("checkpoints")
        checkpoints = None if folder is None else Checkpoints(folder, pipe, optimizer, shared=shared)
        if checkpoints is not None and any(Path(folder).glob("*")):
            checkpoints.resume()
        for number in [] if "dropout" in ASKED else pipe.numbers[::CHECKED]:
            report = pipe.check(mini_batch(0, pipe.copy, number, [number] * pipe.copies))
            assert "passed" in report, report
        loaded, losses = None if loader is None else iter(loader), []
        for update in range(pipe.updates):  # those before a kill
            alone.step(update, numbers_of(update, pipe.copies))
        for update in range(pipe.updates, updates):
            numbers = numbers_of(update, pipe.copies)
            if f"{update}" == ASKED.get("killed") and pipe.worker == 0:
                checkpoints.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            outcome = step(pipe, update, numbers, loaded)
            losses.append(outcome.loss)
            if "dropout" not in ASKED:
                assert outcome.loss == pytest.approx(alone.step(update, numbers), rel=1e-9), (update, numbers)
            pipe.clip_grad_norm_(1e6)
            optimizer.step()
            optimizer.zero_grad()
            if checkpoints is not None:
                checkpoints.save()
                assert checkpoints.items == SIZE * sum(sum(numbers_of(u, pipe.copies)) for u in range(update + 1))
        for stage, module in pipe.stages.items() if "dropout" not in ASKED else ():
            for here, there in zip(module.parameters(), alone.model[stage].parameters(), strict=True):
                torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-12)
        if dist.get_rank() == 0:
            print("remarks:", len(pipe.remarks))
            print(f"{len(losses)} updates" if "dropout" in ASKED else f"{len(losses)} updates as in one process")
            print("losses", *losses if "dropout" in ASKED else ())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
