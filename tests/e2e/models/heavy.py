"""Stages that save much more than they hand on: three tensors of 4 MiB of each micro-batch of eight rows.

The C library gives the memory of such tensors back to the system as soon as they are freed.
"""

import ctypes

import torch
from torch import nn

WIDTH, TIMES = 64, 1024
_MMAP_THRESHOLD = -3
ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**20)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        wide = (x.repeat(1, TIMES) * self.scale).sin().cos()
        return wide.unflatten(1, (TIMES, WIDTH)).mean(1)


def build_stage(stage, num_stages):
    return Block().double()


def loss(output, target):
    return (output - target).square().mean()


def dataset():
    numbers = torch.arange(48 * WIDTH, dtype=torch.float64).sin().view(48, WIDTH)
    return torch.utils.data.TensorDataset(numbers, numbers.flip(0))


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
