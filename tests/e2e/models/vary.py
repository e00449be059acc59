"""Small float64 models, one for each thing that a gradient can do besides being there: VARY names it."""

import os

import torch
from torch import nn

WHAT = os.environ.get("VARY", "unused-output")
WIDTH = 8


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.beside = nn.Linear(WIDTH, WIDTH)
        self.words = nn.Embedding(10, WIDTH, sparse=True)

    def forward(self, x):
        if WHAT == "sparse":
            return self.linear(x) + self.words((x[:, 0] * 3).long().abs() % 10)
        if WHAT == "late-buffer" and not hasattr(self, "ones"):
            self.register_buffer("ones", torch.ones(WIDTH))
        if WHAT == "conjugate":
            return torch.complex(self.linear(x), self.linear(x)).conj()
        return (self.linear(x), self.beside(x)) if WHAT == "unused-output" else self.linear(x)


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, received):
        x = received[0] if isinstance(received, tuple) else received
        x = x.real + x.imag if x.is_complex() else x
        return self.linear(x)


torch.manual_seed(0)
WHOLE = nn.Sequential(First(), Second()).double()


def build_stage(stage, num_stages):
    if WHAT == "made-once":
        return nn.Sequential(WHOLE[stage])
    module = (First() if stage == 0 else Second()).double()
    return module.requires_grad_(False) if f"frozen-{stage}" == WHAT else module


def loss(output, target):
    return ((output - target) ** 2).mean()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(i)).double(), torch.zeros(WIDTH).double()


def dataset():
    return Numbers()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.5)
