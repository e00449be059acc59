"""A small convolutional network as a list of layers: it tells horizontal, vertical and diagonal stripes apart."""

import math

import torch
from torch import nn

CHANNELS, SIZE, CLASSES = 32, 16, 4


class Block(nn.Module):
    """A residual block: its input and its output have the same shape, (items, CHANNELS, SIZE, SIZE)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, CHANNELS)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One convolution beside the identity."""
        return x + self.conv(torch.relu(self.norm(x)))


def stem() -> nn.Module:
    """The first layer: one channel becomes CHANNELS."""
    return nn.Conv2d(1, CHANNELS, 3, padding=1)


def head() -> nn.Module:
    """The last layer: one score for each class."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, CLASSES))


def layers() -> list:
    """Functions that make one layer each; a rank calls only those of its own stages."""
    return [stem, *[Block] * 6, head]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over the micro-batch."""
    return nn.functional.cross_entropy(output, target)


class Stripes(torch.utils.data.Dataset):
    """Noisy stripes at one of four angles; item i is the same on every rank and in every run."""

    def __len__(self) -> int:
        """How many items there are."""
        return 2048

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        """A picture and the number of its angle."""
        draw = torch.Generator().manual_seed(i)
        angle = i % CLASSES * math.pi / CLASSES
        y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        phase = 6 * torch.rand(1, generator=draw)
        stripes = torch.sin(x * math.cos(angle) + y * math.sin(angle) + phase)
        return (stripes + torch.randn(SIZE, SIZE, generator=draw)).unsqueeze(0), i % CLASSES


def dataset() -> Stripes:
    """The items to train on."""
    return Stripes()


def optimizer(parameters: list) -> torch.optim.Optimizer:
    """Called with the parameters of one stage at a time."""
    return torch.optim.AdamW(parameters, lr=3e-3)
