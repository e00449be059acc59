"""What a forward or the loss trains or writes beside the pipeline is refused at start; what it makes itself is not."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime import Misuse, Pipeline
from chimera_runtime.ranks.world import World
from tests.unit.runtime import kept

SCALE = nn.Parameter(torch.ones(()).double())
SCALES = {"mine": nn.Parameter(torch.ones(()).double()), "others": [nn.Parameter(torch.ones(()).double())]}


class Center(nn.Module):
    """Moves a buffer; without parameters."""

    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(kept.WIDTH).double())

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.center.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return output - self.center.clone()


CENTER, STILL = Center(), Center().eval()
SCALING = nn.Linear(kept.WIDTH, kept.WIDTH).double()


class Object:
    """An object that is called, with a parameter in an attribute."""

    def __init__(self) -> None:
        self.scale = nn.Parameter(torch.ones(()).double())

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return kept.loss(output, target) * self.scale

    def method(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self(output, target)


def closure(scale: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda output, target: kept.loss(output, target) * scale


LOSSES: dict[str, tuple[Any, str]] = {
    "a global": (
        lambda output, target: kept.loss(output, target) * SCALE,
        "reaches SCALE, which requires a gradient.* as the loss, or detach it",
    ),
    "a dict": (
        lambda output, target: kept.loss(output, target) * SCALES["others"][0],
        r"reaches SCALES\['others'\]\[0\], which",
    ),
    "a module": (
        lambda output, target: kept.loss(SCALING(output), target),
        "reaches (weight|bias) of SCALING, which",
    ),
    "a closure": (closure(nn.Parameter(torch.ones(()).double())), "reaches scale, which"),
    "a graph": (closure(nn.Parameter(torch.ones(()).double()).exp()), r"reaches a tensor of shape \(\), which"),
    "an object": (Object(), "reaches scale, which"),
    "a method": (Object().method, "reaches scale, which"),
    "an argument": (partial(lambda s, o, t: kept.loss(o, t) * s, SCALE), "reaches argument 0, which"),
    "a buffer": (
        lambda output, target: kept.loss(CENTER(output), target),
        "the loss writes the buffer center of CENTER, which the pipeline does not know.*as the loss",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_trains_or_writes_something_unknown_is_refused(alone: World, one_worker: Path, name: str) -> None:
    loss, words = LOSSES[name]
    with pytest.raises(Misuse, match=words):
        Pipeline(one_worker, kept.stage, loss, kept.mini_batch(0, kept.B))


class Hidden(nn.Module):
    """Has a trained tensor that is no parameter, or makes one in its forward, which it may keep."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(kept.WIDTH, kept.WIDTH).double()
        self.scale = torch.ones(()).double().requires_grad_() if way == "attribute" else torch.ones(())
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way.startswith("made"):
            x = x.detach().clone().requires_grad_()
            self.last = x if self.way == "made and kept" else None
        return torch.tanh(self.linear(x) * (SCALE if self.way == "global" else self.scale))


@pytest.mark.parametrize(
    ("way", "words"),
    [("attribute", r"of stage 0 reaches scale, which .*register_parameter"), ("global", "of stage 0 reaches a tensor")],
)
def test_a_stage_that_trains_something_unknown_is_refused(alone: World, one_worker: Path, way: str, words: str) -> None:
    with pytest.raises(Misuse, match=words):
        Pipeline(one_worker, lambda _stage, _stages: Hidden(way), kept.loss, kept.mini_batch(0, kept.B))


@pytest.mark.parametrize("way", ["made", "made and kept"])
def test_what_a_forward_makes_is_its_own(alone: World, one_worker: Path, way: str) -> None:
    def still(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return kept.loss(STILL(output), target)

    with Pipeline(one_worker, lambda _stage, _stages: Hidden(way), still, kept.mini_batch(0, kept.B)) as pipe:
        pipe.step(kept.mini_batch(0))
