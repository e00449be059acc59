"""Checkpoints in loops of one's own on four ranks, a case each; what must hold is asserted on every rank.

torchrun --nproc-per-node=4 checkpoints.py CASE FOLDER DIRECTORY ..
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import BadCheckpoint, Checkpoints, Pipeline

SIZE, WIDTH, UPDATES, AT = 2, 4, 7, 3

Named = list[tuple[str, nn.Parameter]]


class Layer(nn.Module):
    """Has parameters, dropout and buffers that the forward changes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.inner, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.norm(self.inner(x))))


def build_stage(stage: int, stages: int) -> nn.Module:
    """Eight layers, in as many stages as there are."""
    per_stage = 8 // stages
    return nn.Sequential(*(Layer(stage * per_stage + k) for k in range(per_stage))).double()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def mini_batch(update: int, pipe: Pipeline) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(update)
    x, y = torch.randn(2, pipe.items, WIDTH, generator=generator, dtype=torch.float64)
    mine = slice(pipe.copy * pipe.items // pipe.copies, (pipe.copy + 1) * pipe.items // pipe.copies)
    return x[mine], y[mine]


class Loop:
    """A pipeline with AdamW and a schedule of learning rates, in two groups."""

    def __init__(self, directory: str, folder: Path, lr: float = 0.05) -> None:
        x, y = torch.randn(2, SIZE, WIDTH, dtype=torch.float64)
        self.pipe = Pipeline(directory, build_stage, loss, example=(x, y))
        named = [*self.pipe.named_parameters()]
        groups = [
            {"params": [p for n, p in named if n.endswith("weight") == weights], "lr": lr / (1 + weights)}
            for weights in (True, False)
        ]
        self.optimizer = torch.optim.AdamW(groups)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, UPDATES)
        self.checkpoints = Checkpoints(folder, self.pipe, self.optimizer, schedulers=self.scheduler, keep=2)

    def train(self, last: int, save_at: tuple[int, ...] = ()) -> list[float]:
        losses = []
        while self.pipe.updates < last:
            outcome = self.pipe.step(mini_batch(self.pipe.updates, self.pipe))
            assert outcome is not None
            self.pipe.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(outcome.loss)
            if self.pipe.updates in save_at:
                self.checkpoints.save()
        return losses

    def close(self) -> None:
        self.checkpoints.close()
        self.pipe.close()


def same(folder: Path, directory: str) -> None:
    """A run that resumes has bitwise the losses and the weights of one that was not interrupted."""
    whole = Loop(directory, folder)
    assert whole.checkpoints.resume() is None
    expected = whole.train(UPDATES, save_at=(1, 2, AT))
    whole.close()
    dist.barrier()
    assert sorted(path.name for path in folder.glob("update-*")) == ["update-00000002", "update-00000003"]
    again = Loop(directory, folder)
    resumed = again.checkpoints.resume()
    assert resumed is not None
    assert (resumed.update, resumed.items, resumed.remarks) == (AT, AT * again.pipe.items, ())
    assert again.train(UPDATES) == expected[AT:]
    for (name, mine), (_, theirs) in zip(again.pipe.named_parameters(), whole.pipe.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    for stage, module in again.pipe.stages.items():
        for (name, mine), theirs in zip(module.named_buffers(), whole.pipe.stages[stage].buffers(), strict=True):
            assert torch.equal(mine, theirs), name
    again.close()


def main() -> None:
    dist.init_process_group("gloo")
    case, folder, *directories = sys.argv[1:]
    {"same": same}[case](Path(folder), *directories)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
