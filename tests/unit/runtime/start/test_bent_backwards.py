"""A backward that is not linear gets a remark where the loss returns sums and counts, and only there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chimera_runtime import Pipeline
from chimera_runtime.ranks.world import World
from tests.unit.runtime import kept


def clipped(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-1e-3, 1e-3)


def clip(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-3, 1e-3)


class Once(torch.autograd.Function):
    """Its backward can run once."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.kept = [2.0]
        return 2 * x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return context.kept.pop() * gradient


class Hooked(nn.Module):
    """A layer with a hook, or something else, in its backward."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(kept.WIDTH, kept.WIDTH).double()
        if way == "parameter":
            self.linear.weight.register_hook(clipped)
        if way == "accumulated":
            self.linear.weight.register_post_accumulate_grad_hook(clip)
        if way == "module":
            self.linear.register_full_backward_hook(
                lambda _m, ins, _o: tuple(g if g is None else clipped(g) for g in ins)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.linear, x, use_reentrant=False)
        if self.way == "inside":
            y.register_hook(clipped)
        z = Once.apply(y) if self.way == "once" else torch.tanh(y)  # type: ignore[no-untyped-call]
        if self.way == "output":
            z.register_hook(clipped)
        if self.way == "linear":
            z.register_hook(lambda gradient: -gradient)
        return z


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output - target).square().sum(), output.numel()


@pytest.mark.parametrize(
    ("way", "is_bent"),
    [
        *[(way, True) for way in ("parameter", "accumulated", "module", "inside", "output")],
        *[(way, False) for way in ("linear", "none", "once")],
    ],
)
@pytest.mark.parametrize("loss", [counted, kept.loss])
def test_a_backward_that_is_not_linear_is_said(
    alone: World, one_worker: Path, way: str, is_bent: bool, loss: Callable[..., Any]
) -> None:
    def build(stage: int, _stages: int) -> nn.Module:
        torch.manual_seed(stage)
        return Hooked(way if stage == (way == "module") else "none")  # such a hook wants inputs with gradients

    with Pipeline(one_worker, build, loss, kept.mini_batch(0, kept.B)) as pipe:
        said = [remark for remark in pipe.remarks if "not linear" in remark]
        assert bool(said) == (is_bent and loss is counted)
        if said:
            stage = int(way == "module")
            assert said[0].startswith(
                f"the backward of stage {stage} is not linear in the gradients with which it begins"
            )
            assert len(said) == 1
        pipe.step(kept.mini_batch(0))
