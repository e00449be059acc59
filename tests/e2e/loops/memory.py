"""Stages that hand on memory which they write again, or hold what they are given: each trains as one process does.

torchrun --nproc-per-node=2 memory.py DIRECTORY KIND..
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import BadModel, PeerLost, Pipeline, auxiliary_loss

B, N, WIDTH, UPDATES = 2, 4, 8, 3


class Double(torch.autograd.Function):
    """Its backward returns the same memory each time, as that of a CUDA graph does; no version counts the writes."""

    memory = torch.zeros(B, WIDTH, dtype=torch.float64)

    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        Double.memory.data.copy_(2 * gradient)
        return Double.memory.detach()


class Stage(nn.Module):
    """A stage of some kind; stage 0 has the buffer, and the others use it as they use their input."""

    def __init__(self, kind: str, number: int, depth: int) -> None:
        super().__init__()
        self.kind, self.number, self.is_last = kind, number, number == depth - 1
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.offset = nn.Parameter(torch.ones(WIDTH).double())
        self.register_buffer("seen", torch.zeros(B, 1).double())
        self.work = torch.zeros(B, WIDTH, dtype=torch.float64)
        self.last: torch.Tensor | None = None
        self.calls = 0

    def forward(self, given: Any) -> Any:
        self.calls += 1
        x, beside = given if isinstance(given, tuple) else (given, None)
        if self.kind == "identity":
            return x if self.number == 1 else torch.tanh(self.linear(x))
        if self.number == 0:
            beside = self.made(x)
        if self.kind == "input":
            kept, self.last = self.last, x
            x = x if kept is None else x + kept.detach()
        if self.kind == "gradient" and self.number:
            x = Double.apply(x)
        if self.kind == "auxiliary":
            auxiliary_loss("calls", self.seen.add_(1.0)[0])
        y = torch.tanh(self.linear(x)) + self.offset * (1 if beside is None or self.number == 0 else beside)
        return y if self.is_last or beside is None else (y, beside)

    def made(self, x: torch.Tensor) -> torch.Tensor | None:
        """What stage 0 hands on beside its output."""
        if self.kind == "buffer" or (self.kind == "later" and self.calls > N):
            return self.seen.add_(1.0)
        if self.kind == "later":
            return torch.ones_like(self.seen)
        if self.kind == "workspace":
            return torch.sin(x, out=self.work)
        if self.kind == "graph" or (self.kind == "later_graph" and self.calls > N):
            self.work.data.copy_(x)
            return self.work.detach()
        if self.kind == "later_graph":
            return x.clone()
        if self.kind == "parameter":
            return self.offset[:4].repeat(2)
        if self.kind == "mask":
            return (x > 0).double()
        return None


def loss_of(kind: str) -> Any:
    """The mean, or a sum and a count in memory that the next call writes."""
    count = torch.zeros((), dtype=torch.float64)

    def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
        difference = (output - target).square()
        return (difference.sum(), count.copy_(difference.detach()[0, 0] + 1)) if kind == "count" else difference.mean()

    return loss


def batch(update: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.sin(7 * torch.arange(2 * B * N * WIDTH, dtype=torch.float64).reshape(2, B * N, WIDTH) + update)
    return x, y


def stages_of(kind: str, depth: int) -> list[Stage]:
    torch.manual_seed(0)
    return [Stage(kind, number, depth) for number in range(depth)]


def run(stages: list[Stage], x: torch.Tensor) -> Any:
    value: Any = x
    for stage in stages:
        value = stage(value)
    return value


def train_alone(stages: list[Stage], kind: str, update: int) -> tuple[float, list[torch.Tensor | None]]:
    """Loss and gradients of one process, one micro-batch after the other."""
    x, y = batch(update)
    loss, total, count = loss_of(kind), 0.0, 0.0
    parameters = [p for stage in stages for p in stage.parameters()]
    for inputs, targets in zip(x.split(B), y.split(B), strict=True):
        value = loss(run(stages, inputs.clone()), targets)
        value, counted = value if isinstance(value, tuple) else (value, torch.ones(()))
        value.backward()
        total, count = total + value.item(), count + counted.item()
    gradients = [None if p.grad is None else p.grad / count for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return total / count, gradients


def compare(kind: str, directory: str) -> None:
    """Trains, evaluates and predicts with a pipeline and in one process."""
    x, y = batch(0)
    depth = 4 if "late" in directory else 2
    pipe = Pipeline(directory, lambda number, count: stages_of(kind, count)[number], loss_of(kind), (x[:B], y[:B]))
    alone = stages_of(kind, depth)
    for stage in pipe.stages.values():
        stage.last, stage.calls = None, 0
    for update in range(UPDATES):
        value, gradients = train_alone(alone, kind, update)
        outcome = pipe.step(batch(update))
        assert abs(outcome.loss - value) < 1e-12, (kind, update, outcome.loss, value)
        if kind == "auxiliary":
            calls = [depth * (update * N + micro + 1) for micro in range(N)]
            assert abs(outcome.auxiliary["calls"] - sum(calls) / N) < 1e-9, outcome.auxiliary
        expected = {f"stages.{n}.{name}": g for (n, name), g in zip(names(alone), gradients, strict=True)}
        for name, parameter in pipe.named_parameters():
            if expected[name] is not None:
                torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-12, msg=f"{kind} {name}")
        for parameter in pipe.parameters():
            parameter.grad = None
    with torch.no_grad():
        expected_outputs = torch.cat([run(alone, inputs) for inputs in x.split(B)])
        (outputs,) = pipe.predict([(x, None)])
        assert torch.equal(outputs, expected_outputs), kind
    pipe.close()


def names(stages: list[Stage]) -> list[tuple[int, str]]:
    return [(stage.number, name) for stage in stages for name, _ in stage.named_parameters()]


def main() -> None:
    dist.init_process_group("gloo")
    directory, *kinds = sys.argv[1:]
    for kind in kinds:
        try:
            compare(kind, directory)
        except (BadModel, PeerLost) as error:
            print(error)
            sys.exit(isinstance(error, BadModel) + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
