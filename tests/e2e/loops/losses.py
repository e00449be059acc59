"""A loss that is a module, on four ranks of which two hold the last stage: beside one process, and behind torch's API.

torchrun --nproc-per-node=4 losses.py CASE DIRECTORY..
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import CompiledSchedule, Misuse, Pipeline, report, stages_of

SIZE, WIDTH, STAGES, MICROS = 2, 4, 4, 4


class Loss(nn.Module):
    """A mean squared error with a trained projection and a trained scale."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(start))
        self.double()

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        error = (self.projection(output) - target).square().mean()
        return error * torch.exp(-self.scale) + self.scale


def build_stage(stage: int, _stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, SIZE * MICROS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, y


def trained(updates: int) -> Loss:
    """The loss of one process after some updates."""
    loss, stages = Loss(), [build_stage(stage, STAGES) for stage in range(STAGES)]
    optimizer = torch.optim.Adam([p for module in (*stages, loss) for p in module.parameters()], lr=0.05)
    for update in range(updates):
        x, y = batch(update)
        loss(nn.Sequential(*stages)(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


def assert_equal(mine: Loss, expected: Loss) -> None:
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(mine.get_parameter(name), parameter, rtol=1e-9, atol=1e-12, msg=name)


def replicas(directory: Path) -> None:
    """Both replicas of the loss are those of one process, with an optimizer that is sharded over them."""
    loss, (x, y) = Loss(), batch(0)
    with Pipeline(directory, build_stage, loss, (x[:SIZE], y[:SIZE])) as pipe:
        optimizer = pipe.sharded_optimizer(lambda named: torch.optim.Adam(named, lr=0.05))
        for update in range(3):
            pipe.step(batch(update))
            optimizer.step()
            optimizer.zero_grad()
        pipe.check(batch(3))
        if STAGES - 1 in pipe.stages:
            assert_equal(loss, trained(3))
    with pytest.raises(Misuse, match="the loss starts with other weights on rank 3 than on rank 0, first in scale"):
        Pipeline(directory, build_stage, Loss(float(dist.get_rank())), (x[:SIZE], y[:SIZE]))


def behind_torch(directory: Path) -> None:
    """The loss of the first rank with the last stage is that of the other; modes stay as they are."""
    held, loss = stages_of(directory, dist.get_rank()), Loss(float(dist.get_rank())).eval()
    modules = {stage: build_stage(stage, STAGES) for stage in held}
    x, y = batch(0)
    arguments, target = (x,) if 0 in held else (), {"target": y} if STAGES - 1 in held else {}
    with CompiledSchedule(directory, modules, loss) as schedule:
        optimizer = None
        for _ in range(2):
            schedule.step(*arguments, **target)
            optimizer = optimizer or torch.optim.SGD(schedule.pipeline.parameters(), lr=0.05)
            optimizer.step()
            optimizer.zero_grad()
        schedule.check(*arguments, **target)
        schedule.eval(*arguments, **target)
    assert not loss.training
    if STAGES - 1 not in held:
        return
    whole, twin = nn.Sequential(*[build_stage(stage, STAGES) for stage in range(STAGES)]), Loss()
    steps = torch.optim.SGD([*whole.parameters(), *twin.parameters()], lr=0.05)
    for _ in range(2):
        twin(whole(x), y).backward()
        steps.step()
        steps.zero_grad()
    assert_equal(loss, twin)


def reports(*directories: Path) -> None:
    """Ranks report under names of their own, some of them late; all know all of them, in loops and evaluations."""
    rank, (x, y) = dist.get_rank(), batch(0)

    class Reporting(nn.Module):
        def __init__(self, stage: int) -> None:
            super().__init__()
            self.stage, self.layer, self.calls = stage, build_stage(stage, STAGES), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            report("stage", self.stage, 1 + self.stage)
            if self.calls > 6:
                report(f"late {self.stage}", rank)
            y: torch.Tensor = self.layer(x)
            return y

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        report("accuracy", (output.sign() == target.sign()).double().mean(), len(output))
        return (output - target).square().mean()

    def expected(x: torch.Tensor, y: torch.Tensor) -> float:
        output = nn.Sequential(*[build_stage(stage, STAGES) for stage in range(STAGES)])(x)
        return (output.sign() == y.sign()).double().mean().item()

    for directory in directories:
        with Pipeline(directory, lambda s, _n: Reporting(s), loss, (x[:SIZE], y[:SIZE])) as pipe:
            names = []
            for update in range(4):
                outcome = pipe.step(batch(update))
                if update % 2 or rank == 0:  # each rank reads when it likes
                    assert abs(outcome.reports["stage"] - 2.0) < 1e-12
                    assert abs(outcome.reports["accuracy"] - expected(*batch(update))) < 1e-12
                    names.append(len(outcome.reports))
                for parameter in pipe.parameters():
                    parameter.grad = None
            assert names[0] == (2 if rank == 0 else names[0]), names
            assert names[-1] == 2 + STAGES, names
            evaluated = pipe.evaluate([batch(7)])
            assert abs(evaluated.reports["accuracy"] - expected(*batch(7))) < 1e-12, evaluated.reports
            assert len(evaluated.reports) == 2 + STAGES


def main() -> None:
    case, *directories = sys.argv[1:]
    dist.init_process_group("gloo")
    {"replicas": replicas, "behind_torch": behind_torch, "reports": reports}[case](*map(Path, directories))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
