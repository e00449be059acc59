"""Loss and outputs between updates, on one rank that holds both stages: against the modules called one by one."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chimera_ir
from chimera_runtime import Misuse, Pipeline
from chimera_runtime.blame import ModelError
from chimera_runtime.ranks.world import World
from tests.unit.runtime.models import loss

B, N, WIDTH = 2, 2, 3


class Shifted(nn.Module):
    """Takes a keyword argument, and draws random numbers in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.dropout = nn.Dropout()

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        if torch.isnan(x).any():
            raise ValueError("not a number")
        return self.dropout(self.linear(x).tanh()) + shift


def batch(items: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x, y, shift = torch.randn(3, items, WIDTH, generator=generator, dtype=torch.float64)
    return x, y, {"shift": shift}


@pytest.fixture
def pipeline(alone: World, one_worker: Path) -> Iterator[Pipeline]:
    with Pipeline(one_worker, lambda *_: Shifted(), loss, batch(B)) as pipeline:
        yield pipeline


def by_hand(pipeline: Pipeline, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """The outputs of the modules, without dropout."""
    for module in pipeline.stages.values():
        x = module.linear(x).tanh() + shift
    return x.detach()


def test_keyword_arguments_go_along_in_a_prediction_as_in_a_step(pipeline: Pipeline) -> None:
    sizes = [7, 1, 4]
    batches = [batch(items, seed) for seed, items in enumerate(sizes)]
    predicted = list(pipeline.predict((x, None, keywords) for x, _, keywords in batches))
    assert [len(outputs) for outputs in predicted] == sizes
    for outputs, (x, _, keywords) in zip(predicted, batches, strict=True):
        torch.testing.assert_close(outputs, by_hand(pipeline, x, keywords["shift"]), rtol=1e-13, atol=1e-14)


def test_a_prediction_takes_the_batches_of_an_evaluation_and_looks_at_no_target(pipeline: Pipeline) -> None:
    x, y, keywords = batch(5)
    with_target, without = pipeline.predict([(x, y, keywords), (x, None, keywords)])
    assert torch.equal(with_target, without)
    expected = float(loss(by_hand(pipeline, x, keywords["shift"]), y))
    assert pipeline.evaluate([(x, y, keywords)]) == pytest.approx(expected, rel=1e-13)


def test_a_function_gives_the_keyword_arguments_of_each_micro_batch(pipeline: Pipeline) -> None:
    x, _, keywords = batch(B * N)
    parts = [(x[i : i + B], None, {"shift": keywords["shift"][i : i + B]}) for i in range(0, B * N, B)]
    (outputs,) = pipeline.predict([parts.__getitem__])
    torch.testing.assert_close(outputs, by_hand(pipeline, x, keywords["shift"]), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("last", [lambda x: x[:, 0, 0], lambda x: x.sum(1)])
def test_outputs_that_have_no_positions_cannot_be_predicted_in_slices(
    last: Callable[[torch.Tensor], torch.Tensor], alone: World, tmp_path: Path
) -> None:
    class Mapped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return last(super().forward(x))

    chimera_ir.compile("terapipe", D=1, N=N, k=2).write(tmp_path / "out")
    x = torch.randn(B, 4, WIDTH)
    error = pytest.raises(Misuse, match="something else than tensors with the positions of the slice in dimension 1")
    with Pipeline(tmp_path / "out", lambda *_: Mapped(WIDTH, WIDTH), lambda y, _: y.mean(), (x, x)) as pipeline, error:
        list(pipeline.predict([(x, None)]))


def test_generators_modes_and_gradients_are_as_before(pipeline: Pipeline) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    pipeline.evaluate([batch(5)])
    list(pipeline.predict([batch(5)]))
    assert torch.equal(torch.rand(3), expected)
    assert all(part.training for module in pipeline.stages.values() for part in module.modules())
    assert all(parameter.grad is None for parameter in pipeline.parameters())


def test_what_modules_hold_beside_their_weights_is_as_before(alone: World, one_worker: Path) -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH, dtype=torch.float64)
            self.register_buffer("seen", torch.zeros(()))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.seen += 1
            return super().forward(x) + self.calls + random.random()

    example, state = batch(B)[:2], random.getstate()
    with Pipeline(one_worker, lambda *_: Counting(), loss, example) as pipeline:
        for _ in range(2):
            pipeline.evaluate([batch(2 * B * N)[:2]])
            list(pipeline.predict([batch(B)[:2]]))
            assert [(module.calls, module.seen.item()) for module in pipeline.stages.values()] == [(0, 0)] * 2
            assert random.getstate() == state
        pipeline.step(batch(B * N)[:2])
        assert [(module.calls, module.seen.item()) for module in pipeline.stages.values()] == [(N, N)] * 2
        assert random.getstate() == state


def test_a_pipeline_made_without_a_mask_refuses_one_wherever_it_is_given(alone: World, one_worker: Path) -> None:
    """It would be trained and judged as if there were none; nothing has begun, so the pipeline goes on."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x: torch.Tensor, shift: torch.Tensor | float = 0.0) -> torch.Tensor:
            return self.linear(x).tanh() + shift

    items = [(x, y, {"shift": s["shift"]}) for x, y, s in [batch(1, seed) for seed in range(B * N)]]
    with Pipeline(one_worker, lambda *_: Masked(), loss, batch(B)[:2]) as pipeline:
        for call in (
            lambda: pipeline.step(batch(B * N)),
            lambda: pipeline.evaluate([batch(3)]),
            lambda: list(pipeline.predict([batch(3)])),
            lambda: next(iter(pipeline.loader(items))),
        ):
            with pytest.raises(Misuse, match="has the keyword argument shift and the example of the pipeline has none"):
                call()
        assert pipeline.step(batch(B * N)[:2]) is not None


def test_a_loss_that_waits_for_a_keyword_argument_is_refused(alone: World, one_worker: Path) -> None:
    with pytest.raises(Misuse, match=r"loss has a parameter shift, but keyword arguments are for stages"):
        Pipeline(one_worker, lambda *_: Shifted(), lambda output, target, shift=0: output.sum(), batch(B))


REFUSED: dict[str, tuple[Callable[[Pipeline], Any], str]] = {
    "no batch": (lambda pipeline: pipeline.evaluate([]), "there is nothing to evaluate: no batch was given"),
    "inputs alone": (
        lambda pipeline: list(pipeline.predict([batch(4)[0]])),
        r"a batch of an evaluation is a Tensor, not a pair \(input, target\); keyword arguments .* stand third",
    ),
    "no keywords": (
        lambda pipeline: list(pipeline.predict([(batch(4)[0], None)])),
        "a batch of an evaluation has no keyword argument shift, and the example of the pipeline has one",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_evaluated_says_what_it_lacks(pipeline: Pipeline, what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises(Misuse, match=message):
        call(pipeline)


def test_after_a_forward_that_failed_nothing_more_runs(pipeline: Pipeline) -> None:
    x, y, keywords = batch(4)
    with pytest.raises(ModelError, match="the forward of stage 0 in an evaluation"):
        pipeline.evaluate([(x / 0 * 0, y, keywords)])
    with pytest.raises(Misuse, match="make a new one, from the last checkpoint"):
        list(pipeline.predict([(x, y, keywords)]))


def test_outputs_that_cannot_be_put_together_are_refused(alone: World, one_worker: Path) -> None:
    class Mean(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"mean": super().forward(x).mean()}

    def build(stage: int, stages: int) -> nn.Module:
        return (Mean if stage == stages - 1 else nn.Linear)(WIDTH, WIDTH).double()

    x, y, _ = batch(4)
    with (
        Pipeline(one_worker, build, lambda output, y: (output["mean"] - y).mean(), (x[:B], y[:B])) as pipeline,
        pytest.raises(Misuse, match="something else than tensors with the items in dimension 0"),
    ):
        list(pipeline.predict([(x, y)]))
