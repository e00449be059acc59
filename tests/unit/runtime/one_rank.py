"""Pipelines on one rank that holds both stages (the fixture ``interleaved``), and the same modules in one process."""

from typing import Any

import torch
from torch import nn

from chimera_runtime import Pipeline

B, N, WIDTH, STAGES = 2, 4, 3, 2


def batch(seed: int = 0, items: int = B * N, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, items, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, y


def example(width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one micro-batch, in B rows."""
    x, y = batch(width=width)
    return x[:B], y[:B]


def micro_batches(x: torch.Tensor, y: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [*zip(x.split(B), y.split(B), strict=True)]


def whole(pipeline: Pipeline) -> nn.Module:
    return nn.Sequential(*pipeline.stages.values())


def step(pipeline: Pipeline, *arguments: Any, **options: Any) -> Any:
    """The outcome of a step that has one."""
    outcome = pipeline.step(*arguments, **options)
    assert outcome is not None
    return outcome


def clear(pipeline: Pipeline) -> None:
    for parameter in pipeline.parameters():
        parameter.grad = None
