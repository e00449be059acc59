"""A float32 model in layers that writes down what it is told: WATCHED/<rank>.txt has each update and its loss."""

import os
from pathlib import Path

import torch
from torch import nn

WIDTH = 8


def layers():
    return [lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), lambda: nn.Linear(WIDTH, WIDTH)]


def loss(output, target):
    return nn.functional.mse_loss(output, target)


def items(count, seed):
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return [*zip(x, x.roll(1, 1).sin(), strict=True)]


def dataset():
    return items(32, 0)


def validation():
    return items(11, 1)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def on_step(pipe, outcome, steps):
    assert pipe.updates <= steps
    with Path(os.environ["WATCHED"], f"{os.environ['RANK']}.txt").open("a") as file:
        file.write(f"{outcome.update} {outcome.loss:.9g}\n")
