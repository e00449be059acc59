"""`Pipeline` on one rank, with modules that `build_stage` or a layer returns in evaluation mode: they stay in it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chimera_ir
from chimera_runtime import Layers, Pipeline
from chimera_runtime.ranks.world import World

B, N, WIDTH, STAGES = 2, 4, 4, 2


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


class Keeping(nn.Module):
    """A frozen part that ``train`` keeps in evaluation mode, as is written where a loop calls ``model.train()``."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)), nn.Linear(WIDTH, WIDTH)

    def train(self, mode: bool = True) -> "Keeping":
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.head(self.encoder(x)))


def evaluating() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)).eval()


def training() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def stages(*kinds: Any) -> Any:
    def build_stage(stage: int, _stages: int) -> nn.Module:
        module: nn.Module = kinds[stage]().double()
        return module

    return build_stage


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, B * N, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, y


def modes(pipe: Pipeline) -> list[bool]:
    return [module.training for stage in pipe.stages.values() for module in stage.modules()]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("modes") / "out"
    chimera_ir.compile("interleaved", P=1, v=STAGES, N=N).write(directory)
    return directory


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
def test_a_part_in_evaluation_mode_stays_so(alone: World, compiled: Path, name: str) -> None:
    """Losses are those of one process with the same modes; evaluations and predictions leave the modes as they were."""
    build, remarked = CASES[name]
    x, y = batch(0)
    with Pipeline(compiled, build, loss, (x[:B], y[:B])) as pipe:
        expected_modes = modes(pipe)
        assert False in expected_modes
        about = [remark for remark in pipe.remarks if "evaluation mode" in remark]
        assert [remark.partition(",")[0] for remark in about] == (
            [] if remarked is None else [f"stage {remarked} is in evaluation mode"]
        )
        for seed in (1, 2):
            x, y = batch(seed)
            rows = [slice(micro * B, micro * B + B) for micro in range(N)]
            # Nothing is drawn, and running statistics do not enter: only of modules in training mode would they move.
            with torch.no_grad():
                outputs = [pipe.stages[1](pipe.stages[0](x[of])) for of in rows]
            again = [pipe.stages[1](pipe.stages[0](x[of])) for of in rows]
            assert all(map(torch.equal, outputs, again)), "no dropout"
            value = sum(float(loss(output, y[of])) for output, of in zip(outputs, rows, strict=True)) / N
            outcome = pipe.step((x, y))
            assert outcome is not None
            assert outcome.loss == pytest.approx(value, rel=1e-12)
            for parameter in pipe.parameters():
                parameter.grad = None
            assert modes(pipe) == expected_modes
            pipe.evaluate([(x, y)])
            [*pipe.predict([(x, None)])]
            assert modes(pipe) == expected_modes


def test_a_check_has_the_same_modes(alone: World, compiled: Path) -> None:
    x, y = batch(0)
    for build, _ in CASES.values():
        with Pipeline(compiled, build, loss, (x[:B], y[:B])) as pipe:
            assert "check: passed" in pipe.check((x, y))
