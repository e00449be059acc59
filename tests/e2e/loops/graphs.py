"""A loop of one's own over a graph of stages, on four ranks, beside a walk of the same graph in one process.

torchrun --nproc-per-node=4 graphs.py DIRECTORY KIND EXPORTED
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import Pipeline
from tests.e2e.test_graphs import GRAPHS
from tests.graphs import edges_of

SIZE, LENGTH, WIDTH, MICRO_BATCHES = 2, 5, 4, 8
GRAPH = GRAPHS[sys.argv[2]]
STAGES, EDGES = sum(GRAPH.groups.values()), edges_of(GRAPH.groups, GRAPH.feeds)
SOURCES, SINKS = GRAPH.sources.split(), GRAPH.sinks.split()
LAST = sorted({*range(STAGES)} - {edge.source for edge in EDGES})


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *values: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        summed = sum(place * value for place, value in enumerate(values, start=1))
        for name, value in named.items():
            summed = summed + value * len(name)
        return torch.tanh(self.linear(summed))


class Named(Part):
    """Names what it gets, as a stage with keyword arguments of a batch must."""

    def forward(self, *, pixels: torch.Tensor, waves: torch.Tensor) -> torch.Tensor:
        return super().forward(pixels=pixels, waves=waves)


def build(stage: int, _stages: int) -> nn.Module:
    torch.manual_seed(stage)
    is_named = any(edge.target == stage and edge.keyword for edge in EDGES)
    return (Named() if is_named else Part()).double()


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def distance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).abs().mean()


LOSSES = dict(zip(SINKS or ["all"], (squares, distance), strict=False))


def data(seed: int, length: int = LENGTH, count: int = SIZE * MICRO_BATCHES) -> tuple:
    generator = torch.Generator().manual_seed(seed)

    def made(names: list[str]) -> object:
        tensors = [
            torch.randn(count, length, WIDTH, generator=generator, dtype=torch.float64) for _ in names or ["all"]
        ]
        return dict(zip(names, tensors, strict=True)) if names else tensors[0]

    return made(SOURCES), made(SINKS)


def walk(stages: nn.ModuleList, x: object) -> list[torch.Tensor]:
    """The outputs of the stages that feed no other, computed in one process."""
    outputs: list[torch.Tensor] = []
    sources = iter(SOURCES)
    for number, stage in enumerate(stages):
        fed = [edge for edge in EDGES if edge.target == number]
        positional = [outputs[edge.source] for edge in fed if not edge.keyword]
        if not fed:
            positional = [x[next(sources)] if isinstance(x, dict) else x]
        outputs.append(stage(*positional, **{edge.keyword: outputs[edge.source] for edge in fed if edge.keyword}))
    return [outputs[number] for number in LAST]


def losses_of(outputs: list[torch.Tensor], y: object) -> list[torch.Tensor]:
    targets = [*y.values()] if isinstance(y, dict) else [y]
    return [loss(*pair) for loss, pair in zip(LOSSES.values(), zip(outputs, targets, strict=True), strict=True)]


def close(here: float, there: float) -> bool:
    return abs(here - there) <= 1e-12 * max(1.0, abs(there))


def main() -> None:
    dist.init_process_group("gloo")
    alone = nn.ModuleList(build(stage, STAGES) for stage in range(STAGES))
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1, weight_decay=0.1)
    loss = LOSSES if SINKS else squares
    with Pipeline(Path(sys.argv[1]), build, loss, data(0, count=SIZE), varying=True) as pipe:
        mine = {number: [*stage.parameters()] for number, stage in pipe.stages.items()}
        stepped = torch.optim.AdamW(pipe.parameters(), lr=0.1, weight_decay=0.1)
        for update, length in enumerate((LENGTH, 3, LENGTH, 4)):
            x, y = data(update, length)
            outcome = pipe.step((x, y))
            each = losses_of(walk(alone, x), y)
            sum(each).backward()
            assert close(outcome.loss, sum(each).item())
            if SINKS:
                assert all(close(outcome.reports[f"loss of {s}"], v.item()) for s, v in zip(SINKS, each, strict=True))
            for number, parameters in mine.items():
                for here, there in zip(parameters, alone[number].parameters(), strict=True):
                    assert torch.allclose(here.grad, there.grad, rtol=1e-10, atol=1e-15), number
            norm = pipe.clip_grad_norm_(0.01)
            assert close(float(norm), float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)))
            for of in (stepped, optimizer):
                of.step()
                of.zero_grad()
        # Forwards alone, also of fewer items than a mini-batch has.
        x, y = data(7, count=SIZE * MICRO_BATCHES - 3)
        with torch.no_grad():
            outputs = walk(alone, x)
            each = losses_of(outputs, y)
        evaluated = pipe.evaluate([(x, y)])
        assert close(evaluated, sum(each).item())
        if SINKS:
            assert all(close(evaluated.reports[f"loss of {s}"], v.item()) for s, v in zip(SINKS, each, strict=True))
        (predicted,) = pipe.predict([(x, None)])
        values = [predicted[name] for name in SINKS] if SINKS else [predicted]
        assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(values, outputs, strict=True))
        assert "check: passed" in pipe.check(data(8))
        for number, parameters in mine.items():
            for here, there in zip(parameters, alone[number].parameters(), strict=True):
                assert torch.allclose(here, there, rtol=1e-9)
        pipe.export_weights(sys.argv[3])
    if dist.get_rank() == 0:
        exported = torch.load(sys.argv[3], weights_only=True)
        groups = [f"{group}.{place}" for group, size in GRAPHS[sys.argv[2]].groups.items() for place in range(size)]
        mine = {
            f"{group}.{name}": p for group, m in zip(groups, alone, strict=True) for name, p in m.named_parameters()
        }
        assert exported.keys() == mine.keys()
        assert all(torch.allclose(exported[name], parameter, rtol=1e-9) for name, parameter in mine.items())
    dist.barrier()
    dist.destroy_process_group()


main()
