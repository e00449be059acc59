"""A model file for tiny.py's waves, whose loss reports what a person wants to see."""

import torch
from torch import nn

from chimera_runtime import report
from tiny import build_stage, dataset, optimizer

__all__ = ["build_stage", "dataset", "loss", "optimizer"]


class Loss(nn.Module):
    """A squared error whose scale is learned, and how often the sign is right."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean over the micro-batch."""
        report("sign", (output.sign() == target.sign()).double().mean(), len(output))
        positive = target > 0.5
        if positive.any():
            report("recall", (output[positive] > 0).double().mean(), positive.sum())
        error = nn.functional.mse_loss(output, target)
        return error * torch.exp(-self.log_variance) + self.log_variance


loss = Loss()
