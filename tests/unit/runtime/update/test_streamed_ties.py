"""A stream whose two stages share a parameter, on one rank that holds both: against autograd on one parameter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chimera_ir
from chimera_runtime import Misuse, Pipeline
from chimera_runtime.ranks.world import World
from tests.unit.runtime.update.test_streamed_updates import SCHEME, STAGES, B, adam, batch, layer, loss


def test_what_stages_share_is_one_parameter_with_an_optimizer_and_hooks_of_its_own(
    alone: World, tmp_path: Path
) -> None:
    (tmp_path / "both.chim").write_text(SCHEME)
    chimera_ir.compile(tmp_path / "both.chim", options=chimera_ir.Options(tied=[[0, 1]])).write(tmp_path / "out")
    x, y = batch(0)
    tied = [[(0, "0.weight"), (1, "0.weight")]]
    steps: list[tuple[Any, int]] = []
    options: dict[str, Any] = {"optimizer": adam, "after_step": lambda step: steps.append((step.stage, step.update))}
    pipeline = Pipeline(tmp_path / "out", layer, loss, (x[:B], y[:B]), tied=tied, **options)
    assert [name for name, _ in pipeline.named_parameters()] == [
        *("stages.0.0.weight", "stages.0.0.bias", "stages.1.0.bias")
    ]
    assert pipeline.optimizers.keys() == {(0, 1), 1}
    modules = [layer(stage, STAGES) for stage in range(STAGES)]
    for module, theirs in zip(modules, pipeline.stages.values(), strict=True):
        module.load_state_dict(theirs.state_dict())
    modules[1][0].weight = modules[0][0].weight  # type: ignore[index, union-attr]
    parameters = [*nn.Sequential(*modules).parameters()]
    optimizer = adam([("", p) for p in parameters if p.requires_grad])
    versions = [[p.detach().clone() for p in parameters]]
    for drained in (False, True):
        for number in range(3):
            for parameter, tensor in zip(parameters, versions[max(0, len(versions) - 2)], strict=True):
                parameter.data = tensor.clone()
            optimizer.zero_grad()
            x, y = batch(number)
            loss(nn.Sequential(*modules)(x), y).backward()
            for parameter, tensor in zip(parameters, versions[-1], strict=True):
                parameter.data = tensor.clone()
            optimizer.step()
            versions.append([p.detach().clone() for p in parameters])
            pipeline.step((x, y))
        pipeline.drain()
        for mine, expected in zip(pipeline.parameters(), versions[-1], strict=True):
            torch.testing.assert_close(mine.detach(), expected, rtol=1e-12, atol=1e-13)
        versions = versions[-1:]
        assert drained == (len(steps) == 12)
    assert [update for stage, update in steps if stage == (0, 1)] == [*range(6)]
    pipeline.step(batch(0))
    pipeline.stages[1][0].weight.grad = None  # type: ignore[index, union-attr]
    with pytest.raises(Misuse, match=r"the gradient of stages\.0\.0\.weight was taken away"):
        pipeline.step(batch(1))
    pipeline.close()
