"""`Pipeline` on one rank, with stages whose forwards write parameters: only a step of training leaves a trace."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chimera_ir
from chimera_runtime import Pipeline
from chimera_runtime.blame import ModelError
from chimera_runtime.errors import BadModel
from chimera_runtime.ranks.world import World
from tests.unit.runtime.models import loss
from tests.unit.runtime.one_rank import STAGES, WIDTH, N, batch, example, micro_batches, step


class Follower(nn.Module):
    """A linear layer, and a parameter that follows its weight in every forward, in one of several ways."""

    def __init__(self, follow: Callable[["Follower"], None], is_trained: bool, is_saved: bool = False) -> None:
        super().__init__()
        self.linear, self.follow, self.is_saved = nn.Linear(WIDTH, WIDTH), follow, is_saved
        self.slow = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=is_trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.follow(self)
        return torch.tanh(self.linear(x) + x @ (self.slow if self.is_saved else self.slow.detach().clone()))

    @property
    def next(self) -> torch.Tensor:
        return (self.slow + self.linear.weight).detach() / 2


@torch.no_grad()
def in_place(layer: Follower) -> None:
    layer.slow.copy_(layer.next)


@torch.no_grad()
def a_row(layer: Follower) -> None:
    layer.slow[1] += layer.next[1]


def through_data(layer: Follower) -> None:
    layer.slow.data.mul_(0.5).add_(layer.linear.weight.data, alpha=0.5)


def with_new_memory(layer: Follower) -> None:
    layer.slow.data = layer.next


def with_the_memory_of_another(layer: Follower) -> None:
    layer.slow.data = layer.linear.weight.data


@torch.no_grad()
def with_a_new_storage(layer: Follower) -> None:
    layer.slow.set_(layer.next)  # type: ignore[call-overload]


FOLLOWING = (in_place, a_row, through_data, with_new_memory, with_the_memory_of_another, with_a_new_storage)


class Codebook(nn.Module):
    """Entries that follow the inputs that are nearest to them, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.codes = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(4, WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                for entry in nearest.unique():
                    self.codes[entry] = (self.codes[entry] + x[nearest == entry].mean(0)) / 2
        return torch.tanh(self.linear(x + (self.codes[nearest] - x).detach()))


class Scaled(nn.Module):
    """Scale and shift come from the first micro-batch, and are trained from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_set = nn.Linear(WIDTH, WIDTH), False
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if not self.is_set:
            self.is_set = True
            with torch.no_grad():
                self.shift.sub_(x.mean(0))
                self.scale.div_(x.std(0) + 1e-6)
        return torch.tanh((x + self.shift) * self.scale)


class Momentum(nn.Module):
    """A frozen layer that follows the other: the module around both writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for fast, slow in zip(self.fast.parameters(), self.slow.parameters(), strict=True):
            slow.data = 0.9 * slow.data + 0.1 * fast.data
        return torch.tanh(self.fast(x) + self.slow(x))


MODULES: dict[str, Callable[[], nn.Module]] = {
    **{f"{follow.__name__}, {t}": partial(Follower, follow, t) for follow in FOLLOWING for t in (False, True)},
    **{kind.__name__: kind for kind in (Codebook, Scaled, Momentum)},
}


def builder(make: Callable[[], nn.Module]) -> Callable[[int, int], nn.Module]:
    def build_stage(stage: int, _stages: int) -> nn.Module:
        torch.manual_seed(stage)
        return make().double()

    return build_stage


@pytest.fixture
def make(opened: Callable[..., Any], interleaved: Path) -> Callable[..., Pipeline]:
    return lambda module, **options: opened(Pipeline, interleaved, builder(module), loss, example(), **options)


def values(modules: dict[int, nn.Module]) -> dict[str, torch.Tensor]:
    return {f"{s}.{name}": p.detach().clone() for s, module in modules.items() for name, p in module.named_parameters()}


def equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(value, others[name]) for name, value in some.items())


@pytest.mark.full
@pytest.mark.parametrize("name", MODULES)
def test_only_a_step_leaves_what_its_forwards_write(make: Callable[..., Pipeline], name: str) -> None:
    """Loss, gradients and parameters after the first update are those of one process."""
    module = MODULES[name]
    pipeline, twins = make(module, varying=True), {s: builder(module)(s, STAGES) for s in range(STAGES)}
    places = [p.data_ptr() for p in pipeline.parameters()]
    (x, y), fresh = batch(1), values(twins)
    assert equal(values(pipeline.stages), fresh), "the start"
    pipeline.evaluate([(x, y)])
    [*pipeline.predict([(x, None)])]
    assert equal(values(pipeline.stages), fresh), "forwards alone"
    assert [p.data_ptr() for p in pipeline.parameters()] == places
    # A step, beside one process.
    outcome, expected = step(pipeline, (x, y)), 0.0
    for of_x, of_y in micro_batches(x, y):
        value = loss(twins[1](twins[0](of_x)), of_y) / N
        value.backward()
        expected += value.item()
    assert outcome.loss == pytest.approx(expected, rel=1e-12)
    for stage, twin in twins.items():
        for mine, theirs in zip(pipeline.stages[stage].parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    assert not equal(values(pipeline.stages), fresh), "or nothing is written"
    written = values(pipeline.stages)
    pipeline.evaluate([(x, y)])
    assert equal(values(pipeline.stages), written)


def test_new_shapes_and_remarks(make: Callable[..., Pipeline], interleaved: Path) -> None:
    """A forward that shows new shapes leaves no writes either; the remark at start names what is written."""
    x, y = (t.unsqueeze(1).expand(-1, 4, -1).contiguous() for t in batch(0))
    build = builder(partial(Follower, in_place, False))
    with Pipeline(interleaved, build, loss, micro_batches(x, y)[0], varying=True) as pipeline:
        before = values(pipeline.stages)
        pipeline.evaluate([(x[:, :3], y[:, :3])])
        assert equal(values(pipeline.stages), before)
        first, second = pipeline.remarks
    assert first.startswith("the forward of stage 0 writes its parameter slow, in the order in which the schedule runs")
    assert second.startswith("the forward of stage 1 writes its parameter slow")
    assert make(partial(nn.Linear, WIDTH, WIDTH)).remarks == ()


def test_a_write_that_begins_in_an_evaluation_is_an_error(make: Callable[..., Pipeline]) -> None:
    def in_evaluation(layer: Follower) -> None:
        if not layer.training:
            in_place(layer)

    with pytest.raises(BadModel, match=r"the forward of stage 0 has written the parameter slow, .* its value .* lost"):
        make(partial(Follower, in_evaluation, False)).evaluate([batch(1)])


def test_a_backward_that_needs_what_a_later_forward_writes_says_so(alone: World, tmp_path: Path) -> None:
    """All forwards come first."""
    chimera_ir.compile("gpipe", D=1, N=N).write(tmp_path / "out")
    with (
        pytest.raises(ModelError, match="the backward of stage 0") as error,
        Pipeline(
            tmp_path / "out",
            builder(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Follower(in_place, True, True))),
            loss,
            example(),
        ) as pipeline,
    ):
        pipeline.step(batch(0))
    assert "let the forward compute with a copy" in "".join(error.value.__notes__)
