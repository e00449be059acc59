"""Messages that are under way while stages compute, 32 KiB an item: a buffer that is used too soon would show."""

import torch
from torch import nn

WIDTH = 4096


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)

    def forward(self, word):
        return self.words(word), word


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, state):
        hidden, word = state
        return hidden + torch.tanh(self.scale * hidden), word


class Last(Middle):
    def forward(self, state):
        return super().forward(state)[0].mean(dim=1)


def build_stage(stage, num_stages):
    torch.manual_seed(stage)
    return (First() if stage == 0 else Last() if stage == num_stages - 1 else Middle()).double()


def loss(output, target):
    return ((output - target) ** 2).mean()


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, i):
        return i % 11, float(i)


def dataset():
    return Items()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
