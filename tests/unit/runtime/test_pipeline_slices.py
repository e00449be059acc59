"""`Pipeline` on one rank under a scheme with slices, in a loop of one's own: as plain autograd on whole sequences."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chimera_ir
from chimera_runtime import Misuse, Pipeline
from chimera_runtime.ranks.world import World
from tests.unit.runtime.carrying import WIDTH, Joining, Listing

B, N, K, LENGTH = 2, 2, 3, 6


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sliced") / "sliced.out"
    chimera_ir.compile("seq1f1b_interleaved", P=1, v=2, N=N, k=K).write(directory)
    return directory


def build(stage: int, _stages: int) -> nn.Module:
    return (Listing, Joining)[stage]().double()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def batch(items: int = B * N, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, items, length, WIDTH, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    return x, y


@pytest.fixture
def pipeline(alone: World, compiled: Path) -> Iterator[Pipeline]:
    with Pipeline(compiled, build, loss, batch(B), varying=True) as made:
        yield made


def whole(pipeline: Pipeline, x: torch.Tensor) -> torch.Tensor:
    for stage in pipeline.stages.values():
        x, _ = stage(x)
    return x


@pytest.mark.parametrize("form", ["one piece", "function", "pairs"])
@pytest.mark.parametrize("length", [LENGTH, 3])
def test_a_step_has_the_gradients_of_whole_sequences(pipeline: Pipeline, form: str, length: int) -> None:
    """Sequences may be shorter than in the example."""
    x, y = batch(length=length)
    pairs = [(x[m * B : (m + 1) * B], y[m * B : (m + 1) * B]) for m in range(N)]
    given: dict[str, Any] = {"micro_batches": pairs} if form == "pairs" else {}
    outcome = pipeline.step((x, y) if form == "one piece" else pairs.__getitem__ if not given else None, **given)
    assert outcome is not None
    mine = [p.grad.clone() for p in pipeline.parameters() if p.grad is not None]
    value = loss(whole(pipeline, x), y)
    theirs = torch.autograd.grad(value, list(pipeline.parameters()))
    assert outcome.loss == pytest.approx(value.item(), rel=1e-12)
    for gradient, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("items", [B * N, 3, 2 * B * N + 1])
def test_predictions_are_those_of_whole_sequences(pipeline: Pipeline, items: int) -> None:
    x, y = batch(items)
    (outputs,) = pipeline.predict([(x, None)])
    torch.testing.assert_close(outputs, whole(pipeline, x).detach())
    assert pipeline.evaluate([(x, y)]) == pytest.approx(loss(outputs, y).item(), rel=1e-12)


def test_a_sequence_that_slices_do_not_divide_is_refused_before_anything_runs(pipeline: Pipeline) -> None:
    with pytest.raises(Misuse, match="a batch: dimension 1 is 5, and slices of equal lengths need a multiple of"):
        pipeline.step(batch(length=5))
    pipeline.step(batch())
