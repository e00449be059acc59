"""A float64 model whose stages are each of a kind that HALVED lists, and count what they run: COUNTED/<rank>.json.

The counts are cumulative, an entry for each step of the optimizer: of forwards, and of backwards, of what a stage has
between two layers.
"""

import json
import os
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

WIDTH = 8
KINDS = os.environ["HALVED"].split(",")
RAN = Counter()
NOTED = []


class Mark(torch.autograd.Function):
    """Nothing, but for counting backwards."""

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        RAN["backward"] += 1
        return gradient


class Inner(nn.Linear):
    def forward(self, x):
        RAN["forward"] += 1
        return Mark.apply(super().forward(x))


class Product(torch.autograd.Function):
    """Computes both gradients at once."""

    @staticmethod
    def forward(context, x, w):
        RAN["forward"] += 1
        context.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(context, gradient):
        RAN["backward"] += 1
        x, w = context.saved_tensors
        return gradient @ w.T, x.T @ gradient


class Multiplied(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x):
        return Product.apply(x, self.matrix)


class Again(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant = Inner(WIDTH, WIDTH), reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def counting(name):
    """A compiler that leaves graphs as they are, and counts their runs."""

    def compiler(graph, _inputs):
        def run(arguments):
            RAN[name] += 1
            given = [*arguments]
            arguments.clear()
            return graph(*given)

        run._boxed_call = True
        return run

    return compiler


def compiled():
    if os.environ.get("COMPILER") == "inductor":
        # A kernel takes seconds of the C++ compiler, and so do its headers, and what finds out which vectors there are.
        torch._inductor.config.cpp_cache_precompile_headers = False
        torch._inductor.config.cpp.vec_isa_ok = False
        return torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()))
    backend = aot_autograd(fw_compiler=counting("forward"), bw_compiler=counting("backward"))
    return torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), backend=backend)


MADE = {
    "plain": lambda: Inner(WIDTH, WIDTH),
    "checkpoint": lambda: Again(reentrant=False),
    "reentrant": lambda: Again(reentrant=True),
    "compiled": compiled,
    "function": Multiplied,
}


def build_stage(stage, num_stages):
    """Between two layers, but for kinds with ``alone``: these are all that the stage has."""
    kind, _, alone = KINDS[stage].partition(" ")
    layers = (MADE[kind](),) if alone else (nn.Linear(WIDTH, WIDTH), MADE[kind](), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(*layers).double()


def loss(output, target):
    return (output - target).square().mean()


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        draw = torch.Generator().manual_seed(i)
        return tuple(torch.randn(2, WIDTH, generator=draw, dtype=torch.float64))


def dataset():
    return Items()


class Noting(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        if "COUNTED" in os.environ:
            NOTED.append(dict(RAN))
            Path(os.environ["COUNTED"], f"{os.environ['RANK']}.json").write_text(json.dumps(NOTED))


def optimizer(parameters):
    return Noting(parameters, lr=0.1)
