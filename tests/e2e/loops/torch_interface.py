"""A script with the interface of torch's schedules, beside the model in one piece; ranks print how far it is off.

torchrun --nproc-per-node=4 torch_interface.py SCHEDULE, a class of torch or a directory.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from chimera_runtime import CheckFailed, CompiledSchedule, stages_of

B, N, WIDTH, LAYERS = 2, 8, 6, 8


class Layer(nn.Module):
    """Takes and hands on two tensors, the second without a gradient, and a keyword argument."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor, shift: torch.Tensor, *, gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.linear(x) * gain) + shift, shift


class Layers(nn.Module):
    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(number) for number in numbers])
        self.is_last = numbers[-1] == LAYERS - 1

    def forward(self, x: torch.Tensor, shift: torch.Tensor, *, gain: torch.Tensor) -> Any:
        for layer in self.layers:
            x, shift = layer(x, shift, gain=gain)
        return x if self.is_last else (x, shift)


def loss(output: torch.Tensor, target: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
    return (output - target).square().mean() * weight


def placement(how: str) -> tuple[int, tuple[int, ...]]:
    """The number of stages, and those of this rank."""
    rank = dist.get_rank()
    if hasattr(schedules, how):
        return (4, (rank,)) if how == "Schedule1F1B" else (8, (rank, rank + 4))
    stages = stages_of(how, rank)
    return (8 if "dualpipe_v" in how else 4), stages


def schedule_of(how: str, stages: list[PipelineStage], **options: Any) -> Any:
    """The line in which the scripts differ."""
    if not hasattr(schedules, how):
        return CompiledSchedule(how, stages, loss, **options)
    return getattr(schedules, how)(stages[0] if how == "Schedule1F1B" else stages, N, loss, **options)


def batches(count: int) -> Iterator[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield tuple(torch.randn(4, B * N, WIDTH, generator=generator, dtype=torch.float64).unbind())


class Script:
    def __init__(self, how: str) -> None:
        self.how = how
        count, held = placement(how)
        share = LAYERS // count
        self.stages = [
            PipelineStage(Layers(range(s * share, (s + 1) * share)), s, count, torch.device("cpu")) for s in held
        ]
        for stage in self.stages:
            if Path(how).is_dir() and any(stage.stage_index in stages_of(how, rank) for rank in range(dist.get_rank())):
                nn.init.zeros_(stage.submod.layers[0].linear.weight)  # a replica, which starts otherwise than the first
        self.share = share
        self.whole = Layers(range(LAYERS))
        self.has_first = any(stage.is_first for stage in self.stages)
        self.has_last = any(stage.is_last for stage in self.stages)
        self.worst = 0.0

    def off(self, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        assert mine.shape == theirs.shape, (mine.shape, theirs.shape)
        self.worst = max(self.worst, float((mine - theirs).abs().max()))

    def run(self, call: Callable[..., Any], batch: tuple[torch.Tensor, ...], **options: Any) -> tuple[Any, Any]:
        """A step or an evaluation, as torch's users write it."""
        x, shift, gain, y = batch
        losses: list[torch.Tensor] = []
        args = (x, shift) if self.has_first else ()
        if self.has_last:
            return call(*args, gain=gain, target=y, losses=losses, **options), losses
        return call(*args, gain=gain, **options), losses

    def compare(self, output: Any, losses: list[torch.Tensor], batch: tuple[torch.Tensor, ...], weight: float) -> Any:
        """Compares losses and outputs with those of the whole model; returns its losses."""
        parts = zip(*(tensor.chunk(N) for tensor in batch), strict=True)
        outputs = [(self.whole(x, shift, gain=gain), y) for x, shift, gain, y in parts]
        expected = torch.stack([loss(output, y, weight) for output, y in outputs])
        if self.has_last:
            self.off(torch.stack(losses).detach(), expected.detach())
            self.off(output.detach(), torch.cat([output for output, _ in outputs]).detach())
        else:
            assert output is None
            assert losses == []
        return expected

    def gradients(self) -> None:
        for stage in self.stages:
            for layer, number in zip(stage.submod.layers, range(stage.stage_index * self.share, LAYERS), strict=False):
                for mine, theirs in zip(layer.parameters(), self.whole.layers[number].parameters(), strict=True):
                    self.off(mine.grad, theirs.grad)

    def train(self) -> None:
        """Two steps of an optimizer, and an evaluation."""
        schedule = schedule_of(self.how, self.stages)
        mine = torch.optim.SGD([p for stage in self.stages for p in stage.submod.parameters()], lr=0.5)
        theirs = torch.optim.SGD(self.whole.parameters(), lr=0.5)
        *trained, judged = batches(3)
        for batch in trained:
            output, losses = self.run(schedule.step, batch, loss_kwargs={"weight": 2.0})
            self.compare(output, losses, batch, 2.0).mean().backward()
            self.gradients()
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            output, losses = self.run(schedule.eval, judged)
            self.compare(output, losses, judged, 1.0)
        if isinstance(schedule, CompiledSchedule):
            self.check(schedule, judged)

    def check(self, schedule: CompiledSchedule, batch: tuple[torch.Tensor, ...]) -> None:
        """Compares with one process, once with a fault in the stage before the last."""
        x, shift, gain, y = batch
        args, options = (x, shift) if self.has_first else (), {"target": y} if self.has_last else {}
        before = [p.detach().clone() for stage in self.stages for p in stage.submod.parameters()]
        report = schedule.check(*args, gain=gain, **options)
        assert report.startswith("check: passed"), report
        faulty = [stage for stage in self.stages if stage.stage_index == 1]
        hooks = [s.submod.layers[0].linear.weight.register_hook(lambda gradient: 2 * gradient) for s in faulty]
        error = None
        try:
            schedule.check(*args, gain=gain, **options)
        except CheckFailed as failed:
            error = f"{failed}"
        assert error is not None, "a gradient is doubled"
        assert "stage 1: gradients of update 1 differ by" in error, error
        assert "that differs: the gradient of module.layers.0.linear.weight of stage 1" in error, error
        for hook in hooks:
            hook.remove()
        after = [p for stage in self.stages for p in stage.submod.parameters()]
        assert all(map(torch.equal, before, after))

    def accumulate(self) -> None:
        """An evaluation before the first step, then gradients of sums, of two steps."""
        schedule = schedule_of(self.how, self.stages, scale_grads=False)
        judged, *trained = batches(3)
        if not hasattr(schedules, self.how):
            with torch.no_grad():
                output, losses = self.run(schedule.eval, judged)
                self.compare(output, losses, judged, 1.0)
        for batch in trained:
            output, losses = self.run(schedule.step, batch)
            self.compare(output, losses, batch, 1.0).sum().backward()
        self.gradients()

    def cut(self) -> None:
        """Batches that come in micro-batches, as newer releases of torch take them, and no outputs."""
        schedule = CompiledSchedule(self.how, {stage.stage_index: stage.submod for stage in self.stages}, loss)
        (batch,) = batches(1)
        x, shift, gain, y = (tensor.chunk(N) for tensor in batch)
        losses: list[torch.Tensor] = []
        output = schedule.step(
            arg_mbs=[*zip(x, shift, strict=True)] if self.has_first else None,
            kwarg_mbs=[{"gain": part} for part in gain],
            target_mbs=[*y] if self.has_last else None,
            losses=losses if self.has_last else None,
            return_outputs=False,
        )
        assert output is None
        expected = self.compare(self.whole(*batch[:2], gain=batch[2]) if self.has_last else None, losses, batch, 1.0)
        for parameter in self.whole.parameters():
            parameter.grad = None
        expected.mean().backward()
        self.gradients()
        assert float(schedule.clip_grad_norm_(1e9)) > 0
        schedule.close()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    script = Script(sys.argv[1])
    script.train()
    script.accumulate()
    if Path(script.how).is_dir():
        for stage in script.stages:
            stage.submod.zero_grad()
        script.cut()
    print(f"rank {dist.get_rank()}: off by {script.worst:.1e}", flush=True)
    dist.destroy_process_group()


main()
