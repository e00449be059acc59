"""A loop of one's own on a board, which counts what the host reads of it: each rank prints that of each update.

Copies are as late as they may be, and losses those of a run on the host.

torchrun --nproc-per-node=2 reads.py CASES, a JSON file with a list of the fields of `Case`
"""

import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import Pipeline, auxiliary_loss, report
from chimera_runtime.ranks import world
from chimera_runtime.ranks.messages import Readout, StagedTensor, Staging
from tests.e2e.board import BOARD, DEVICE, BoardGpu
from tests.unit.runtime.gpu_model import STREAMS

WIDTH, SIZE, LENGTH, UPDATES = 4, 2, 4, 5


@dataclass(frozen=True)
class Case:
    """A compiled program, and the model and the loop that run it: ``words`` say what they do."""

    name: str
    directory: str
    words: tuple[str, ...] = ()
    layers: int = 1


class Update(NamedTuple):
    """The loss that is known after it, and what the host did: reads of the device, waits for it."""

    loss: float | None
    reads: int
    waits: int


class DeviceSums(Staging):
    """Sums whose results are on the device alone, as those of NCCL are."""

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> StagedTensor:
        """As in `Staging`, without the copy on the host."""
        return replace(super().all_reduce(tensor, group), content=tensor)


class Stage(nn.Module):
    """Layers, and as the words say: parameters without a gradient, frozen or unused, and a count of the forwards."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.words = case.words
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(case.layers)])
        unused = case.layers if "absent" in case.words else 0
        self.unused = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2 * unused)])
        for parameter in [*self.unused][::2]:
            parameter.requires_grad_(False)
        self.register_buffer("forwards", torch.zeros(1) if "state" in case.words else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.forwards, torch.Tensor):
            self.forwards += 1
        for layer in self.layers:
            x = layer(x)
        if "beside" in self.words:
            auxiliary_loss("square", x.square().mean())
            report("largest", x.detach().amax(), 3)
        return x


class SeveralStage(Stage):
    """Takes and returns a pair, and takes a keyword argument."""

    def forward(self, pair: Any, factor: Any = None) -> Any:
        x, rest = pair if isinstance(pair, tuple) else (pair, pair)
        return super().forward(x * factor), rest.square()


class CarryingStage(Stage):
    """Looks back over slices by the sum of what came before."""

    def forward(self, x: torch.Tensor, carry: Any = None, start: int = 0) -> Any:
        sums = super().forward(x).cumsum(1) / (1 + start)
        sums = sums if carry is None else sums + carry
        return sums, sums[:, -1:]


KINDS = {"several": SeveralStage, "carries": CarryingStage}


def built(case: Case, stage: int, _stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return next((kind for word, kind in KINDS.items() if word in case.words), Stage)(case)


def loss_of(case: Case, output: Any, target: torch.Tensor) -> Any:
    total = ((output[0] if isinstance(output, tuple) else output) - target).square().sum()
    if "beside" in case.words:
        report("distance", total.detach())
    return (total, len(target)) if "counted" in case.words else total


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.001)


class Scaler:
    """Doubles the loss, by a factor on the device, as a GradScaler has it."""

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """The double."""
        return outputs * 2


def trained(case: Case, device: str, gpus: list[BoardGpu]) -> list[Update]:
    """The updates of a run on a device; the host may wait for any of the ``gpus``."""
    words = case.words
    example = torch.ones(SIZE, LENGTH, WIDTH), torch.zeros(SIZE, LENGTH, WIDTH)
    factor = torch.full((SIZE, 1, 1), 0.5)
    micro_batch = (*example, {"factor": factor}) if "several" in words else example
    settings: dict[str, Any] = {"device": device, "optimizer": sgd if "stream" in words else None}
    settings |= {"sum_dtype": torch.float64} if "wide" in words else {}
    pipe = Pipeline(case.directory, partial(built, case), partial(loss_of, case), micro_batch, **settings)
    optimizer = sgd(list(pipe.named_parameters()))
    updates = []
    for _ in range(UPDATES):
        BOARD.reads.clear()
        for gpu in gpus:
            gpu.blocked.clear()
        scaler = {"scaler": Scaler()} if "scaled" in words else {}
        if "cut" in words:
            x, y, factors = (torch.cat([tensor] * pipe.micro_batches) for tensor in (*example, factor))
            outcome = pipe.step((x, y, {"factor": factors}), **scaler)
        else:
            outcome = pipe.step(micro_batches=[micro_batch] * pipe.micro_batches, **scaler)
        reads, waits = BOARD.reads.total(), sum(gpu.blocked["MainThread"] for gpu in gpus)
        if device == DEVICE:
            sys.stderr.write(f"{case.name}: reads {dict(BOARD.reads)}, waits {waits}\n")
        if "stream" not in words:
            optimizer.step()
            optimizer.zero_grad(set_to_none="zeros" not in words)
        updates.append(Update(None if outcome is None else outcome.loss, reads, waits))
    pipe.close()
    return updates


def counted(case: Case) -> dict[str, list[int]]:
    """The reads and waits of the updates of a case."""
    cpu, accelerator_of = world.reader_of, world.accelerator_of
    staging_of = world.staging_of
    on_host = trained(case, "cpu", [])
    # A board computes at once: of what is copied only the numbers that are read may be as late as they come.
    messages, moves, read = BoardGpu(STREAMS[1:]), BoardGpu(STREAMS[1:]), BoardGpu(STREAMS)
    staging = DeviceSums if "nccl" in case.words else Staging
    world.staging_of = lambda _device, _backend: staging(messages)
    world.reader_of = lambda _device: Readout(read)
    world.accelerator_of = lambda _device: moves
    on_board = trained(case, DEVICE, [messages, moves, read])
    world.reader_of, world.accelerator_of, world.staging_of = cpu, accelerator_of, staging_of
    assert [update.loss for update in on_board] == [update.loss for update in on_host], case.name
    return {"reads": [update.reads for update in on_board], "waits": [update.waits for update in on_board]}


def main() -> None:
    dist.init_process_group("gloo")
    cases = [Case(**fields) for fields in json.loads(Path(sys.argv[1]).read_text())]
    print(json.dumps({case.name: counted(case) for case in cases}))


if __name__ == "__main__":
    main()
