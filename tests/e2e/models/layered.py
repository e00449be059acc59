"""A small language model as a list of layers, with a tuple and a keyword argument between them; SPOILT spoils it."""

import os

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
WORDS, WIDTH, BLOCKS, LENGTH = 11, 6, 5, 4
SPOILT = os.environ.get("SPOILT", "")
DROPOUT = 0.1 if SPOILT == "dropout" else 0.0


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, x):
        return self.words(x), x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, state, gain):
        hidden, words = state
        return hidden + self.drop(torch.tanh(self.mix(hidden))) * gain[:, None, None], words


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.words = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, state):
        hidden, words = state
        return self.words(self.norm(hidden)) * (words >= 0)[..., None]


def layers():
    blocks = BLOCKS - 1 if SPOILT == "left out" else BLOCKS
    return [Table, *[Block] * blocks, Head]


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.h = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = Head()
        self.head.words.weight = self.table.words.weight

    def forward(self, x, gain):
        state = self.table(x)
        for block in self.h:
            state = block(state, gain)
        return self.head(state)


def reference():
    return Whole()


def name(layer, parameter):
    if layer == 0:
        return f"table.{parameter}"
    return f"head.{parameter}" if layer == len(layers()) - 1 else f"h.{layer - 1}.{parameter}"


def tied(num_stages):
    return [[(0, "words.weight"), (len(layers()) - 1, "words.weight")]]


def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        x = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(i))
        return x, (3 * x + 1) % WORDS, {"gain": 1.0 + i / 256}


def dataset():
    return Counting()


def optimizer(named_parameters):
    assert all(name.partition(".")[0] in ("table", "h", "head") for name, _ in named_parameters)
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1, momentum=0.9)
