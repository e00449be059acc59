"""Micro-batches of random lengths and numbers of items, beside the same in one process.

torchrun --nproc-per-node=4 shapes.py DIRECTORY UPDATES [functions] [list] [loader] [counts] [slices]

Where the directory has programs for several N, so many micro-batches come as are drawn, to each copy its own. A
mini-batch in one piece has micro-batches of one length, of which the last one may have fewer items; those of functions,
lists and loaders differ in both.
"""

import math
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from chimera_runtime import Misuse, Pipeline, RanksDiffer, whole

SIZE, LENGTH, WIDTH = 4, 6, 5
ASKED = {*sys.argv[3:]}
COUNTS = "counts" in ASKED
STEP = 2 if "slices" in ASKED else 1
"""What divides a length."""

Triple = tuple[Any, Any, dict[str, Any]]


class Part(nn.Module):
    """Mixes along the sequence, and hands on two tensors."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        self.linear, self.first, self.last = nn.Linear(WIDTH, WIDTH), stage == 0, stage == stages - 1

    def forward(self, *states: Any, scale: Any, borders: Any) -> Any:
        pairs = [(state, state.mean(2)) if self.first else (state["x"], state["mean"]) for state in states]
        x, mean = map(sum, zip(*pairs, strict=True))
        mixed = x if "slices" in ASKED else x.cumsum(1)
        x = torch.tanh(self.linear(mixed)) * scale[:, :, None] + mean[:, :, None] / (1 + len(borders))
        return x if self.last else {"x": x, "mean": mean * 2}


def build(stage: int, stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return Part(stage, stages).double()


def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
    squares = (output - target).square()
    return (squares.sum(), (target > 0).sum()) if COUNTS else squares.mean()


def micro_batch(seed: int, items: int, length: int) -> Triple:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, items, length, WIDTH, generator=generator, dtype=torch.float64)
    scale = torch.rand(items, length, generator=generator, dtype=torch.float64)
    return x, y, {"scale": scale, whole("borders"): torch.arange(1 + seed % 3)}


def one_piece(seed: int, items: int, length: int) -> tuple[Triple, list[Triple]]:
    x, y, keywords = batch = micro_batch(seed, items, length)
    rows = [slice(start, min(start + SIZE, items)) for start in range(0, items, SIZE)]
    return batch, [(x[r], y[r], keywords | {"scale": keywords["scale"][r]}) for r in rows]


class Alone:
    """The model in one process, rank 0: it takes all micro-batches of all copies, one after the other."""

    def __init__(self, feeding: list[tuple[int, ...]]) -> None:
        self.feeding = feeding
        self.stages = [build(stage, len(feeding)) for stage in range(len(feeding))]
        self.optimizer = torch.optim.AdamW([p for s in self.stages for p in s.parameters()], lr=0.01)

    def loss(self, triple: Triple) -> Any:
        value, target, keywords = triple
        made: list[Any] = []
        for stage, feeding in zip(self.stages, self.feeding, strict=True):
            made.append(stage(*([made[stage] for stage in feeding] or [value]), **keywords))
        return loss(made[-1], target)

    def mean(self, micro_batches: list[Triple]) -> torch.Tensor:
        total, count = torch.zeros((), dtype=torch.float64), 0.0
        for triple in micro_batches:
            value = self.loss(triple)
            total, count = (total + value[0], count + float(value[1])) if COUNTS else (total + value, count + 1)
        return total / count

    def step(self, micro_batches: list[Triple]) -> float:
        mean = self.mean(micro_batches)
        mean.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(mean.detach())


class Items(torch.utils.data.Dataset[Triple]):
    """As many items as one update takes; `collate` gives each micro-batch of them a length."""

    def __init__(self, seed: int, count: int) -> None:
        self.seed, self.count = seed, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, item: int) -> tuple[int, int]:
        return self.seed, item


def collate(items: list[tuple[int, int]]) -> Triple:
    (seed, first), *_ = items
    return micro_batch(seed + first, len(items), STEP * random.Random(seed + first).randint(1, LENGTH // STEP))


def numbers_of(pipe: Pipeline, drawn: random.Random) -> list[int]:
    if len(pipe.numbers) == 1:
        return [pipe.micro_batches] * pipe.copies
    step = math.gcd(*pipe.numbers)
    largest = pipe.micro_batches // step
    numbers = [step * drawn.randint(0 if pipe.copies > 1 else 1, largest) for _ in range(pipe.copies)]
    return numbers if any(numbers) else [step] * pipe.copies


def mini_batches(pipe: Pipeline, update: int) -> tuple[list[Any], list[list[Triple]]]:
    """What each copy gives to `step`, as arguments, and its micro-batches."""
    drawn = random.Random(update)
    given: list[Any] = []
    of_copies: list[list[Triple]] = []
    kind = next((kind for kind in ("functions", "list", "loader") if kind in ASKED), "piece")
    for copy, number in enumerate(numbers_of(pipe, drawn)):
        seed = 10000 * (update + 1) + 1000 * copy
        if kind == "piece":
            length = STEP * drawn.randint(1, LENGTH // STEP)
            items = number * SIZE - (drawn.randint(0, SIZE - 1) if number else 0)
            batch, micro_batches = one_piece(seed, items, length)
            given.append(partial(pipe.step, batch))
        else:
            sizes = [(drawn.randint(1, SIZE), STEP * drawn.randint(1, LENGTH // STEP)) for _ in range(number)]
            micro_batches = [micro_batch(seed + m, *size) for m, size in enumerate(sizes)]
            if kind == "list":
                given.append(partial(pipe.step, micro_batches=micro_batches))
            else:
                count = number if len(pipe.numbers) > 1 else None
                given.append(partial(pipe.step, micro_batches.__getitem__, number=count))
        of_copies.append(micro_batches)
    if kind == "loader":
        items = pipe.items - drawn.randint(0, SIZE - 1)
        seed = 10000 * (update + 1)
        (batch,) = pipe.loader(Items(seed, items), collate_fn=collate, drop_last=False)
        per_copy = pipe.items // pipe.copies
        of_copies = [
            [
                collate([(seed, i) for i in range(start, min(start + SIZE, items))])
                for start in range(copy * per_copy, min((copy + 1) * per_copy, items), SIZE)
            ]
            for copy in range(pipe.copies)
        ]
        given = [partial(pipe.step, batch)] * pipe.copies
    return given, of_copies


def refused(pipe: Pipeline) -> None:
    """A misfit that one rank sees is refused on all ranks in the same words, and the pipeline can go on."""
    good = [micro_batch(m, SIZE, LENGTH) for m in range(pipe.micro_batches)]
    longer = [*good[:-1], micro_batch(9, SIZE, LENGTH + STEP)]
    too_long, longest = LENGTH // STEP + 1, LENGTH // STEP
    with pytest.raises(Misuse, match=rf"micro-batch \d* is \(\d, {too_long}.*, and the example's is \(\d, {longest}"):
        pipe.step(longer.__getitem__)
    empty = [*good[:-1], micro_batch(9, 0, LENGTH)]
    with pytest.raises(Misuse, match=r"micro-batch \d* has no items"):
        pipe.step(micro_batches=empty)
    if pipe.first_rank == 0 and dist.get_world_size() > 1:
        words = "the number of items is (3|1) on one and (4|2) on another"
        x, y, keywords = good[-1]
        mixed = (
            (x, y, keywords) if dist.get_rank() % 2 else (x[:-1], y[:-1], keywords | {"scale": keywords["scale"][:-1]})
        )
        with pytest.raises(RanksDiffer, match=words):
            pipe.step([*good[:-1], mixed].__getitem__)


def main() -> None:
    directory, updates = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with Pipeline(directory, build, loss, micro_batch(0, SIZE, LENGTH), varying=True) as pipe:
        alone = Alone([*pipe.job.feeding])
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        losses: list[float] = []
        expected = torch.zeros(updates, dtype=torch.float64)
        for update in range(updates):
            given, of_copies = mini_batches(pipe, update)
            losses.append(given[pipe.copy]().loss)
            if dist.get_rank() == 0:
                expected[update] = alone.step([triple for of_copy in of_copies for triple in of_copy])
            optimizer.step()
            optimizer.zero_grad()
            if update == 1 and not ASKED.isdisjoint(("functions", "list", "loader")):
                refused(pipe)
        for tensor in (expected, *(p.detach() for stage in alone.stages for p in stage.parameters())):
            dist.broadcast(tensor, 0)
        assert losses == pytest.approx(expected.tolist(), rel=1e-9)
        for stage, module in pipe.stages.items():
            for here, there in zip(module.parameters(), alone.stages[stage].parameters(), strict=True):
                torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-12)
        if dist.get_rank() == 0:
            print(f"{updates} updates as in one process, {len(pipe._varying._boundaries)} shapes")  # type: ignore[union-attr]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
