"""A training loop on one rank, for what is kept of it: two stages on one worker, with buffers, AdamW and a schedule."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import chimera_ir
from chimera_runtime.checkpoint.checkpoints import Checkpoints, Resumed
from chimera_runtime.pipeline import Pipeline

B, N, WIDTH, UPDATES = 2, 2, 3, 6


class Count:
    """Something else that has a state: how often it was asked for a number."""

    def __init__(self) -> None:
        self.numbers = [0]

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.numbers = state["numbers"]


def compiled(folder: Path, micro_batches: int = N, *tied: int) -> Path:
    """Two stages on one worker."""
    options = chimera_ir.Options(tied=[tied] if tied else [])
    chimera_ir.compile("interleaved", options=options, P=1, v=2, N=micro_batches).write(folder)
    return folder


def stage(_stage: int, _stages: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()).double()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def mini_batch(update: int, items: int = B * N) -> tuple[torch.Tensor, torch.Tensor]:
    """Written as a formula, so that no version of torch draws other ones."""
    numbers = torch.arange(2 * items * WIDTH, dtype=torch.float64).reshape(2, items, WIDTH)
    x, y = torch.sin(7 * numbers + update)
    return x, y


def pipeline(directory: Path, build: Callable[[int, int], nn.Module] = stage, **options: Any) -> Pipeline:
    return Pipeline(directory, build, loss, mini_batch(0, B), **options)


def adam(pipe: Pipeline) -> torch.optim.Optimizer:
    """Groups with different settings: they are to be restored apart."""
    groups = [[p for p in pipe.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False)]
    return torch.optim.AdamW([{"params": group, "lr": lr} for group, lr in zip(groups, (0.05, 0.02), strict=True)])


class Loop:
    """Trains, and saves and resumes with everything that a checkpoint may keep."""

    def __init__(
        self,
        directory: Path,
        folder: Path,
        build: Callable[[int, int], nn.Module] = stage,
        optimizer: Callable[[Pipeline], torch.optim.Optimizer] = adam,
        **options: Any,
    ) -> None:
        self.pipe = pipeline(directory, build)
        self.optimizer = optimizer(self.pipe)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, UPDATES)
        self.count = Count()
        kept = {"schedulers": self.scheduler, "shared": {"count": self.count}} | options
        self.checkpoints = Checkpoints(folder, self.pipe, self.optimizer, **kept)

    def train(self, last: int) -> list[float]:
        """The losses of the updates up to ``last``."""
        losses = []
        while self.pipe.updates < last:
            outcome = self.pipe.step(mini_batch(self.pipe.updates))
            assert outcome is not None
            losses.append(outcome.loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.count.numbers[0] += 1
        return losses

    def save(self) -> None:
        """Saves, and waits until all is written."""
        self.checkpoints.save()
        self.checkpoints.wait()

    def resume(self) -> Resumed:
        resumed = self.checkpoints.resume()
        assert resumed is not None
        return resumed

    def close(self) -> None:
        self.checkpoints.close()
        self.pipe.close()
