"""What a stage may do inside: each way trains beside plain modules, on four ranks; every rank prints how far it is off.

torchrun --nproc-per-node=4 inside.py WAY DIRECTORY
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from chimera_runtime import Pipeline

WIDTH, B, STEPS = 8, 2, 3
half = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.second(torch.nn.functional.gelu(self.first(x))))


class Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Cast(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with half():
            return super().forward(x)


def compiled(backend: str) -> nn.Module:
    block = Block()
    block.compile(backend=backend)
    return block


BUILT: dict[str, Callable[[], nn.Module]] = {
    "plain": Block,
    "checkpoint": Checkpointed,
    "aot_eager": lambda: compiled("aot_eager"),
    "inductor": lambda: compiled("inductor"),
    "wrapped": lambda: torch.compile(Block(), backend="aot_eager"),  # type: ignore[return-value]
    "autocast inside": Cast,
    "autocast around": Block,
}


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target).square().mean()


def trained(directory: str, way: str) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of all updates, and the weights after the last."""
    around: Callable[[], AbstractContextManager[Any]] = half if way == "autocast around" else nullcontext
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(STEPS, 2, 4 * B, WIDTH, generator=generator)
    with around():
        pipe = Pipeline(directory, lambda *_: BUILT[way](), loss, (data[0, 0, :B], data[0, 1, :B]))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.3)
    losses = []
    for x, y in data:
        with around():
            losses.append(pipe.step((x, y)).loss)
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.detach().clone() for p in pipe.parameters()]
    pipe.close()
    return losses, weights


def main() -> None:
    way, directory = sys.argv[1:]
    dist.init_process_group("gloo")
    losses, weights = trained(directory, "plain")
    others, changed = trained(directory, way)
    off = max(float((a - b).abs().max()) for a, b in zip(weights, changed, strict=True))
    far = max(abs(a - b) for a, b in zip(losses, others, strict=True))
    print(f"rank {dist.get_rank()}: {way}: weights off by {off:.1e}, losses by {far:.1e}", flush=True)
    dist.destroy_process_group()


main()
