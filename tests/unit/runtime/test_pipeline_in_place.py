"""Stages that change what they are given in place: the user's tensors stay as they are, or an error says what to do."""

from pathlib import Path

import pytest
import torch
from torch import nn

from chimera_runtime import BadModel, Pipeline
from chimera_runtime.ranks.world import World
from tests.unit.runtime.test_pipeline import WIDTH, B, N, assert_gradients, batch, by_hand, compiled, loss

__all__ = ["compiled"]


@pytest.mark.parametrize("takers", [1, 2])
def test_a_keyword_argument_of_several_stages_is_not_changed_in_place(
    alone: World, compiled: Path, takers: int
) -> None:
    """Whether the other stage sees the change would depend on where it is. A stage's own argument is its own."""

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * scale.mul_(2)

    def build(stage: int, _stages: int) -> nn.Module:
        return Scaled(WIDTH, WIDTH).double() if stage < takers else nn.Linear(WIDTH, WIDTH).double()

    (x, y), scale = batch(), torch.ones(B * N, 1, dtype=torch.float64)
    with Pipeline(compiled, build, loss, (x[:B], y[:B], {"scale": scale[:B].clone()})) as pipeline:
        if takers == 1:
            pipeline.step((x, y, {"scale": scale}))
            return
        with pytest.raises(BadModel, match="stage 0 changes its keyword argument scale in place, and other stages"):
            pipeline.step((x, y, {"scale": scale}))


def test_an_input_that_the_first_stage_changes_in_place_is_as_before(alone: World, compiled: Path) -> None:
    class Changing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(2))

    def build(stage: int, _stages: int) -> nn.Module:
        return (Changing if stage == 0 else nn.Linear)(WIDTH, WIDTH).double()

    x, y = batch()
    pipeline = Pipeline(compiled, build, loss, (x[:B], y[:B]))
    value, expected = by_hand(pipeline, x.clone(), y)
    outcome = pipeline.step((x, y))
    assert outcome is not None
    assert outcome.loss == pytest.approx(value)
    assert_gradients(pipeline, expected)
    assert torch.equal(x, batch()[0])
    pipeline.close()
