"""Loops of one's own on four ranks, a case each; what must hold is asserted on every rank.

torchrun --nproc-per-node=4 pipelines.py CASE DIRECTORY..
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from chimera_runtime import CheckFailed, Checkpoints, PeerLost, Pipeline
from chimera_runtime.blame import ModelError
from chimera_runtime.program.compiled_program import load

SIZE, WIDTH, SCALE = 2, 4, 256.0


def build_stage(stage: int, _stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh()).double()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def data(micro_batches: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, SIZE * micro_batches, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def pipeline(directory: Path, build: Callable[[int, int], nn.Module] = build_stage, **options: object) -> Pipeline:
    x, y = data(1)
    return Pipeline(directory, build, loss, (x, y), **options)  # type: ignore[arg-type]


def weights(of: Pipeline) -> list[torch.Tensor]:
    return [p.detach().clone() for p in of.parameters()]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def raised(call: Callable[[], object]) -> Exception | None:
    """The error of a call."""
    try:
        call()
    except Exception as error:
        return error
    return None


def interleaved(first: Path, second: Path) -> None:
    """Two pipelines whose steps take turns train bitwise as each does alone."""

    def trained(directories: list[Path]) -> list[list[torch.Tensor]]:
        pipelines = [pipeline(directory, seed=i) for i, directory in enumerate(directories)]
        optimizers = [torch.optim.Adam(of.parameters(), lr=0.1) for of in pipelines]
        for number in range(3):
            for of, optimizer in zip(pipelines, optimizers, strict=True):
                of.step(data(4, number))
                optimizer.step()
                optimizer.zero_grad()
        for of in pipelines:
            of.close()
        return [weights(of) for of in pipelines]

    together = trained([first, second])
    alone = pipeline(second, seed=1)
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.1)
    for number in range(3):
        alone.step(data(4, number))
        optimizer.step()
        optimizer.zero_grad()
    assert same(weights(alone), together[1])
    assert not same(weights(alone), weights(pipeline(second, seed=1))), "nothing was trained"


def norms(directory: Path) -> None:
    """In a bidirectional schedule a norm made by hand counts every stage twice; ours counts it once."""
    of = pipeline(directory)
    of.step(data(4))
    by_hand = sum(p.grad.square().sum() for p in of.parameters() if p.grad is not None)
    dist.all_reduce(by_hand)
    norm = of.clip_grad_norm_(1e9)
    assert abs(float(by_hand) ** 0.5 - float(norm) * 2**0.5) < 1e-12, "two replicas of each stage"
    of.clip_grad_norm_(float(norm) / 2)
    assert abs(float(of.clip_grad_norm_(1e9)) - float(norm) / 2) < 1e-5


def infinite(directory: Path) -> None:
    """A gradient that is infinite in one stage makes every rank skip the step and halve the scale."""

    class Overflowing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + (self.weight * 0).abs().sqrt().sum()

    def build(stage: int, stages: int) -> nn.Module:
        return Overflowing(WIDTH, WIDTH).double() if stage == 2 else build_stage(stage, stages)

    of = pipeline(directory, build)
    optimizer = torch.optim.SGD(of.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    before = weights(of)
    of.step(data(4), scaler=scaler)
    of.unscale_(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2
    assert same(weights(of), before)


def mesh(directory: Path) -> None:
    """Pipelines over one dimension of a mesh; over the other the caller averages, as one larger mini-batch."""
    dimensions = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pipelines, replicas = dimensions["pp"].get_group(), dimensions["dp"].get_group()

    def plain(stage: int, _stages: int) -> nn.Module:
        torch.manual_seed(stage)
        return nn.Linear(WIDTH, WIDTH).double()

    mine, whole = pipeline(directory, plain, group=pipelines), pipeline(directory, plain, group=pipelines)
    mine.step(data(4, seed=dimensions["dp"].get_local_rank()))
    for seed in range(2):
        whole.step(data(4, seed), accumulate=True)
    for parameter, expected in zip(mine.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(parameter.grad, group=replicas)
        torch.testing.assert_close(parameter.grad / 2, expected.grad, rtol=1e-12, atol=1e-15)


class Noting(nn.Module):
    """A layer with dropout, whose buffer and attribute change in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.calls = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), 0
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.seen: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += x.detach().mean((0, 1))
        return torch.tanh(self.drop(self.linear(x)))


def checks(*directories: Path) -> None:
    """A check leaves no trace in the training around it; a fault is told on all ranks, with its place."""

    def build(stage: int, _stages: int) -> nn.Module:
        torch.manual_seed(stage)
        return Noting().double()

    def batch(micro_batches: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = (t.unsqueeze(1) * torch.arange(1, 5).view(1, 4, 1) for t in data(micro_batches, seed))
        return x, y

    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)

    for directory in directories:
        streams = bool(load(directory).job.period)
        tied: Any = [[(0, "linear.weight"), (3, "linear.weight")]] if load(directory).job.ties else ()
        seen: list[Any] = []
        for is_checked in (False, True):
            of = Pipeline(directory, build, loss, batch(1), tied=tied, **{"optimizer": sgd} if streams else {})
            optimizer = None if streams else sgd(of.named_parameters())
            for number in range(3):
                given = batch(of.micro_batches, 10 * number + of.copy)
                of.step(given)
                if is_checked:
                    report = of.check(given)
                    assert report.startswith("check: passed"), report
                else:
                    of.drain()
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
            states = [tensor for module in of.stages.values() for tensor in module.state_dict().values()]
            seen.append((*(t.tolist() for t in states), *(module.calls for module in of.stages.values())))
            if is_checked:
                faulty = load(directory).job.stages // 2 - 1
                hooks = [m.register_forward_hook(lambda *a: a[2] * 1.5) for s, m in of.stages.items() if s == faulty]
                error = raised(lambda of=of, given=given: of.check(given))  # type: ignore[misc]
                for hook in hooks:
                    hook.remove()
                assert isinstance(error, CheckFailed), error
                assert f"that differs: what stage {faulty} hands on for micro-batch 0" in str(error), error
                texts: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(texts, str(error))
                assert len({*texts}) == 1
                of.step(given)
            of.close()
        assert seen[0] == seen[1], directory


def closed(flushing: Path, stream: Path) -> None:
    """All that a pipeline opened is closed with it, whatever it was used for and whatever the loop still holds."""

    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)

    def open_now() -> tuple[list[str], int]:
        paths = (Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
        return sorted(str(path.readlink()) for path in paths if path.is_symlink()), len(os.listdir("/proc/self/task"))

    def sharded(of: Pipeline) -> object:
        optimizer = of.sharded_optimizer(sgd)
        of.step(data(4))
        of.clip_grad_norm_(1.0)
        optimizer.step()
        return optimizer, optimizer.state_dict()

    def forwards(of: Pipeline) -> object:
        return of.evaluate([data(4)]), [*of.predict([data(4)])], of.step(data(4))

    def loaded(of: Pipeline) -> object:
        loader = of.loader(torch.utils.data.TensorDataset(*data(12)), num_workers=1)
        for batch in loader:
            of.step(batch)
            for parameter in of.parameters():
                parameter.grad = None
        return loader

    def saved(of: Pipeline) -> object:
        optimizer = sgd(of.named_parameters())
        checkpoints = Checkpoints(flushing / "checkpoints", of, optimizer)
        of.step(data(4))
        optimizer.step()
        checkpoints.save()
        checkpoints.close()
        return checkpoints, optimizer

    def streamed(of: Pipeline) -> object:
        return [of.step(data(4, number)) for number in range(3)]

    def used(directory: Path, use: Callable[[Pipeline], object], **options: object) -> object:
        with pipeline(directory, **options) as of:
            held = of, use(of)
            assert open_now() != before
        return held

    before = open_now()
    held: list[Any] = [used(flushing, use) for use in (sharded, forwards, loaded)]
    assert open_now() == before, "without waiting for the collector"
    held += [used(stream, streamed, optimizer=sgd), used(flushing, saved)]
    assert open_now() == before
    assert held[1][1][2].loss > 0
    for call in (
        lambda: held[0][0].clip_grad_norm_(1.0),
        lambda: held[0][1][0].step(),
        lambda: held[0][0].check_replicas(),
    ):
        assert "the pipeline is closed" in str(raised(call))
    for number in range(8):
        of = pipeline(flushing)
        of.step(data(4))
        time.sleep(0.01 * ((3 * dist.get_rank() + number) % 4))  # no rank waits for another one
        of.close()
    assert open_now() == before
    dist.barrier()  # a rank that ends takes connections with it


def frozen(both: Path, down: Path) -> None:
    """With a sharded optimizer ranks whose stages are all frozen train as without, and resume; overlaps are refused."""

    def build(stage: int, stages: int) -> nn.Module:
        return build_stage(stage, stages).requires_grad_(stage not in (0, 3))

    def adam(named: Any) -> torch.optim.Optimizer:
        decayed, others = ([p for n, p in named if ("weight" in n) is of_weights] for of_weights in (True, False))
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.1)

    for directory in (both, down):
        seen = []
        for is_sharded in (False, True):
            for resumes in (False, True):
                with pipeline(directory, build) as of:
                    optimizer = (
                        of.sharded_optimizer(lambda named: torch.optim.AdamW(named, lr=0.1))
                        if is_sharded
                        else torch.optim.AdamW([{"params": [p for p in of.parameters() if p.requires_grad]}], lr=0.1)
                    )
                    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
                    checkpoints = Checkpoints(directory / f"sharded {is_sharded}", of, optimizer, schedulers=schedule)
                    assert (checkpoints.resume() is not None) is resumes
                    for number in range(2):
                        of.step(data(4, number + of.updates))
                        of.clip_grad_norm_(1.0)
                        optimizer.step()
                        optimizer.zero_grad()
                        schedule.step()
                    checkpoints.save()
                    checkpoints.close()
                    seen.append(weights(of))
        assert same(seen[0], seen[2])
        assert same(seen[1], seen[3])
        with pipeline(directory, build) as of:
            of.sharded_optimizer(adam).step()

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = torch.randn(6, WIDTH, dtype=torch.float64)
            self.first, self.second = nn.Parameter(base[:WIDTH]), nn.Parameter(base[2:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.first @ self.second

    of = pipeline(both, lambda stage, stages: Views() if stage == 1 else build_stage(stage, stages))
    error = str(raised(lambda: of.sharded_optimizer(adam)))
    assert error.startswith("stages.1.first and stages.1.second overlap in memory"), error


def encoded(directory: Path) -> None:
    """A mini-batch with a graph is refused on all ranks before anything is sent; forwards alone may have one."""
    encoder = nn.Linear(WIDTH, WIDTH).double()
    x, y = data(4)
    with pipeline(directory) as of:
        for batch in ((encoder(x), y), (x, encoder(y)), (x.clone().requires_grad_(), y)):
            assert "requires a gradient" in str(raised(lambda batch=batch: of.step(batch)))  # type: ignore[misc]
        assert encoder.weight.grad is None
        assert of.evaluate([(encoder(x), y)]) > 0
        assert len([*of.predict([(encoder(x), None)])]) == 1
        assert of.step((encoder(x).detach(), y)).loss > 0


def failing(directory: Path) -> None:
    """A stage that raises ends the step of every rank, each with an error that says why; nobody hangs."""

    class Moody(nn.Linear):
        steps = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Moody.steps += self.training
            if Moody.steps > 6:
                raise ValueError("not today")
            return super().forward(x)

    def build(stage: int, stages: int) -> nn.Module:
        return Moody(WIDTH, WIDTH).double() if stage == 2 else build_stage(stage, stages)

    of = pipeline(directory, build, timeout=20.0)

    def train() -> None:
        for number in range(3):
            of.step(data(4, number))
            for parameter in of.parameters():
                parameter.grad = None

    start = time.monotonic()
    error = raised(train)
    if dist.get_rank() == 2:
        assert isinstance(error, ModelError)
        assert isinstance(error.__cause__, ValueError)
    else:
        assert isinstance(error, PeerLost)
    assert time.monotonic() - start < 60
    assert "make a new one" in str(raised(lambda: of.step(data(4))))
    os._exit(0)  # messages are under way for ever


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](*map(Path, sys.argv[2:]))
    dist.destroy_process_group()
