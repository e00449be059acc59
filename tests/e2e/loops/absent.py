"""A loop of one's own whose micro-batches lack the inputs of some sources, beside the same data in one process.

torchrun --nproc-per-node=4 absent.py DIRECTORY FOLDER [counts] [sharded] [wide] [varying]

The program has an encoder of images and one of sound, on two workers or on four: then there is one copy. The loss is a
mean or a sum and a count, the optimizer one or sharded, and gradients may be summed apart from those of backwards.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import Checkpoints, Misuse, Pipeline

SIZE, WIDTH, MICRO_BATCHES = 2, 4, 6
SOURCES = ("image", "sound")
ASKED = sys.argv[3:]
COUNTS = "counts" in ASKED
OPTIONS = {"varying": "varying" in ASKED}
EVERY = frozenset(range(MICRO_BATCHES))
# For each update, and each of two copies, the micro-batches without an image, and those without sound.
UPDATES = [
    [(frozenset(), frozenset()), (frozenset(), frozenset())],
    [({1, 4}, {0}), (frozenset(), {1, 2})],
    [(EVERY, frozenset()), ({2, 3}, {1})],
    [(EVERY, frozenset()), (EVERY, frozenset())],
    [(frozenset(), EVERY), (frozenset(), EVERY)],
    [(frozenset(), frozenset()), (frozenset(), {5})],
]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(value))


class Joining(Part):
    def forward(self, *, pixels: torch.Tensor | None, waves: torch.Tensor | None) -> torch.Tensor:
        given = [factor * value for factor, value in ((1, pixels), (2, waves)) if value is not None]
        return super().forward(sum(given))


def build(stage: int, _stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return (Joining() if stage == 2 else Part()).double()


def loss(output: torch.Tensor, target: torch.Tensor) -> object:
    squares = (output - target).square()
    return (squares.sum(), (target > 0).sum()) if COUNTS else squares.mean()


def micro_batch(update: int, copy: int, micro: int, lacking: tuple[set[int], set[int]] = (set(), set())) -> tuple:
    generator = torch.Generator().manual_seed(10_000 * update + 100 * copy + micro)
    image, sound, target = (torch.randn(SIZE, WIDTH, generator=generator, dtype=torch.float64) for _ in range(3))
    inputs = {"image": None if micro in lacking[0] else image}
    if micro not in lacking[1]:  # an entry that lacks, or is None
        inputs["sound"] = sound
    return inputs, target


def walk(stages: nn.ModuleList, inputs: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
    made = [None if inputs.get(name) is None else stages[s](inputs[name]) for s, name in enumerate(SOURCES)]
    return stages[3](stages[2](pixels=made[0], waves=made[1]))


def mean(stages: nn.ModuleList, pairs: list[tuple]) -> torch.Tensor:
    losses = [loss(walk(stages, inputs), target) for inputs, target in pairs]
    if COUNTS:
        return sum(total for total, _ in losses) / sum(count for _, count in losses)
    return sum(losses) / len(losses)


def optimizer_of(pipe: Pipeline) -> Any:
    def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([parameter for _, parameter in named], lr=0.1, weight_decay=0.1)

    return pipe.sharded_optimizer(make) if "sharded" in ASKED else make([*pipe.named_parameters()])


def close(here: float, there: float) -> bool:
    return abs(here - there) <= 1e-12 * max(1.0, abs(there))


def main() -> None:
    dist.init_process_group("gloo")
    directory, folder = Path(sys.argv[1]), Path(sys.argv[2])
    alone = nn.ModuleList(build(stage, 4) for stage in range(4))
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1, weight_decay=0.1)
    pipe = Pipeline(
        directory, build, loss, micro_batch(0, 0, 0), **OPTIONS, sum_dtype=torch.float64 if "wide" in ASKED else None
    )
    stepped = optimizer_of(pipe)
    checkpoints = Checkpoints(folder, pipe, optimizers=stepped)

    def compare() -> None:
        for number, stage in pipe.stages.items():
            for here, there in zip(stage.parameters(), alone[number].parameters(), strict=True):
                assert torch.allclose(here, there, rtol=1e-10, atol=1e-15), number
                if "sharded" in ASKED:
                    continue
                state, expected = stepped.state[here], optimizer.state[there]
                assert state.keys() == expected.keys(), number
                assert all(torch.allclose(state[key], expected[key], rtol=1e-9, atol=1e-18) for key in state), number

    for update, lacking in enumerate(UPDATES):
        batches = [[micro_batch(update, c, m, lacking[c]) for m in range(MICRO_BATCHES)] for c in range(pipe.copies)]
        if update == 4:  # a mini-batch in one piece: each micro-batch lacks what is None
            for of_copy in batches:
                of_copy[:] = [({"image": inputs.get("image")}, target) for inputs, target in of_copy]
        here = batches[pipe.copy]
        if update == 4 and pipe.copies == 1:
            image = torch.cat([inputs["image"] for inputs, _ in here])
            outcome = pipe.step(({"image": image, "sound": None}, torch.cat([target for _, target in here])))
        elif update % 2:
            outcome = pipe.step(micro_batches=here)
        else:
            outcome = pipe.step(here.__getitem__)
        total = mean(alone, [pair for of_copy in batches for pair in of_copy])
        total.backward()
        assert close(outcome.loss, total.item()), (outcome.loss, total.item())
        for number, stage in pipe.stages.items():
            for mine, theirs in zip(stage.parameters(), alone[number].parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None), (update, number)
                assert mine.grad is None or torch.allclose(mine.grad, theirs.grad, rtol=1e-10, atol=1e-15)
        norm = pipe.clip_grad_norm_(0.05)
        assert close(float(norm), float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)))
        for of in (stepped, optimizer):
            of.step()
            of.zero_grad()
        compare()
        if update == 3:
            checkpoints.save()
    # An update in two steps, of which the second has no image: the mean is over both.
    pairs = []
    for step, lacking in enumerate((UPDATES[0], UPDATES[3])):
        batches = [[micro_batch(20 + step, c, m, lacking[c]) for m in range(MICRO_BATCHES)] for c in range(pipe.copies)]
        pipe.step(micro_batches=batches[pipe.copy], accumulate=step > 0)
        pairs += [pair for of_copy in batches for pair in of_copy]
    mean(alone, pairs).backward()
    for number, stage in pipe.stages.items():
        for mine, theirs in zip(stage.parameters(), alone[number].parameters(), strict=True):
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-10, atol=1e-15), number
            mine.grad = theirs.grad = None
    # Forwards alone, where copies lack other inputs, and have other numbers of batches.
    rounds = [
        [micro_batch(7 + r, c, m, UPDATES[1][c]) for m in range(MICRO_BATCHES)]
        for c in range(pipe.copies)
        for r in range(1 + c)
    ]
    mine = [rounds[0]] if pipe.copy == 0 else rounds[1:]
    with torch.no_grad():
        expected = mean(alone, [pair for of_round in rounds for pair in of_round])
    assert close(pipe.evaluate([each.__getitem__ for each in mine]), expected.item())
    checked = [micro_batch(9, pipe.copy, m, UPDATES[1][pipe.copy]) for m in range(MICRO_BATCHES)]
    assert "check: passed" in pipe.check(micro_batches=checked)
    with pytest.raises(Misuse, match="no input for any of image and sound"):
        pipe.step(micro_batches=[({"image": None}, target) for _, target in rounds[0]])
    pipe.close()
    # The same again from the checkpoint.
    with Pipeline(directory, build, loss, micro_batch(0, 0, 0), **OPTIONS) as again:
        resumed = optimizer_of(again)
        Checkpoints(folder, again, optimizers=resumed).resume()
        for update, lacking in [*enumerate(UPDATES)][4:]:
            batch = [micro_batch(update, again.copy, m, lacking[again.copy]) for m in range(MICRO_BATCHES)]
            if update == 4:
                batch = [({"image": inputs.get("image")}, target) for inputs, target in batch]
            again.step(micro_batches=batch)
            again.clip_grad_norm_(0.05)
            resumed.step()
            resumed.zero_grad()
        for number, stage in again.stages.items():
            for here, there in zip(stage.parameters(), alone[number].parameters(), strict=True):
                assert torch.allclose(here, there, rtol=1e-10, atol=1e-15), number
    dist.barrier()
    dist.destroy_process_group()


main()
