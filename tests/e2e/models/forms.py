"""A small float64 model of text with mini-batches of every form.

Its loss is a sum and a count, as some items are padded, and some are nothing but padding; a stage hands on a dict; what
is padded travels as a keyword argument, with a table that is whole; the stages in the middle have an auxiliary loss.
"""

import torch
from torch import nn
from torch.nn import functional

from chimera_runtime import auxiliary_loss, whole

WORDS, WIDTH, LENGTH, IGNORED = 11, 6, 5, -100
TABLE = torch.linspace(0, 1, 2 * WIDTH, dtype=torch.float64).reshape(2, WIDTH)  # as many rows as items, by chance


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, text):
        return {"x": self.words(text), "text": text, "nothing": None}


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, state, padding):
        x = self.drop(torch.tanh(self.linear(state["x"])))
        auxiliary_loss("size", 0.1 * x.square().sum())
        return {**state, "x": x.masked_fill(padding[:, :, None], 0.25)}


class Last(nn.Linear):
    def forward(self, state, **keywords):
        x = state["x"] * (1 + keywords["padding"][:, :, None].sum(1, keepdim=True))
        return super().forward(x + keywords["table"].sum(0))


def build_stage(stage, num_stages):
    module = First() if stage == 0 else Last(WIDTH, WORDS) if stage == num_stages - 1 else Middle()
    return module.double()


def loss(output, target):
    total = functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (target != IGNORED).sum()


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        text, target = torch.randint(WORDS, (2, LENGTH), generator=generator)
        padding = torch.arange(LENGTH) >= i % (LENGTH + 1)
        return text, target.masked_fill(padding, IGNORED), {"padding": padding, whole("table"): TABLE}


def dataset():
    return Sentences()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
