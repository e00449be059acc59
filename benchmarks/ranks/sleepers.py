"""Stages that sleep: the model of the rehearsed comparisons, the same modules for every contender."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chimera_runtime.model.model import ModelFile


@dataclass(frozen=True)
class Sleep:
    """What a stage does for one micro-batch: seconds of its two passes, and the floats of a message.

    With ``halves``, each half of a backward takes ``backward`` seconds.
    """

    forward: float
    backward: float
    floats: int
    halves: bool = False


class _Slept(torch.autograd.Function):
    """Neither pass computes or allocates: both hand on memory that is there already."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: torch.Tensor, stage: "Sleeper") -> torch.Tensor:
        ctx.stage = stage
        time.sleep(stage.sleep.forward)
        return stage.output.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor | None, torch.Tensor, None]:
        stage = ctx.stage
        time.sleep(stage.sleep.backward)
        return stage.gradient.detach() if ctx.needs_input_grad[0] else None, stage.token_gradient.detach(), None


class Sleeper(nn.Module):
    """A stage with one parameter, which makes autograd come by; the last stage's output is a single float."""

    def __init__(self, sleep: Sleep, last: bool) -> None:
        super().__init__()
        self.sleep = sleep
        self.token = nn.Parameter(torch.zeros(1))
        self.token_gradient = torch.zeros(1)
        self.output = torch.zeros(1, 1 if last else sleep.floats)
        self.gradient = torch.zeros(1, sleep.floats)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleeps; so does the backward."""
        slept: torch.Tensor = _Slept.apply(x, self.token, self)  # type: ignore[no-untyped-call]
        return slept


class _FirstHalf(torch.autograd.Function):
    """A stage but for its weights: what a gradient of the input goes through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: "HalvesSleeper") -> torch.Tensor:
        ctx.stage = stage
        time.sleep(stage.sleep.forward)
        return stage.output.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.stage.sleep.backward)
        return ctx.stage.gradient.detach(), None


class _SecondHalf(torch.autograd.Function):
    """The weights of a stage: what their gradients go through, and the gradient of the input does not."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, stage: "HalvesSleeper") -> torch.Tensor:
        ctx.stage = stage
        return token.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.stage.sleep.backward)
        return ctx.stage.token_gradient.detach(), None


class HalvesSleeper(nn.Module):
    """A stage whose weights join the way of its input in a sum, so that each half of its backward runs by itself.

    The first stage has a parameter in the place of its input, which has no gradient: its backward takes as long.
    """

    def __init__(self, sleep: Sleep, first: bool, last: bool) -> None:
        super().__init__()
        self.sleep = sleep
        self.token = nn.Parameter(torch.zeros(1))
        self.token_gradient = torch.zeros(1)
        self.output = torch.zeros(1, 1 if last else sleep.floats)
        self.gradient = torch.zeros(1, 1 if first else sleep.floats)
        self.entrance = nn.Parameter(torch.zeros(1, 1)) if first else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleeps; so do both halves of the backward."""
        source = x if self.entrance is None else self.entrance
        passed: torch.Tensor = _FirstHalf.apply(source, self)  # type: ignore[no-untyped-call]
        weights: torch.Tensor = _SecondHalf.apply(self.token, self)  # type: ignore[no-untyped-call]
        return passed + weights


class _Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Items of one float each."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(1), torch.zeros(1)


class _Idle:
    """An optimizer that does nothing."""

    def step(self) -> None:
        """Leaves the weights as they are."""


def _stage(sleep: Sleep, first: bool, last: bool) -> nn.Module:
    return HalvesSleeper(sleep, first, last) if sleep.halves else Sleeper(sleep, last)


def sleepers(sleep: Sleep) -> ModelFile:
    """The model whose stages sleep, for micro-batches of one item."""
    return ModelFile(
        file=Path(__file__),
        build_stage=lambda stage, stages: _stage(sleep, stage == 0, stage == stages - 1),
        loss=lambda output, _: output.sum(),
        dataset=_Numbers,
        optimizer=lambda _: _Idle(),
    )
