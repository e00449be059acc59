"""The optimizers of all stages of a rank, as one."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.blame import LaneOperation, ModelError
from chimera_runtime.ranks.world import World
from chimera_runtime.tools.loop.saving import Optimizers
from chimera_runtime.values.nested import draw_seed
from tests.unit.runtime.models import model
from tests.unit.runtime.thread_ranks import alone_job, groups, together, worlds


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
    assert raised.value.operation == LaneOperation("step", 5, (), 0)


def test_a_sharded_state_is_gathered_after_all_steps_and_schedulers_see_a_step(alone: World) -> None:
    """Both copies step their half of each weight, one stage in its lane; and as without shards, they have all."""

    def run(world: World | None, in_lane: bool) -> list[list[float]]:
        built: dict[int, nn.Module] = {stage: nn.Linear(4, 1, bias=False) for stage in (0, 1)}
        for module in built.values():
            nn.init.ones_(module.weight)  # type: ignore[arg-type]
        used = replace(
            model(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.5)),
            scheduler=lambda optimizer, _: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        )
        optimizers = Optimizers(used, built, seed=7, idle=False, sharded_over=world)
        for step in range(3):
            for stage, module in built.items():
                for parameter in module.parameters():
                    parameter.grad = torch.arange(4.0).reshape(1, 4) - step * stage
            if in_lane:
                optimizers.step_in_lane(SimpleNamespace(group=(1,)))  # type: ignore[arg-type]
            optimizers.step()
            optimizers.zero_grad()
        assert optimizers.learning_rates == {"0": [0.0625], "1": [0.0625]}
        return [p.flatten().tolist() for module in built.values() for p in module.parameters()]

    with worlds(alone, alone_job(), copies=2) as pair, groups(2) as first, groups(2) as second:
        sums = [{(0,): (a, (0, 1)), (1,): (b, (0, 1))} for a, b in zip(first, second, strict=True)]
        shared = [replace(world, sums=of_world) for world, of_world in zip(pair, sums, strict=True)]
        results = together([partial(run, world, world is shared[0]) for world in shared])
    assert results[0] == results[1] == run(None, False)
