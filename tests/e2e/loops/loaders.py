"""Loaders in a loop of one's own: every case on four ranks, which train and evaluate as on whole mini-batches.

torchrun --nproc-per-node=4 loaders.py SCHEDULE..
"""

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset

from chimera_runtime import Pipeline

WIDTH, B, ITEMS = 4, 2, 39


def build_stage(_stage: int, _stages: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def item(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.full((WIDTH,), number / ITEMS, dtype=torch.float64)
    return x, (3 * x).sin()


class Items:
    asked = 0

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, number: int) -> Any:
        self.asked += 1
        return item(number)


class Flow(IterableDataset[Any]):
    read = 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(ITEMS):
            self.read += 1
            yield item(number)


def whole(pipe: Pipeline, number: int, items: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Mini-batch ``number`` of this copy, all of it."""
    count = pipe.items // pipe.copies
    start = number * pipe.items + pipe.copy * count
    inputs, targets = zip(*map(item, range(start, start + (count if items is None else items))), strict=True)
    return torch.stack(inputs), torch.stack(targets)


def main() -> None:
    dist.init_process_group("gloo")
    for directory in sys.argv[1:]:
        with Pipeline(directory, build_stage, nn.functional.mse_loss, whole_example()) as pipe:
            trains(pipe)
            evaluates(pipe)
    dist.destroy_process_group()


def whole_example() -> Any:
    inputs, targets = zip(*map(item, range(B)), strict=True)
    return torch.stack(inputs), torch.stack(targets)


def trains(pipe: Pipeline) -> None:
    """The loss of each mini-batch, of a map-style dataset and of a stream whose end only some ranks see; twice."""
    count = ITEMS // pipe.items
    items, flow = Items(), Flow()
    expected = [step(pipe, whole(pipe, number)) for number in range(count)]
    for dataset in (items, flow):
        loader = pipe.loader(dataset)
        for _ in range(2):
            assert [step(pipe, batch) for batch in loader] == expected
    needed = len(pipe.needs) * B * count * 2
    assert items.asked == needed, (items.asked, needed)
    assert (flow.read == 2 * ITEMS) == bool(pipe.needs)
    assert bool(flow.read) == bool(pipe.needs)
    worked = pipe.loader(Items(), num_workers=1)
    assert [step(pipe, batch) for batch in worked] == expected
    worked.close()
    state = pipe.loader(Flow())
    for batch in islice(state, 1):
        step(pipe, batch)
    again = pipe.loader(Flow())
    again.load_state_dict(state.state_dict())
    assert [step(pipe, batch) for batch in again] == expected[1:]


def step(pipe: Pipeline, batch: Any) -> float:
    outcome = pipe.step(batch)
    for parameter in pipe.parameters():
        parameter.grad = None
    return outcome.loss


def evaluates(pipe: Pipeline) -> None:
    """All items count, those of the last mini-batch as well, which not all copies have."""
    count, rest = divmod(ITEMS, pipe.items)
    mine = pipe.items // pipe.copies
    batches = [whole(pipe, number) for number in range(count)]
    if last := max(0, min(mine, rest - pipe.copy * mine)):
        batches.append(whole(pipe, count, last))
    expected = pipe.evaluate(batches)
    for dataset in (Items(), Flow()):
        for workers in (0, 1):
            loader = pipe.loader(dataset, drop_last=False, num_workers=workers)
            assert pipe.evaluate(loader) == expected
            assert pipe.evaluate(loader) == expected
            loader.close()
    outputs = [*pipe.predict(pipe.loader(Items(), drop_last=False))]
    assert sum(map(len, outputs)) == sum(len(inputs) for inputs, _ in batches)


main()
