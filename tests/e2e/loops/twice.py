"""Trains with two programs side by side, of which the second runs forwards again: gradients and modules stay the same.

torchrun --nproc-per-node=2 twice.py DIRECTORY OTHER_DIRECTORY KIND
"""

import random
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from chimera_runtime import Pipeline, auxiliary_loss

B, WIDTH, UPDATES = 2, 4, 5
KIND = sys.argv[3]


class Stage(nn.Module):
    """A layer whose result depends on what differs from call to call, by ``KIND``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.register_buffer("seen", torch.zeros(WIDTH).double())
        self.seen: torch.Tensor
        self.calls = 0

    def factor(self, y: torch.Tensor, state: dict[str, Any]) -> Any:
        if KIND == "containers":
            state["weight"] = state["weight"] * 1.3
            return state["weight"]
        if KIND == "statistic":
            self.calls += 1
            if self.calls > 2:
                self.seen = self.seen + y.detach().mean(0)
            return 1 + self.seen
        if KIND == "generators":
            return random.random() + np.random.rand() + torch.rand(1)
        return torch.softmax(y, 0) if KIND == "influence" else 1.0

    def part(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        auxiliary_loss("balance", y.square().mean())
        return y

    def forward(self, x: torch.Tensor, state: dict[str, Any]) -> Any:
        if KIND == "checkpoint":
            return checkpoint(self.part, x, use_reentrant=False)
        y = self.linear(x)
        return torch.tanh(y * self.factor(y, state))

    def forward_and_backward(self, x: torch.Tensor, backward: Any, **keywords: Any) -> Any:
        y = self(x, **keywords)
        backward()
        return y


def build_stage(number: int, _stages: int) -> nn.Module:
    torch.manual_seed(number)
    return Stage()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def batch(update: int, micro_batches: int) -> Any:
    numbers = torch.Generator().manual_seed(update)
    x, y = torch.randn(2, B * micro_batches, WIDTH, generator=numbers, dtype=torch.float64)
    return x, y, {"state": {"weight": torch.ones_like(x)}}


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.05)


def trained(directory: str) -> list[Any]:
    """All that comes of some updates."""
    micro = batch(0, 1)
    probed = Pipeline(directory, build_stage, loss, micro, optimizer=sgd if "stream" in sys.argv else None)
    with probed as pipe:
        optimizer, results = sgd(list(pipe.named_parameters())), []
        for update in range(UPDATES):
            outcome = pipe.step(batch(update, pipe.micro_batches))
            if "stream" not in sys.argv:
                results += [(name, p.grad.clone()) for name, p in pipe.named_parameters() if p.grad is not None]
                results += [("loss", torch.tensor([outcome.loss, *outcome.auxiliary.values()]))]
                optimizer.step()
                optimizer.zero_grad()
            elif update == UPDATES - 1:
                pipe.drain()
                results += [(name, p.detach().clone()) for name, p in pipe.named_parameters()]
        modules = [(f"{number} {name}", b) for number, m in pipe.stages.items() for name, b in m.named_buffers()]
        counts = [(f"{number} calls", torch.tensor(m.calls)) for number, m in pipe.stages.items()]
    return sorted([*results, *modules, *counts], key=lambda result: str(result[0]))


def main() -> None:
    dist.init_process_group("gloo")
    plain, again = map(trained, sys.argv[1:3])
    assert [name for name, _ in plain] == [name for name, _ in again]
    for (name, one), (_, other) in zip(plain, again, strict=True):
        torch.testing.assert_close(other, one, msg=lambda text, name=name: f"{name}: {text}")
    print("the same")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
