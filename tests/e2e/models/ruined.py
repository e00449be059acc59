"""A model whose loss is no number from the third update on: NAN; it takes what it is given by name."""

import torch
from torch import nn

CALLS = {"loss": 0}
STAGES = []


def build_stage(stage, num_stages, args):
    torch.manual_seed(stage)
    STAGES.append(stage)
    return nn.Linear(4, 4, bias="--bias" in args).double()


def loss(output, target, steps):
    CALLS["loss"] += 1
    value = ((output - target) ** 2).mean()
    return value * float("nan") if CALLS["loss"] > steps else value


def dataset(num_stages, seed):
    generator = torch.Generator().manual_seed(seed + num_stages)
    x = torch.randn(64, 4, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, x.flip(0))


def optimizer(named_parameters, args):
    names = [name for name, _ in named_parameters]
    assert names == [f"stages.{STAGES[0]}.{name}" for name in ("weight", "bias")[: len(names)]], names
    assert ("--bias" in args) == (len(names) == 2)
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)
