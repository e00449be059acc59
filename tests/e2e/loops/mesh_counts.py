"""A loss of (sum, count) in the rows of a mesh, beside one process; every rank prints what is off, and by how much.

torchrun --nproc-per-node=4 mesh_counts.py TWO_WORKERS ONE_WORKER
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from chimera_runtime import BadCheckpoint, Pipeline, auxiliary_loss

B, N, WIDTH, STAGES = 2, 2, 6, 2
Batch = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


class Penalized(nn.Sequential):
    """Adds to the loss; where no item counts, it adds nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        auxiliary_loss("size", 0.01 * x.square().sum())
        output: torch.Tensor = super().forward(x)
        return output


def plain(stage: int, kind: type[nn.Sequential] = nn.Sequential) -> nn.Module:
    torch.manual_seed(stage)
    return kind(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, WIDTH)).double()


def sharded(stage: int, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(plain(stage), mesh=mesh)


def penalized(stage: int, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(plain(stage, Penalized), mesh=mesh)


def partly_sharded(stage: int, mesh: DeviceMesh) -> nn.Module:
    """The last layer is plain: its gradient is this row's own."""
    module = plain(stage)
    fully_shard(module[0], mesh=mesh)
    return module


def summed(stage: int, mesh: DeviceMesh) -> nn.Module:
    """FSDP is asked for the sum over the rows in place of the mean."""
    module = sharded(stage, mesh)
    module.set_gradient_divide_factor(1.0)
    return module


def split(stage: int, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(plain(stage), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def loss(output: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    y, counts = target
    return ((output - y).square().mean(1) * counts).sum(), counts.sum()


def mini_batch(seed: int, row: int) -> Batch:
    """In row 0 all items count, in row 1 the last, but in the third mini-batch none."""
    x = torch.randn(B * N, WIDTH, generator=torch.Generator().manual_seed(10 * seed + row), dtype=torch.float64)
    counts = torch.ones(B * N, dtype=torch.float64)
    if row:
        counts[: B * N if seed == 2 else -1] = 0
    return x, (x.roll(1, 1).sin(), counts)


def gradients(batches: list[Batch], is_penalized: bool) -> list[list[torch.Tensor]]:
    """Of the quotient of all sums by all counts, in one process."""
    stages = [plain(stage) for stage in range(STAGES)]
    total, count = torch.zeros(1), torch.zeros(1)
    for x, target in batches:
        value = x
        for stage in stages:
            total = total + (0.01 * value.square().sum() if is_penalized else 0.0)
            value = stage(value)
        part, of = loss(value, target)
        total, count = total + part, count + of
    (total / count).backward()
    return [[parameter.grad for parameter in stage.parameters()] for stage in stages]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def off(pipe: Pipeline, wanted: list[list[torch.Tensor]], factor: float = 1.0, of_row: bool = False) -> float:
    """By how much the gradients of spread parameters are off, or of those that are this row's own."""
    return max(
        float((whole(p.grad) - factor * expected).abs().max() / expected.abs().max())
        for stage, module in pipe.stages.items()
        for p, expected in zip(module.parameters(), wanted[stage], strict=True)
        if hasattr(p, "device_mesh") != of_row
    )


KINDS: dict[str, tuple[Callable[[int, DeviceMesh], nn.Module], bool]] = {
    "sharded": (sharded, False),
    "penalized": (penalized, False),
    "partly sharded": (partly_sharded, True),
    "summed": (summed, False),
    "split": (split, False),
    "plain": (lambda stage, _mesh: plain(stage), True),
    "sharded and replicated": (sharded, False),
}


def trained(kind: str, directory: str, mesh: DeviceMesh, rows: DeviceMesh) -> float:
    """A step, two steps as one, and a step in which one row has nothing that counts."""
    build, has_own = KINDS[kind]
    row = 0 if kind == "split" else dist.get_rank() // 2
    others = [0] if kind == "split" else [0, 0, 1, 1] if rows.ndim == 2 else [0, 1]
    x, (y, counts) = mini_batch(0, row)
    worst = 0.0
    with Pipeline(
        directory,
        lambda stage, _: build(stage, rows),
        loss,
        (x[B:], (y[B:], counts[B:])),
        group=mesh["pp"].get_group(),
        sum_dtype=torch.float64,
    ) as pipe:
        for seeds in ([0], [1, 0], [2]):
            for number, seed in enumerate(seeds):
                outcome = pipe.step(mini_batch(seed, row), accumulate=number > 0)
                assert outcome.weight == mini_batch(seed, row)[1][1].sum()
            if kind != "plain":
                wanted = gradients([mini_batch(seed, r) for r in others for seed in seeds], kind == "penalized")
                worst = max(worst, off(pipe, wanted, 2.0 if kind == "summed" else 1.0))
            own = [mini_batch(seed, row) for seed in seeds]
            if has_own and any(bool(counts.any()) for _, (_, counts) in own):
                worst = max(worst, off(pipe, gradients(own, False), of_row=True))
            for parameter in pipe.parameters():
                parameter.grad = None
        exported(pipe, f"{directory}.{kind}.pt", [plain(stage) for stage in range(STAGES)])
        (output,) = pipe.predict([(x, None)])
        assert torch.allclose(output, plain(1)(plain(0)(x)), rtol=1e-12)
    return worst


def exported(pipe: Pipeline, path: str, stages: list[nn.Module]) -> None:
    """One file, and a failure to write it is known in all rows."""
    for _ in range(3):
        pipe.export_weights(path)
    dist.barrier()
    expected = {f"stages.{s}.{name}": p for s, stage in enumerate(stages) for name, p in stage.named_parameters()}
    written = torch.load(path, weights_only=True)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(torch, "save", _full)
        if any(hasattr(p, "device_mesh") for p in pipe.parameters()):
            with pytest.raises(BadCheckpoint, match="cannot be written: the disk is full"):
                pipe.export_weights(path)
    dist.barrier()
    assert not [*Path(path).parent.glob("*.writing")]


def _full(*_: object) -> None:
    raise OSError(28, "the disk is full")


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    two, one = sys.argv[1:]
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "pp"))
    both = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("copies", "shards", "pp"))
    for kind in KINDS:
        of_two = kind != "sharded and replicated"
        worst = trained(kind, *((two, mesh, mesh["other"]) if of_two else (one, both, both["copies", "shards"])))
        print(f"rank {dist.get_rank()}: {kind}: off by {worst:.1e}", flush=True)
    dist.destroy_process_group()


main()
