"""Several stages that feed no other: what their losses must be, and what each is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chimera_ir
from chimera_runtime import CountedLoss, ModelError, Pipeline
from chimera_runtime.errors import BadModel, Misuse
from tests.graphs import Edge, plan

WIDTH, SIZE, MICRO_BATCHES = 3, 2, 2
Opened = Callable[..., Any]


class Scale(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.scale * output - target).square().mean()


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output - target).square().sum(), output.numel()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several-losses")
    text = plan({"text": 2, "head": 1}, [Edge(0, 2)], MICRO_BATCHES, [[0, 0, 0]])
    (folder / "heads.sir").write_text(text)
    chimera_ir.compile(folder / "heads.sir").write(folder / "out")
    return folder / "out"


def build(stage: int, _stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Linear(WIDTH, WIDTH).double()


def data(count: int = SIZE) -> tuple[torch.Tensor, Any]:
    x, y, z = torch.randn(3, count, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, {"text": y, "head": z}


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"text": mean}, r"functions for text, and the stages of graph\(\) that feed no other are text, head:"),
        ({"text": mean, "head": mean, "x": mean}, "loss has functions for text, head, x, and"),
        (counted, "the loss of text returns a sum and a count, .* Let the loss of text be a CountedLoss"),
        ({"text": counted, "head": mean}, "the loss of text returns a sum and a count, and other stages"),
        ({"text": mean, "head": counted}, "the loss of head returns a sum and a count, and other stages"),
        ({"text": CountedLoss(total, len), "head": counted}, "the loss of head returns a sum and a count"),
        (
            {"text": Scale(), "head": mean},
            "the loss of text is a module with parameters or buffers: .*, head, may have",
        ),
        (Scale(), "the loss of text is a module with parameters or buffers"),
    ],
)
def test_losses_that_do_not_fit_are_refused(opened: Opened, directory: Path, loss: Any, words: str) -> None:
    with pytest.raises(Misuse, match=words):
        opened(Pipeline, directory, build, loss, data())


def test_a_dict_of_losses_where_one_stage_feeds_no_other_has_one(opened: Opened, one_worker: Path) -> None:
    with pytest.raises(Misuse, match=r"loss has functions for head, and the stages of .* that feed no other are 1"):
        opened(Pipeline, one_worker, build, {"head": mean}, data())


@pytest.mark.parametrize("is_dict", [True, False])
def test_each_stage_gets_its_target_and_the_loss_is_the_sum(opened: Opened, directory: Path, is_dict: bool) -> None:
    """The last stage's loss may have parameters, which are trained with it."""
    loss: Any = {"text": mean, "head": Scale()} if is_dict else mean
    pipe = opened(Pipeline, directory, build, loss, data())
    x, targets = data(SIZE * MICRO_BATCHES)
    outcome = pipe.step((x, targets))
    first, text, head = (build(stage, 3) for stage in range(3))
    losses = mean(text(first(x)), targets["text"]), mean(head(first(x)), targets["head"])
    sum(losses).backward()  # type: ignore[union-attr]
    assert outcome.loss == pytest.approx(sum(each.item() for each in losses))
    assert outcome.reports == {
        "loss of text": pytest.approx(losses[0].item()),
        "loss of head": pytest.approx(losses[1].item()),
    }
    for stage, alone in enumerate((first, text, head)):
        for here, there in zip(pipe.stages[stage].parameters(), alone.parameters(), strict=True):
            assert torch.allclose(here.grad, there.grad)
    assert ("loss.scale" in dict(pipe.named_parameters())) is is_dict


def test_a_target_that_is_no_dict_of_all_names_goes_whole_to_each(opened: Opened, directory: Path) -> None:
    x, targets = data(SIZE * MICRO_BATCHES)
    pipe = opened(Pipeline, directory, build, mean, (x[:SIZE], targets["text"][:SIZE]))
    outcome = pipe.step((x, targets["text"]))
    first, text, head = (build(stage, 3) for stage in range(3))
    losses = [mean(module(first(x)), targets["text"]).item() for module in (text, head)]
    assert outcome.loss == pytest.approx(sum(losses))


@pytest.mark.parametrize("count", [-3, float("nan"), float("inf")])
def test_a_count_that_is_none_stops_before_the_update(opened: Opened, directory: Path, count: float) -> None:
    wrong: list[float] = []
    loss = {"text": CountedLoss(total, lambda target: sum(wrong, len(target))), "head": mean}
    pipe = opened(Pipeline, directory, build, loss, data())
    wrong.append(count)
    with pytest.raises(BadModel, match=r"stage text\[1\]: the count of a target .* is negative or not finite"):
        pipe.step(data(SIZE * MICRO_BATCHES))
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_a_function_of_counts_that_fails_is_the_users_code(opened: Opened, directory: Path) -> None:
    def count(_target: torch.Tensor) -> int:
        if failing:
            raise ValueError("no such target")
        return SIZE

    failing: list[int] = []
    pipe = opened(Pipeline, directory, build, {"text": CountedLoss(total, count), "head": mean}, data())
    failing.append(1)
    with pytest.raises(ModelError, match="the count of a loss"):
        pipe.step(data(SIZE * MICRO_BATCHES))


def test_means_of_unequal_slices_are_refused(opened: Opened, tmp_path: Path) -> None:
    text = plan({"text": 2, "head": 1}, [Edge(0, 2)], MICRO_BATCHES, [[0, 0, 0]], lengths=(2, 1))
    (tmp_path / "heads.sir").write_text(text)
    chimera_ir.compile(tmp_path / "heads.sir").write(tmp_path / "out")
    x, y, z = torch.randn(3, SIZE, 3, WIDTH, dtype=torch.float64)
    loss = {"text": CountedLoss(total, torch.numel), "head": mean}
    with pytest.raises(Misuse, match="the loss of head returns a mean, and slices have unequal lengths"):
        opened(Pipeline, tmp_path / "out", build, loss, (x, {"text": y, "head": z}))
