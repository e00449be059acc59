"""A float64 model whose stages may run several micro-batches at once: no dropout, no buffers that change.

The items are dictionaries; a tuple with an integer tensor goes from stage to stage; the last stage returns a tuple, and
its loss depends on how many items of the micro-batch are counted.
"""

import torch
from torch import nn

WIDTH = 6


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.lift = nn.Linear(3, WIDTH)

    def forward(self, batch):
        return self.words(batch["word"]) + self.lift(batch["features"]), batch["word"]


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, state):
        hidden, word = state
        return self.norm(hidden + torch.tanh(self.linear(hidden))), word


class Last(Middle):
    def forward(self, state):
        hidden, word = super().forward(state)
        return hidden, word > 4


def build_stage(stage, num_stages):
    torch.manual_seed(stage)
    return (First() if stage == 0 else Last() if stage == num_stages - 1 else Middle()).double()


def loss(output, target):
    hidden, counted = output
    return ((hidden - target) ** 2).mean(dim=1)[counted].sum() / (1 + counted.sum())


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        features = torch.randn(3, generator=generator, dtype=torch.float64)
        return {"word": i % 11, "features": features}, torch.randn(WIDTH, generator=generator, dtype=torch.float64)


def dataset():
    return Items()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
