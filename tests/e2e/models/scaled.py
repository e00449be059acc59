"""Two stages; the gradients of the first are a millionth of the second's. DTYPE is that of its weights."""

import os

import torch
from torch import nn

WIDTH = 8
DTYPE = getattr(torch, os.environ.get("DTYPE", "float32"))


class Stage(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x):
        return torch.tanh(self.linear(x * self.scale)) * self.frozen


def build_stage(stage, num_stages):
    return Stage(1e-6 if stage else 1.0).to(DTYPE)


def loss(output, target):
    return ((output - target) ** 2).mean()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(i)).to(DTYPE)
        return x, x.flip(0)


def dataset():
    return Numbers()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
