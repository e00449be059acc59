"""`Pipeline` on one rank, with modules that `build_stage` or a layer returns in evaluation mode: they stay in it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime import Layers, Pipeline
from chimera_runtime.ranks.world import World
from tests.unit.runtime.models import loss
from tests.unit.runtime.one_rank import WIDTH, N, batch, clear, example, micro_batches, step, whole


class Block(nn.Module):
    """An encoder that is frozen in evaluation mode, with a part of it in training mode, and a head behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
        )
        self.encoder.requires_grad_(False).eval()
        self.encoder[3].train()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.head(self.encoder(x)))


class Keeping(Block):
    """A frozen part that ``train`` keeps in evaluation mode, as is written where a loop calls ``model.train()``."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = self.encoder[:2].train()

    def train(self, mode: bool = True) -> "Keeping":
        super().train(mode)
        self.encoder.eval()
        return self


def evaluating() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)).eval()


def training() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def stages(*kinds: Any) -> Any:
    def build_stage(stage: int, _stages: int) -> nn.Module:
        module: nn.Module = kinds[stage]().double()
        return module

    return build_stage


def modes(pipe: Pipeline) -> list[bool]:
    return [module.training for stage in pipe.stages.values() for module in stage.modules()]


CASES: dict[str, tuple[Any, int | None]] = {
    "inside a stage": (stages(Block, Block), None),
    "by the class": (stages(Keeping, Keeping), None),
    "a layer beside others": (Layers([*map(lambda k: lambda: k().double(), (evaluating, training) * 2)]), None),
    "a whole stage": (stages(training, evaluating), 1),
    "all layers of a stage": (
        Layers([*map(lambda k: lambda: k().double(), (evaluating, evaluating, Block))], [0, 2]),
        0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_part_in_evaluation_mode_stays_so(alone: World, interleaved: Path, name: str) -> None:
    """Losses are those of one process with the same modes; evaluations and predictions leave the modes as they were."""
    build, remarked = CASES[name]
    with Pipeline(interleaved, build, loss, example()) as pipe:
        expected_modes = modes(pipe)
        assert False in expected_modes
        about = [remark for remark in pipe.remarks if "evaluation mode" in remark]
        assert [remark.partition(",")[0] for remark in about] == (
            [] if remarked is None else [f"stage {remarked} is in evaluation mode"]
        )
        for seed in (1, 2):
            x, y = batch(seed)
            pairs = micro_batches(x, y)
            # Nothing is drawn, and running statistics do not enter: only of modules in training mode would they move.
            with torch.no_grad():
                outputs = [whole(pipe)(of_x) for of_x, _ in pairs]
            again = [whole(pipe)(of_x) for of_x, _ in pairs]
            assert all(map(torch.equal, outputs, again)), "no dropout"
            value = sum(float(loss(output, of_y)) for output, (_, of_y) in zip(outputs, pairs, strict=True)) / N
            assert step(pipe, (x, y)).loss == pytest.approx(value, rel=1e-12)
            clear(pipe)
            assert modes(pipe) == expected_modes
            pipe.evaluate([(x, y)])
            [*pipe.predict([(x, None)])]
            assert modes(pipe) == expected_modes
        assert "check: passed" in pipe.check(batch(0))
