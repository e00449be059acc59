"""The optimizers of all stages of a rank, as one."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.blame import ModelError, Operation
from chimera_runtime.tensors import draw_seed
from chimera_runtime.tools.optimizers import Optimizers
from tests.unit.runtime.models import model


class Drawing(torch.optim.SGD):
    """Adds a number drawn at random."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.rand(()))


def modules() -> dict[int, nn.Module]:
    return {stage: nn.Linear(1, 1, bias=False) for stage in (0, 3)}


def made(built: dict[int, nn.Module], kind: Any = Drawing, idle: bool = False) -> Optimizers:
    used = replace(model(), optimizer=lambda parameters: kind(parameters, lr=0.5))
    return Optimizers(used, built, seed=7, idle=idle)


def weights(built: dict[int, nn.Module]) -> list[float]:
    return [p.item() for module in built.values() for p in module.parameters()]


def drawn(update: int, stage: int) -> float:
    torch.manual_seed(draw_seed("step", 7, update, stage))
    return torch.rand(()).item()


def test_a_step_draws_by_update_and_stage_wherever_it_is_made() -> None:
    built = modules()
    before, optimizers = weights(built), made(built)
    optimizers.step()
    optimizers.step_in_lane(SimpleNamespace(group=(3,)))  # type: ignore[arg-type]
    optimizers.step()
    expected = [w + drawn(0, s) + drawn(1, s) for w, s in zip(before, (0, 3), strict=True)]
    assert weights(built) == pytest.approx(expected)


def test_a_rehearsal_makes_no_steps() -> None:
    built = modules()
    before = weights(built)
    made(built, idle=True).step()
    assert weights(built) == before


def test_gradients_are_cleared_and_learning_rates_are_told_by_stage() -> None:
    built = modules()
    optimizers = made(built)
    for module in built.values():
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
    optimizers.zero_grad()
    assert all(p.grad is None for module in built.values() for p in module.parameters())
    assert optimizers.learning_rates == {"0": [0.5], "3": [0.5]}


def test_an_error_of_an_optimizer_names_the_step() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ValueError("no step")

    with pytest.raises(ModelError, match="the optimizer's step") as raised:
        made({5: nn.Linear(1, 1)}, Failing).step()
    assert raised.value.operation == Operation("step", 5, (), 0)
