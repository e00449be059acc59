"""What both scripts train: four layers, one for each stage, on numbers drawn from a seed."""

import torch
from torch import nn

WIDTH, STAGES, MICRO_BATCHES, B, STEPS = 16, 4, 8, 4, 5


def layer(stage: int) -> nn.Module:
    """A stage; its weights follow from its number."""
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over a micro-batch."""
    return nn.functional.mse_loss(output, target)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mini-batch of a step."""
    x = torch.randn(B * MICRO_BATCHES, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, dims=1).sin()
