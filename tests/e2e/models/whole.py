"""A model file with ``reference()``: blocks in a list, which the stages share out; LEFT_OUT leaves the last one out."""

import os

import torch
from torch import nn

BLOCKS, WIDTH = 4, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.linear(x)))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def first(stage, num_stages):
    return BLOCKS * stage // num_stages


def build_stage(stage, num_stages):
    count = first(stage + 1, num_stages) - first(stage, num_stages)
    if stage == num_stages - 1 and os.environ.get("LEFT_OUT"):
        count -= 1
    return nn.Sequential(*[Block() for _ in range(count)]).double()


def reference():
    return Whole().double()


def name(stage, parameter):
    number, _, inside = parameter.partition(".")
    return f"blocks.{first(stage, 2) + int(number)}.{inside}"


def loss(output, target):
    return (output - target).square().mean()


def dataset():
    generator = torch.Generator().manual_seed(5)
    return torch.utils.data.TensorDataset(*torch.randn(2, 64, WIDTH, generator=generator, dtype=torch.float64))


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
