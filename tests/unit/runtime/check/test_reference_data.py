"""The items of the reference are those of the ranks, which load them by other code."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from chimera_runtime.check.reference import mini_batches, seed_of
from chimera_runtime.data.micro_batch_source import Batches
from tests.unit.runtime.datasets import Drawing, Flowing
from tests.unit.runtime.models import CPU, model


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Turning:
    """A sampler that asks for the epoch, and draws."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(26).roll(self.epoch).tolist())


def collate(items: list[Any]) -> Any:
    """Draws, as one that masks words does."""
    inputs = torch.stack([x for x, _ in items])
    return inputs, torch.stack([y for _, y in items]) + torch.rand(len(items), 1), {"scale": inputs * 2}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    "changed", [{}, {"collate": collate}, {"dataset": Flowing}, {"sampler": lambda _data: Turning()}]
)
def test_the_ranks_see_the_same_in_each_epoch(parts: int, changed: dict[str, Any]) -> None:
    """26 items in mini-batches of 2 * 2 * 3: seven of them are four epochs."""
    used = replace(model(), **{"dataset": Drawing} | changed)
    reference = mini_batches(used, (2, 6, parts), 5, CPU)
    sampler = used.sampler and used.sampler(None)
    copies = [Batches(used.dataset(), 2, 2, parts, 3, copy, 5, used.collate, sampler) for copy in range(3)]
    for update in range(7):
        shown = [
            (batches.input(update, micro), batches.target(update, micro), batches.keywords(update, micro))
            for batches in copies
            for micro in range(2 * parts)
        ]
        for (x, y, keywords), (inputs, target, named) in zip(shown, next(reference), strict=True):
            assert torch.equal(x, inputs)
            assert torch.equal(y, target)
            assert keywords.keys() == named.keys()
            assert all(torch.equal(keywords[name], named[name]) for name in keywords)


def test_a_batch_keeps_its_structure_on_the_way_to_the_device() -> None:
    item = Pair(torch.ones(2), torch.zeros(2)), {"a": [torch.ones(1)]}
    (batch,) = next(mini_batches(model(items=lambda: [item]), (1, 1, 1), 0, CPU))
    inputs, targets, keywords = batch
    assert keywords == {}
    assert isinstance(inputs, Pair)
    assert inputs.left.shape == (1, 2)
    assert targets["a"][0].shape == (1, 1)


def test_a_seed_is_made_of_all_parts() -> None:
    """The value is that of docs/explanation/runtime.md, by another implementation: BLAKE2b of "item/1/2/3"."""
    assert seed_of("item", 1, 2, 3) != seed_of("item", 1, 23)
    assert 0 <= seed_of("item", 1, 2, 3) < 2**63
