"""A loop of one's own over a pipeline with frozen stages, on four ranks, beside one process.

torchrun --nproc-per-node=4 frozen.py DIRECTORY FROZEN-STAGE..
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import Pipeline

SIZE, WIDTH, MICRO_BATCHES = 2, 4, 8
FROZEN = [*map(int, sys.argv[2:])]


def build(stage: int, _stages: int) -> nn.Module:
    torch.manual_seed(stage)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    return module.requires_grad_(stage not in FROZEN)


def unlike(number: int, *, trained: bool) -> Callable[[int, int], nn.Module]:
    """As `build`, but for one stage, which is trained or not."""
    return lambda stage, stages: (
        build(stage, stages).requires_grad_(trained) if stage == number else build(stage, stages)
    )


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, SIZE * MICRO_BATCHES, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def pipeline(make: Callable[[int, int], nn.Module]) -> Pipeline:
    x, y = data(0)
    return Pipeline(Path(sys.argv[1]), make, loss, (x[:SIZE], y[:SIZE]))


def refusal(make: Callable[[int, int], nn.Module]) -> str:
    try:
        pipeline(make)
    except Exception as error:
        return str(error)
    return ""


def main() -> None:
    dist.init_process_group("gloo")
    alone = nn.Sequential(*(build(stage, 4) for stage in range(4)))
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1, weight_decay=0.1)
    with pipeline(build) as of:
        mine = [p for p in of.parameters() if p.requires_grad]
        assert bool(mine) is (dist.get_rank() not in FROZEN)
        stepped = torch.optim.AdamW([{"params": [*of.parameters()]}], lr=0.1, weight_decay=0.1)
        before = [p.detach().clone() for p in of.parameters()]
        for number in range(3):
            x, y = data(number)
            outcome = of.step((x, y))
            whole = loss(alone(x), y)
            whole.backward()
            assert abs(outcome.loss - whole.item()) < 1e-12
            for here, there in zip(of.parameters(), alone[dist.get_rank()].parameters(), strict=True):
                assert (here.grad is None) is (there.grad is None) is (dist.get_rank() in FROZEN)
                assert here.grad is None or torch.allclose(here.grad, there.grad, rtol=1e-12, atol=1e-15)
            norm = of.clip_grad_norm_(1.0)
            expected = torch.nn.utils.clip_grad_norm_([p for p in alone.parameters() if p.requires_grad], 1.0)
            assert abs(float(norm) - float(expected)) < 1e-12
            for each in (stepped, optimizer):
                each.step()
                each.zero_grad()
            with torch.no_grad():
                assert abs(of.evaluate([(x, y)]) - loss(alone(x), y).item()) < 1e-12
        for here, there in zip(of.parameters(), alone[dist.get_rank()].parameters(), strict=True):
            assert torch.allclose(here, there, rtol=1e-9)
        is_same = all(torch.equal(a, b) for a, b in zip(before, of.parameters(), strict=True))
        assert is_same is (dist.get_rank() in FROZEN), "weight decay, too, leaves frozen weights alone"
        assert not stepped.state if dist.get_rank() in FROZEN else stepped.state
    # The rank of the stage says what is wrong; others may find that rank gone.
    trained = min({*range(4)} - {*FROZEN})
    for stage, words in ((FROZEN[0], "is frozen in "), (trained, "has requires_grad, and ")):
        dist.barrier()
        said = refusal(unlike(stage, trained=stage in FROZEN))
        assert said, "the pipeline is made"
        assert dist.get_rank() != stage or (f"stage {stage} " in said and words in said), said
    dist.barrier()
    dist.destroy_process_group()


main()
