"""A model that raises an error: RAISE says where, of which kind, in which call, on which rank: "where:kind:call:rank".

Only the first is needed; without the last it is on all ranks.
"""

import os
import shutil

import torch
from torch import nn

RANK = os.environ.get("RANK", "0")
GIVEN = os.environ.get("RAISE", "nowhere").split(":")
WHERE, KIND, CALL, ON = [*GIVEN, *("nowhere", "plain", "1", RANK)[len(GIVEN) :]]
CALLS = {"count": 0}


class Unprintable(BaseException):
    def __str__(self):
        raise OSError("not even this")


class Custom(Exception):
    pass


def reach(where):
    """Raises the error, if this is the call for it."""
    if where != WHERE or RANK != ON:
        return
    CALLS["count"] += 1
    if CALLS["count"] < int(CALL):
        return
    if KIND == "remove":
        shutil.rmtree(os.environ["GONE"], ignore_errors=True)
        return
    if KIND == "exit":
        raise SystemExit(0)
    if KIND == "interrupt":
        raise KeyboardInterrupt
    if KIND == "unprintable":
        raise Unprintable
    if KIND == "chained":
        try:
            {}["key"]
        except KeyError as error:
            raise Custom("went wrong\nin two lines") from error
    raise ValueError("went wrong")


reach("import")


class Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        reach("backward")
        return gradient


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        reach("forward")
        return Passing.apply(self.linear(x[:, :3] if WHERE == "shape" else x))


class Unmovable(Stage):
    def _apply(self, *arguments, **options):
        reach("to")
        return super()._apply(*arguments, **options)


def build_stage(stage, num_stages):
    reach("build_stage")
    return Unmovable()


def loss(output, target):
    reach("loss")
    return ((output - target) ** 2).mean()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        reach("__len__")
        return 64

    def __getitem__(self, i):
        reach("__getitem__")
        x = torch.full((4 + (i if WHERE == "collate" else 0),), float(i))
        return x, torch.zeros(4)


def dataset():
    reach("dataset")
    return Numbers()


class Stepping(torch.optim.SGD):
    def step(self, closure=None):
        reach("step")
        super().step(closure)


def optimizer(parameters):
    reach("optimizer")
    return Stepping(parameters, lr=-1 if WHERE == "rate" else 1e-4)
