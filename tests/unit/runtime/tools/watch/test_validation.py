"""Held-out items count once each, whatever their number, on whichever copy."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chimera_runtime.blame import ModelError
from chimera_runtime.errors import Misuse
from chimera_runtime.model.model import ModelFile
from chimera_runtime.program.job import Place
from chimera_runtime.ranks.world import World
from chimera_runtime.tools.watch.progress import Validation
from tests.unit.runtime.kept import WIDTH, B, N, loss, mini_batch, pipeline
from tests.unit.runtime.models import model
from tests.unit.runtime.thread_ranks import alone_job


def items(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [*zip(*mini_batch(7, count), strict=True)]


def with_items(validation: Callable[[], Any] | None) -> ModelFile:
    return replace(model(), validation=validation)


def every(updates: int | None) -> Namespace:
    """Options of 5 updates with an evaluation every ``updates``."""
    return Namespace(eval_every=updates, steps=5, micro_batch_size=B, seed=0)


def held_out(count: int, copy: int = 0, copies: int = 1, updates: int | None = 2) -> Validation:
    place = Place(copy, 1, copies, "pipeline")
    return Validation(with_items(lambda: items(count)), every(updates), alone_job(evaluated=N), place)


@pytest.mark.parametrize("count", [1, B, B * N, 5 * B * N + 3])
def test_the_loss_is_the_mean_over_all_items(alone: World, one_worker: Path, count: int) -> None:
    """Against the modules, one item after another."""
    pipe = pipeline(one_worker)
    mean = held_out(count).loss(pipe)
    stages = [pipe.stages[stage].eval() for stage in (0, 1)]
    expected = [loss(stages[1](stages[0](x[None])), y[None]).item() for x, y in items(count)]
    assert mean == pytest.approx(sum(expected) / count, rel=1e-12)
    pipe.close()


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_every_item_goes_to_one_copy_whole_rounds_before_what_is_left(copies: int) -> None:
    count, seen = 2 * B * N * 3 + 2, []
    for copy in range(copies):
        for batch in held_out(count, copy, copies)._batches():
            loaded = [batch(micro) for micro in range(N)] if callable(batch) else [batch]
            assert [len(x) for x, _, _ in loaded] == [B] * N or not callable(batch)
            seen += [x for inputs, _, _ in loaded for x in inputs]
    assert len(seen) == count
    assert {*map(tuple, map(torch.Tensor.tolist, seen))} == {tuple(x.tolist()) for x, _ in items(count)}


def test_a_rank_loads_of_a_whole_round_what_it_is_asked_for() -> None:
    loaded: list[int] = []

    class Items:
        def __len__(self) -> int:
            return B * N

        def __getitem__(self, item: int) -> Any:
            loaded.append(item)
            return torch.ones(WIDTH), torch.zeros(WIDTH), {"scale": torch.ones(1)}

    files = with_items(Items)
    of_round = Validation(files, every(1), alone_job(evaluated=N), Place(0, 1, 1, "pipeline"))
    (load,) = of_round._batches()
    inputs, _, keywords = load(1)
    assert loaded == [B, B + 1]
    assert keywords["scale"].shape == (B, 1)
    (again,) = of_round._batches()
    assert torch.equal(again(1)[0], inputs), "what an item draws at random is the same every time"


def test_it_is_time_every_so_many_updates_and_after_the_last() -> None:
    assert [update for update in range(1, 6) if held_out(3).is_due(update)] == [2, 4, 5]
    assert not any(held_out(3, updates=None).is_due(update) for update in range(1, 6))


@pytest.mark.parametrize(
    ("validation", "words"),
    [
        (None, r"--eval-every: model\.py has no function validation\(\) -> torch"),
        (lambda: iter(items(2)), r"validation\(\) must return a map-style dataset"),
        (list, r"validation\(\) must return a map-style dataset, .*, with an item"),
    ],
)
def test_what_is_missing_is_said_before_training(validation: Any, words: str) -> None:
    with pytest.raises(Misuse, match=words):
        Validation(with_items(validation), every(1), alone_job(), Place(0, 1, 1, "pipeline"))


def test_an_item_that_fails_is_the_model_files(alone: World, one_worker: Path) -> None:
    class Broken(list[Any]):
        def __getitem__(self, item: Any) -> Any:
            raise KeyError(item)

    pipe = pipeline(one_worker)
    broken = Validation(
        with_items(lambda: Broken(items(9))), every(1), alone_job(evaluated=N), Place(0, 1, 1, "pipeline")
    )
    with pytest.raises(ModelError, match=r"item 0 of validation\(\): .*KeyError: 0"):
        broken.loss(pipe)
    pipe.close()
