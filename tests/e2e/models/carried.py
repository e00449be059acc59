"""A language model in float64 whose stages look back over slices, each of a kind that CARRIED lists, in turn.

DROPS makes the first stage draw random numbers, LOSS=mean makes the loss a mean. SPOILT breaks the model: "future" lets
positions see later ones, "forgets" drops a part of the carry, "detached" cuts its graph, "empty" returns no carry,
"changes" one of another shape each time. LENGTH is the length of the sequences. CUT gives each target a weight per
item, which every slice gets whole.
"""

import math
import os

import torch
from torch import nn
from torch.nn import functional

torch.set_default_dtype(torch.float64)
WORDS, WIDTH, ITEMS = 7, 6, 64
KINDS = os.environ.get("CARRIED", "lists,joins").split(",")
SPOILT = os.environ.get("SPOILT", "")
CUT = "CUT" in os.environ
LENGTH = int(os.environ.get("LENGTH", "12"))


class Embedding(nn.Module):
    """Takes the start alone."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, text, start=0):
        return self.words(text) + self.places.weight[start : start + text.shape[1]]


class Attention(nn.Module):
    """Its carry is a list of the keys and values of each slice, or with ``joins`` all in one tensor each."""

    def __init__(self, joins):
        super().__init__()
        self.project, self.out, self.joins = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), joins

    def forward(self, x, carry=None):
        queries, *now = self.project(x).chunk(3, 2)
        left = [*(carry or []), now]
        keys, values = (torch.cat(tensors, 1) for tensors in zip(*left, strict=True))
        if self.joins:
            left = [[keys, values]]
        scores = queries @ keys.transpose(1, 2) / math.sqrt(WIDTH)
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=x.device).triu(
            1 + keys.shape[1] - queries.shape[1]
        )
        if SPOILT == "future":
            hidden[:] = False
        y = x + self.out(scores.masked_fill(hidden, -math.inf).softmax(2) @ values)
        if SPOILT == "forgets":
            left = [now]
        if SPOILT == "detached":
            left = [[t.detach() for t in tensors] for tensors in left]
        return y, None if SPOILT == "empty" else left


class Recurrent(nn.Module):
    """Its carry is a state."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x, carry=None):
        state, states = x.new_zeros(x.shape[0], WIDTH) if carry is None else carry, []
        for decay, new in zip(*(t.unbind(1) for t in self.project(x).chunk(2, 2)), strict=True):
            state = state * decay.sigmoid() + new
            states.append(state)
        return x + torch.stack(states, 1).tanh(), state


class Stage(nn.Module):
    def __init__(self, stage, num_stages):
        super().__init__()
        kind = KINDS[stage % len(KINDS)]
        self.first = Embedding() if stage == 0 else None
        self.mixer = Recurrent() if kind == "recurs" else Attention(kind == "joins")
        self.calls = 0
        self.drop = nn.Dropout(0.3 if stage == 0 and "DROPS" in os.environ else 0.0)
        self.last = nn.Linear(WIDTH, WORDS, bias=False) if stage == num_stages - 1 else None

    def forward(self, x, carry=None, start=0, weight=None):
        x = x if self.first is None else self.first(x, start)
        y, left = self.mixer(self.drop(x), carry if SPOILT != "changes" or carry is None else carry[0])
        if SPOILT == "changes":
            self.calls += 1
            left = left, torch.zeros(self.calls)
        y = y if weight is None else y * weight[:, :, None]
        return y if self.last is None else self.last(y), left


def build_stage(stage, num_stages):
    return Stage(stage, num_stages)


def tied(num_stages):
    both = [[(0, "first.words.weight"), (num_stages - 1, "last.weight")]]
    return both if "TIED" in os.environ else []


def loss(output, target):
    if CUT:
        words, weights = target
        losses = functional.cross_entropy(output.flatten(0, 1), words.flatten(), reduction="none")
        return (losses.view(words.shape).sum(1) * weights).sum(), words.numel()
    total = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return total / target.numel() if os.environ.get("LOSS") == "mean" else (total, target.numel())


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class Text(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return self.items

    def __getitem__(self, index):
        text = torch.randint(WORDS, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        target = (text[1:], torch.tensor(1.0 + index % 3)) if CUT else text[1:]
        return text[:-1], target, {"weight": 0.5 + text[:-1] / WORDS}


def cut_slice(value, which, number, slices):
    if which == "keywords":
        return {name: cut_slice(keyword, "keyword", number, slices) for name, keyword in value.items()}
    words, *weights = value if isinstance(value, (list, tuple)) else (value,)
    part = words.chunk(slices, 1)[number].contiguous()
    return (part, *weights) if weights else part


if not CUT:
    del cut_slice


def dataset():
    return Text(ITEMS)


def validation():
    """More than two rounds of four micro-batches, the last one smaller than the others."""
    return Text(19)
