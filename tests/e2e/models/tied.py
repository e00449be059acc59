"""A small language model whose table of words is at both ends; TIES spoils that, or ties more."""

import os

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
WORDS, WIDTH = 11, 6
SPOILT = os.environ.get("TIES", "")


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.words(x))


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2 if SPOILT == "dropout" else 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.mix(x)))


class Last(nn.Module):
    def __init__(self, wider: int) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS + wider, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(x)))


TABLE = First()
"""A stage that is made once: with TIES=shared the last stage has its table."""


def build_stage(stage: int, num_stages: int) -> nn.Module:
    if stage == 0:
        return TABLE if SPOILT == "shared" else First()
    if stage < num_stages - 1:
        return Middle()
    last = Last(wider=int(SPOILT == "shape"))
    if SPOILT == "shared":
        last.head.weight = TABLE.words.weight
    if SPOILT == "keys":
        last._tied_weights_keys = ["head.weight"]
    if SPOILT == "frozen":
        last.head.weight.requires_grad_(False)
    return last


def tied(num_stages: int) -> list[list[tuple[int, str]]]:
    if SPOILT in ("shared", "keys", "none"):
        return []
    ends = [(0, "words.weight"), (num_stages - 1, "heed.weight" if SPOILT == "name" else "head.weight")]
    middle = [[(0, "mix.weight"), *((s, "mix.weight") for s in range(1, num_stages))]] if SPOILT == "all" else []
    return [ends, *middle]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Counting(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(WORDS, (4,), generator=torch.Generator().manual_seed(i))
        return x, (3 * x + 1) % WORDS


def dataset() -> Counting:
    return Counting()


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
