"""A model with dropout whose ranks die by SIGKILL where the environment says, once each.

KILL    RANK:POINT:COUNT, at the COUNT-th time that this rank comes to the point
MARKER  a file that is there afterwards: a rank that has been started again lives
SAVED   a checkpoint, until which a rank that is to die waits
SLICED  if it is there, items are sequences, and layers look back over their slices; the smallest tensors move
"""

import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from chimera_runtime.stage import saved_tensors

WIDTH, LENGTH = 4, 4
SLICED = "SLICED" in os.environ
if SLICED:
    saved_tensors.SMALLEST = 1


def layers() -> list[Callable[[], nn.Module]]:
    return [partial(LookingBack if SLICED else Layer, layer) for layer in range(4)]


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.inner, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passed("forward")
        return x + self.drop(torch.tanh(self.norm(self.inner(x))))


class LookingBack(Layer):
    """A layer on the sums of all positions so far; its carry is the last one."""

    def forward(self, x: torch.Tensor, carry: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        sums = x.cumsum(1) if carry is None else carry + x.cumsum(1)
        return super().forward(sums.flatten(0, 1)).unflatten(0, x.shape[:2]), sums[:, -1:]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def dataset() -> torch.utils.data.Dataset:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 40, *([LENGTH] if SLICED else []), WIDTH, generator=generator)
    return torch.utils.data.TensorDataset(x, y)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def scheduler(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


COUNTS: dict[str, int] = {}


def passed(point: str) -> None:
    """Dies here, if it is this rank's turn."""
    rank, where, count = os.environ.get("KILL", "-1::0").split(":")
    if int(rank) != int(os.environ["RANK"]) or where != point:
        return
    COUNTS[point] = COUNTS.get(point, 0) + 1
    marker = Path(os.environ["MARKER"])
    if COUNTS[point] == int(count) and not marker.exists():
        while "SAVED" in os.environ and not Path(os.environ["SAVED"]).exists():
            time.sleep(0.01)
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def watched(holder: Any, name: str, point: str) -> None:
    """Makes the beginning and the end of a call points at which a rank may die."""
    original = getattr(holder, name)

    def call(*arguments: Any, **named: Any) -> Any:
        passed(f"before {point}")
        value = original(*arguments, **named)
        passed(f"after {point}")
        return value

    setattr(holder, name, call)


watched(FileSystemWriter, "write_data", "writing")
watched(FileSystemWriter, "finish", "metadata")
watched(os, "fsync", "fsync")
watched(Path, "rename", "rename")
watched(shutil, "rmtree", "removing")
