"""A model file whose messages and gradients take a while on a slow link: 64 KiB an item, 66 KB a stage."""

import torch
from torch import nn

WIDTH, LENGTH = 128, 128


def build_stage(stage: int, num_stages: int) -> nn.Module:
    """The same layer for every stage."""
    return nn.Linear(WIDTH, WIDTH)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean squared error over the micro-batch."""
    return nn.functional.mse_loss(output, target)


class Zeros(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Nothing but the size of an item."""

    def __len__(self) -> int:
        """How many items there are."""
        return 256

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One item."""
        return torch.zeros(LENGTH, WIDTH), torch.zeros(LENGTH, WIDTH)


def dataset() -> Zeros:
    """All the items."""
    return Zeros()


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(parameters, lr=0.1)
