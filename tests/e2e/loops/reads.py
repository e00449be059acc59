"""A loop of one's own on a board, which counts what the host reads of it: each rank prints that of each update.

Copies are as late as they may be, and losses those of a run on the host.

torchrun --nproc-per-node=2 reads.py DIRECTORY [OPTION..]
"""

import json
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from chimera_runtime import Pipeline, auxiliary_loss
from chimera_runtime.ranks import world
from chimera_runtime.ranks.messages import Readout, Staging
from tests.e2e.board import BOARD, DEVICE, BoardGpu
from tests.unit.runtime.gpu_model import STREAMS

WIDTH, SIZE, UPDATES = 4, 2, 6

GPU, READ = BoardGpu(STREAMS[1:]), BoardGpu(STREAMS)
"""What messages and sums go through, and what reads losses. A board computes at once: only reads may be that late."""


class Stage(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if "auxiliary" in sys.argv:
            auxiliary_loss("square", y.square().mean())
        return y


def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
    total = (output - target).square().sum()
    return (total, len(output)) if "counted" in sys.argv else total


def made(stage: int, _stages: int) -> torch.nn.Module:
    torch.manual_seed(stage)
    return Stage(WIDTH, WIDTH)


def sgd(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.01)


class Update(NamedTuple):
    """The loss that is known after it, and what the host did: reads of the device, waits for it."""

    loss: float | None
    reads: int
    waits: int


def trained(device: str) -> list[Update]:
    """The updates of a run on a device."""
    micro_batch = torch.ones(SIZE, WIDTH), torch.zeros(SIZE, WIDTH)
    is_stream = "stream" in sys.argv
    pipe = Pipeline(sys.argv[1], made, loss, micro_batch, device=device, optimizer=sgd if is_stream else None)
    optimizer = sgd(list(pipe.named_parameters()))
    updates = []
    for _ in range(UPDATES):
        BOARD.reads.clear()
        GPU.blocked.clear()
        READ.blocked.clear()
        outcome = pipe.step(micro_batches=[micro_batch] * pipe.micro_batches)
        if not is_stream:
            optimizer.step()
            optimizer.zero_grad()
        known = None if outcome is None else outcome.loss
        updates.append(Update(known, BOARD.reads.total(), GPU.blocked["MainThread"] + READ.blocked["MainThread"]))
    pipe.close()
    return updates


def main() -> None:
    dist.init_process_group("gloo")
    on_host = trained("cpu")
    world.staging_of = lambda _device, _backend: Staging(GPU)
    world.reader_of = lambda _device: Readout(READ)
    on_board = trained(DEVICE)
    assert [update.loss for update in on_board] == [update.loss for update in on_host]
    print(json.dumps({"reads": [update.reads for update in on_board], "waits": [update.waits for update in on_board]}))


if __name__ == "__main__":
    main()
