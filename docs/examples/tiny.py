"""A small model file: a linear layer per stage, in double precision, on numbers made up from the item's index."""

import torch
from torch import nn


def build_stage(stage: int, num_stages: int) -> nn.Module:
    """The same layer for every stage; each gets weights of its own."""
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)).double()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean squared error over the micro-batch."""
    return nn.functional.mse_loss(output, target)


class Waves(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Item i: eight values of a sine of frequency i, and the same backwards."""

    def __len__(self) -> int:
        """How many items there are."""
        return 64

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One item."""
        wave = torch.sin(torch.arange(8, dtype=torch.float64) * i)
        return wave, wave.flip(0)


def dataset() -> Waves:
    """All the items."""
    return Waves()


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(parameters, lr=0.1)
