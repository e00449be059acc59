"""What a loop does with gradients, on four ranks: keeps them, accumulates, lets them reach out of the pipeline.

torchrun --nproc-per-node=4 gradients.py CASE DIRECTORY..
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import Pipeline
from chimera_runtime.errors import RanksDiffer

SIZE, WIDTH, STAGES = 2, 4, 4


class Stage(nn.Module):
    """A layer that is frozen on odd stages, and a projector there, which only mini-batches with images use."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH).double().requires_grad_(number % 2 == 0)
        self.projector = nn.Linear(WIDTH, WIDTH).double() if number % 2 else None

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.projector is not None and image.any():
            y = y + self.projector(x)
        return torch.tanh(y)


def build_stage(stage: int, _stages: int) -> nn.Module:
    return Stage(stage)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def batch(micro_batches: int, seed: int, image: bool = True) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, SIZE * micro_batches, WIDTH, generator=generator, dtype=torch.float64)
    return x, y, {"image": torch.full((len(x),), image)}


def pipeline(directory: Path, build: Callable[[int, int], nn.Module] = build_stage, **options: Any) -> Pipeline:
    return Pipeline(directory, build, loss, batch(1, 0), **options)


def expected(batches: Sequence[tuple[Any, ...]]) -> dict[str, torch.Tensor]:
    """The gradients of one process, of the mean loss over all items of some mini-batches, by name."""
    stages = [build_stage(stage, STAGES) for stage in range(STAGES)]
    items = sum(len(x) for x, _, _ in batches)
    for x, target, keywords in batches:
        y = x
        for stage in stages:
            y = stage(y, **keywords)
        (loss(y, target) * len(x) / items).backward()
    named = [(f"stages.{i}.{name}", p) for i, stage in enumerate(stages) for name, p in stage.named_parameters()]
    return {name: p.grad for name, p in named if p.grad is not None}


def assert_gradients(of: Pipeline, batches: Sequence[tuple[Any, ...]]) -> None:
    gradients = expected(batches)
    for name, parameter in of.named_parameters():
        assert (parameter.grad is None) == (name not in gradients), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-10, atol=1e-14, msg=name)


def kept(*directories: Path) -> None:
    """What a loop, or a hook of a stream, keeps of gradients, outputs and steps stays as it was."""
    *with_flush, stream = directories
    for directory in with_flush:
        with pipeline(directory) as of:
            held: list[torch.Tensor] = []
            copies = []
            for seed in range(3):
                of.step(batch(of.micro_batches, seed), accumulate=seed == 1)
                held += [p.grad for p in of.parameters() if p.grad is not None]
                held += of.predict([batch(of.micro_batches, seed)])
                copies += [tensor.clone() for tensor in held[len(copies) :]]
                for parameter in of.parameters() if seed else ():
                    parameter.grad = None
            assert all(map(torch.equal, held, copies)), directory.name

    steps: list[Any] = []

    def keep(step: Any) -> None:
        gradients = [p.grad for _, p in step.named_parameters]
        steps.append((step, step.update, gradients, [g.clone() for g in gradients]))

    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.1)

    with pipeline(stream, optimizer=sgd, before_step=keep) as of:
        for seed in range(4):
            of.step(batch(of.micro_batches, seed))
    assert len(steps) == 4
    assert all(step.update == update for step, update, _, _ in steps)
    assert all(
        torch.equal(g, copy) for *_, gradients, copies in steps for g, copy in zip(gradients, copies, strict=True)
    )


def windows(*directories: Path) -> None:
    """Loops that accumulate always: a window counts alone, also where no gradient showed that it began."""

    def by_hand(of: Pipeline) -> Iterator[None]:
        while True:
            yield
            for parameter in of.parameters():
                parameter.grad = None

    def by_optimizer(of: Pipeline, to_none: bool = True) -> Iterator[None]:
        optimizer = torch.optim.SGD(of.parameters(), lr=0.0)
        while True:
            yield
            of.clip_grad_norm_(1e9)
            optimizer.step()
            optimizer.zero_grad(to_none)

    def by_scaler(of: Pipeline) -> Iterator[None]:
        """No optimizer steps, as a gradient was infinite."""
        optimizer = torch.optim.SGD(of.parameters(), lr=0.0)
        while True:
            yield
            optimizer.zero_grad()

    for directory in directories:
        for loop in (by_hand, by_optimizer, lambda of: by_optimizer(of, to_none=False), by_scaler):
            with pipeline(directory) as of:
                after = loop(of)
                for images in ((False, False), (False, True), (True,), (False,), (False, True, False)):
                    next(after)
                    given = [batch(of.micro_batches, 7 * len(images) + i, has) for i, has in enumerate(images)]
                    for mini_batch in given:
                        of.step(mini_batch, accumulate=True)
                    assert_gradients(of, given)


def in_part(directory: Path, *_: Path) -> None:
    """Some gradients are cleared by hand, and a rank with none so far gets one: refused on every rank."""
    of = pipeline(directory)
    of.step(batch(of.micro_batches, 0, image=False), accumulate=True)
    for name, parameter in of.named_parameters():
        if "weight" in name:
            parameter.grad = None
    try:
        of.step(batch(of.micro_batches, 1), accumulate=True).loss  # noqa: B018
    except RanksDiffer as refused:
        assert "update 2: the loop had cleared the gradients of some" in str(refused)  # noqa: PT017
    else:
        raise AssertionError
    of.close()


def several(small: Path, large: Path) -> None:
    """Two pipelines of the same modules, with another number of micro-batches, accumulate as one."""
    with pipeline(small) as first, pipeline(large, lambda stage, _stages: first.stages[stage]) as second:
        optimizer = torch.optim.SGD(first.parameters(), lr=0.0)
        for order in ("ab", "bba", "a", "bab"):
            given = []
            for seed, letter in enumerate(order):
                of = first if letter == "a" else second
                given.append(batch(of.micro_batches, seed, image=seed != 0))
                of.step(given[-1], accumulate=True)
            assert_gradients(first, given)
            optimizer.step()
            optimizer.zero_grad()
        first.step(batch(first.micro_batches, 0))
        first.step(batch(first.micro_batches, 1), accumulate=True)
        optimizer.zero_grad()
        second.step(batch(second.micro_batches, 2), accumulate=True)
        assert_gradients(first, [batch(second.micro_batches, 2)])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {case.__name__: case for case in (kept, windows, in_part, several)}[sys.argv[1]](*map(Path, sys.argv[2:]))
    dist.destroy_process_group()
