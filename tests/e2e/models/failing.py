"""A model that does what FAIL says, on the rank and after as many steps of a stage as it names: "what:rank:steps"."""

import os
import signal
import threading
import time

import torch
from torch import nn
from torch.nn import functional

WHAT, RANK, AFTER = [*os.environ.get("FAIL", "nothing:0:0").split(":"), "0", "0"][:3]
MINE = os.environ.get("RANK") == RANK
WIDTH = int(os.environ.get("WIDTH", "4"))
STEPS = {"done": 0}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def now(what: str) -> bool:
    return MINE and what == WHAT and STEPS["done"] == int(AFTER)


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if now("kill-in-backward"):
            die()
        return gradient


class Stage(nn.Module):
    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last = stage == num_stages - 1
        self.linear.weight.register_post_accumulate_grad_hook(self.after)

    def after(self, _) -> None:
        if now("kill-in-all-reduce"):
            threading.Timer(0.02, die).start()

    def forward(self, x):
        if now("kill-in-forward"):
            die()
        if now("stop-in-forward"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if now("change-shape"):
            x = torch.cat([x, x])
        if WHAT == "kill-while-the-other-computes" and STEPS["done"] >= int(AFTER):
            if MINE:
                die()
            time.sleep(1)
        y = Fail.apply(self.linear(x))
        if WHAT == "returns-sparse" and not self.last:
            return y, x.detach().to_sparse()
        if WHAT == "returns-elsewhere" and not self.last:
            return y, torch.zeros(len(y), device="meta")
        return y


CACHE = {}


def build_stage(stage, num_stages):
    if WHAT == "tied":
        return CACHE.setdefault("stage", Stage(stage, num_stages))
    if WHAT == "lazy":
        return nn.LazyLinear(WIDTH)
    if WHAT == "build-returns-none":
        return None
    if WHAT == "returns-set":
        module = nn.Identity()
        module.forward = lambda x: {x}
        return module
    module = Stage(stage, num_stages)
    if WHAT == "own-randomness":
        with torch.no_grad():
            module.linear.weight.fill_(float(os.environ["RANK"]))
    return module


def loss(output, target):
    value = functional.mse_loss(output, target)
    return value.expand(2) if WHAT == "loss-of-two" else value


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 3 if WHAT == "few-items" else 64

    def __getitem__(self, i):
        item = torch.full((WIDTH,), float(i)), torch.zeros(WIDTH)
        return dict(enumerate(item)) if WHAT == "no-pairs" else item


def dataset():
    return iter(()) if WHAT == "no-map" else Numbers()


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        if now("kill-in-step"):
            die()
        super().step(closure)
        STEPS["done"] += 1


def optimizer(parameters):
    if WHAT == "no-optimizer":
        return None
    return Counting(parameters, lr=1e-4)
