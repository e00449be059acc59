"""A small float64 model with everything that makes pipelines go wrong.

An embedding at one end; a tuple between stages with a gradient, an integer tensor, a boolean mask and a float tensor
that needs no gradient; dropout and batch norm; a parameter that never gets a gradient, one that gets one for some
micro-batches only; a bias whose gradient is a view of what was received; a stage's output that is a view.
"""

import hashlib
import os

import torch
from torch import nn
from torch.nn import functional

WORDS, WIDTH, LENGTH = 17, 6, 5


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, text):
        mask = text > 2
        return self.drop(self.words(text)), text, mask, mask.double().mean(dim=1, keepdim=True)


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.shift = nn.Parameter(torch.zeros(1, LENGTH, WIDTH))
        self.sometimes = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.unused = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.2)

    def forward(self, state):
        hidden, text, mask, share = state
        hidden = self.norm(torch.tanh(self.linear(hidden)).transpose(1, 2)).transpose(1, 2)
        if int(text.sum()) % 3 == 0:
            hidden = hidden * self.sometimes
        return self.drop(hidden) + share.unsqueeze(2) + self.shift, text, mask, share


class Last(Middle):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, state):
        hidden, _, mask, _ = super().forward(state)
        return self.out(hidden), mask


class Only(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = First(), Last()

    def forward(self, text):
        return self.last(self.first(text))


def build_stage(stage, num_stages):
    if num_stages == 1:
        return Only().double()
    module = (First() if stage == 0 else Last() if stage == num_stages - 1 else Middle()).double()
    for parameter in module.parameters():
        parameter.of_stage = stage
    return module


def loss(output, target):
    logits, mask = output
    each = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return (each * mask.flatten()).mean()


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        text = torch.randint(WORDS, (LENGTH + 1,), generator=generator)
        noise = int(torch.randint(2, ()))  # the global generator: seeded per item
        return (text[:-1] + noise) % WORDS, text[1:]


def dataset():
    return Sentences()


class Witnessed(torch.optim.Adam):
    """Adam that leaves a digest of the weights after every step where WITNESS says."""

    def step(self, closure=None):
        super().step(closure)
        folder = os.environ.get("WITNESS")
        if folder:
            parameters = [p for group in self.param_groups for p in group["params"]]
            digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in parameters))
            with open(f"{folder}/{os.environ['RANK']}", "a") as file:
                file.write(f"{parameters[0].of_stage} {digest.hexdigest()}\n")


def optimizer(parameters):
    return Witnessed(parameters, lr=0.01, weight_decay=0.1)
