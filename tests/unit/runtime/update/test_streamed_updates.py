"""A stream in a loop of one's own, on one rank that holds both stages: against plain autograd on stored versions."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chimera_ir
from chimera_runtime import Misuse, Pipeline, StageStep
from chimera_runtime.blame import ModelError
from chimera_runtime.ranks.world import World
from chimera_runtime.update.stage_optimizer import Named

B, N, WIDTH, STAGES, UPDATES = 2, 2, 3, 2, 7

SCHEME = """
scheme both
workers 1
update every 2
pipe down {
  stages s in 0..2 on 0
  micros m in 0..
  reads version max(0, m/2 - 1)
  F(m, s) @ 4*m + s
  B(m, s) @ 4*m + 7 - s
}
"""
"""A micro-batch has its backwards after the forwards of the next; every version is read one update late."""

LAG = 1


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    (folder / "both.chim").write_text(SCHEME)
    chimera_ir.compile(folder / "both.chim").write(folder / "out")
    return folder / "out"


def layer(stage: int, _stages: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    if stage == 0:
        module[0].bias.requires_grad_(False)
    return module


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, B * N, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, y


def adam(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=0.1)


@pytest.fixture
def make(alone: World, compiled: Path) -> Iterator[Callable[..., Pipeline]]:
    """Makes pipelines over the only rank."""
    made: list[Pipeline] = []

    def pipeline(build: Callable[[int, int], nn.Module] = layer, **options: Any) -> Pipeline:
        x, y = batch(0)
        made.append(Pipeline(compiled, build, loss, (x[:B], y[:B]), **{"optimizer": adam} | options))
        return made[-1]

    yield pipeline
    for one in made:
        one.close()


class ByHand:
    """The whole model in one process: an update's micro-batches on the version that a run makes of them."""

    def __init__(self, start: Pipeline) -> None:
        self.modules = [layer(stage, STAGES) for stage in range(STAGES)]
        for module, theirs in zip(self.modules, start.stages.values(), strict=True):
            module.load_state_dict(theirs.state_dict())
        self.optimizers = [
            adam([(name, p) for name, p in module.named_parameters() if p.requires_grad]) for module in self.modules
        ]
        self.begin()

    def begin(self) -> None:
        """A run begins: its versions are counted from the weights that there are."""
        self.versions = [self.weights()]

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for module in self.modules for p in module.parameters()]

    def _show(self, version: list[torch.Tensor]) -> None:
        parameters = [p for module in self.modules for p in module.parameters()]
        for parameter, tensor in zip(parameters, version, strict=True):
            parameter.data = tensor.clone()

    def update(self, pair: tuple[torch.Tensor, torch.Tensor]) -> float:
        """The loss of an update, which is made."""
        self._show(self.versions[max(0, len(self.versions) - 2)])
        value = loss(nn.Sequential(*self.modules)(pair[0]), pair[1])
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        value.backward()
        self._show(self.versions[-1])
        for optimizer in self.optimizers:
            optimizer.step()
        self.versions.append(self.weights())
        return value.item()


def assert_same(pipeline: Pipeline, hand: ByHand) -> None:
    mine = [p.detach() for p in pipeline.parameters()]
    for tensor, expected in zip(mine, hand.versions[-1], strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-13)


# What is computed.


@pytest.mark.parametrize("drains", [(), (0,), (3,), (2, 3, 5)])
def test_a_drained_stream_begins_anew_on_the_newest_weights(make: Callable[..., Pipeline], drains: Any) -> None:
    pipeline = make()
    hand, told, expected = ByHand(pipeline), [], []
    for number in range(UPDATES):
        outcome = pipeline.step(batch(number))
        told += [] if outcome is None else [outcome]
        expected.append(hand.update(batch(number)))
        if number in drains:
            told += pipeline.drain()
            assert_same(pipeline, hand)
            hand.begin()
    told += pipeline.drain()
    assert_same(pipeline, hand)
    assert [outcome.update for outcome in told] == [*range(UPDATES)]
    assert [outcome.loss for outcome in told] == pytest.approx(expected, rel=1e-12)


def test_drains_matter(make: Callable[..., Pipeline]) -> None:
    """Otherwise the test above would not show that versions begin anew."""
    hands = [ByHand(make()) for _ in range(2)]
    hands[1].modules[0].load_state_dict(hands[0].modules[0].state_dict())
    losses = []
    for drained, hand in enumerate(hands):
        for number in range(5):
            last = hand.update(batch(number))
            if drained and number == 1:
                hand.begin()
        losses.append(last)
    assert losses[0] != pytest.approx(losses[1], rel=1e-6)


def test_a_step_returns_the_newest_update_that_is_complete(make: Callable[..., Pipeline]) -> None:
    pipeline = make()
    told = [pipeline.step(batch(number)) for number in range(5)]
    assert [outcome and outcome.update for outcome in told] == [None] * LAG + [0, 1, 2, 3]
    assert [outcome.update for outcome in pipeline.drain()] == [4]
    assert pipeline.drain() == []
    told = [pipeline.step(batch(number)) for number in range(3)]
    assert [outcome and outcome.update for outcome in told] == [None] * LAG + [5, 6], "it fills again"


def test_a_mini_batch_is_held_until_its_last_use(make: Callable[..., Pipeline]) -> None:
    pipeline = make()
    for number in range(5):
        pipeline.step(batch(number))
        assert len(pipeline._feed._pairs) <= LAG
    pipeline.drain()
    assert not pipeline._feed._pairs
    asked: list[tuple[int, int]] = []
    x, y = batch(0)
    for number in range(2):

        def pair(micro: int, number: int = number) -> Any:
            asked.append((number, micro))
            return x[micro * B : (micro + 1) * B], y[micro * B : (micro + 1) * B]

        pipeline.step(pair)
    pipeline.drain()
    assert sorted(set(asked)) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("written", [0, 1])
def test_a_mini_batch_that_the_loop_writes_while_it_is_under_way_is_missed(
    make: Callable[..., Pipeline], written: int, apart: bool
) -> None:
    pipeline = make()
    tensors = batch(0)
    if apart:
        pipeline.step(micro_batches=[*zip(*(tensor.split(B) for tensor in tensors), strict=True)])
    else:
        pipeline.step(tensors)
    tensors[written].copy_(batch(1)[written])
    with pytest.raises(Misuse, match="the mini-batch of update 0 was written after its step, and is still under way"):
        pipeline.step(batch(1))


def test_a_mini_batch_may_be_written_when_it_is_over(make: Callable[..., Pipeline]) -> None:
    pipeline = make()
    x, y = batch(0)
    pipeline.step((x, y))
    pipeline.drain()
    x.zero_()
    pipeline.step(batch(1))
    pipeline.drain()


def test_what_is_drawn_depends_on_the_update_and_not_on_drains(make: Callable[..., Pipeline]) -> None:
    """With a rate of 0 nothing else can change a loss."""

    def losses(drains: set[int]) -> list[float]:
        pipeline = make(
            lambda *_: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()).double(),
            optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.0),
        )
        told = []
        for number in range(5):
            told.append(pipeline.step(batch(0)))
            told += pipeline.drain() if number in drains else []
        return [outcome.loss for outcome in (*told, *pipeline.drain()) if outcome is not None]

    assert losses(set()) == losses({1, 2})
    assert len(set(losses(set()))) == 5


def test_a_context_ends_with_a_drain(alone: World, compiled: Path) -> None:
    x, y = batch(0)
    with Pipeline(compiled, layer, loss, (x[:B], y[:B]), optimizer=adam) as pipeline:
        hand = ByHand(pipeline)
        for number in range(3):
            pipeline.step(batch(number))
            hand.update(batch(number))
    assert_same(pipeline, hand)


def test_an_evaluation_drains_and_loses_no_outcome(make: Callable[..., Pipeline]) -> None:
    pipeline = make()
    hand = ByHand(pipeline)
    told = []
    for number in range(6):
        told.append(pipeline.step(batch(number)))
        hand.update(batch(number))
        if number == 2:
            x, y = batch(9)
            whole = nn.Sequential(*hand.modules)
            hand._show(hand.versions[-1])
            assert pipeline.evaluate([(x, y)]) == pytest.approx(loss(whole(x), y).item(), rel=1e-12)
            (outputs,) = pipeline.predict([(x, None)])
            torch.testing.assert_close(outputs, whole(x).detach(), rtol=1e-12, atol=1e-13)
            hand.begin()
    told += pipeline.drain()
    assert_same(pipeline, hand)
    assert sorted(outcome.update for outcome in told if outcome is not None) == [*range(6)]


# Hooks.


def test_hooks_see_each_step_of_each_stage_and_clip_and_schedule(make: Callable[..., Pipeline]) -> None:
    seen: list[tuple[str, int, int]] = []
    norms: list[float] = []

    def before(step: StageStep) -> None:
        seen.append(("before", step.stage, step.update))
        parameters = [parameter for _, parameter in step.named_parameters]
        nn.utils.clip_grad_norm_(parameters, 1e-3)
        norms.append(float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])))

    def after(step: StageStep) -> None:
        seen.append(("after", step.stage, step.update))
        schedulers[step.stage].step()

    pipeline = make(before_step=before, after_step=after)
    assert pipeline.optimizers.keys() == {0, 1}
    schedulers = {
        stage: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for stage, optimizer in pipeline.optimizers.items()
    }
    for number in range(3):
        pipeline.step(batch(number))
    pipeline.drain()
    pipeline.step(batch(3))
    pipeline.drain()
    for stage in range(STAGES):
        expected = [(when, stage, update) for update in range(4) for when in ("before", "after")]
        assert [line for line in seen if line[1] == stage] == expected
    assert max(norms) <= 1e-3 * (1 + 1e-6)
    assert [o.param_groups[0]["lr"] for o in pipeline.optimizers.values()] == [0.1 / 16] * 2


def test_gradients_may_be_summed_in_a_wider_dtype(alone: World, compiled: Path) -> None:
    seen: list[torch.dtype] = []

    def before(step: StageStep) -> None:
        for _, parameter in step.named_parameters:
            seen.append(parameter.main_grad.dtype)  # type: ignore[attr-defined]
            torch.testing.assert_close(parameter.main_grad.bfloat16(), parameter.grad)  # type: ignore[attr-defined]

    x, y = (t.bfloat16() for t in batch(0))
    options: dict[str, Any] = {"optimizer": adam, "before_step": before, "sum_dtype": torch.float32}
    pipeline = Pipeline(compiled, lambda *a: layer(*a).bfloat16(), loss, (x[:B], y[:B]), **options)
    for _ in range(3):
        pipeline.step((x, y))
    pipeline.drain()
    pipeline.close()
    assert seen == [torch.float32] * 9


# What is refused.


def test_a_stream_is_given_what_makes_its_optimizers(make: Callable[..., Pipeline]) -> None:
    with pytest.raises(Misuse, match=r"both\(\) has no flush, so each stage steps inside .*: give Pipeline optimizer="):
        make(optimizer=None)


@pytest.mark.parametrize("name", ["optimizer", "before_step", "after_step"])
def test_a_schedule_with_a_flush_is_not(alone: World, tmp_path: Path, name: str) -> None:
    chimera_ir.compile("gpipe", D=1, N=2).write(tmp_path / "out")
    with pytest.raises(Misuse, match=r"has a flush, so nothing steps inside the schedule: leave out optimizer="):
        Pipeline(tmp_path / "out", layer, loss, batch(0), **{name: adam})  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[[Pipeline], object], str]] = {
    "norm": (lambda pipeline: pipeline.clip_grad_norm_(1.0), "no norm of all its gradients: .* in before_step"),
    "accumulate": (lambda pipeline: pipeline.step(batch(1), accumulate=True), "with more micro-batches to an update"),
    "scaler": (lambda pipeline: pipeline.step(batch(1), scaler=torch.amp.GradScaler("cpu")), "train in bfloat16"),
    "unscale": (
        lambda pipeline: pipeline.unscale_(torch.amp.GradScaler("cpu"), pipeline.optimizers[0]),
        "without a scaler: train in bfloat16",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_can_mean_nothing_says_what_to_do_and_training_goes_on(make: Callable[..., Pipeline], what: str) -> None:
    pipeline = make()
    hand = ByHand(pipeline)
    call, message = REFUSED[what]
    for number in range(3):
        pipeline.step(batch(number))
        hand.update(batch(number))
        with pytest.raises(Misuse, match=message):
            call(pipeline)
    pipeline.drain()
    assert_same(pipeline, hand)


def test_a_batch_of_the_wrong_size_is_refused_and_the_next_one_trains(make: Callable[..., Pipeline]) -> None:
    pipeline = make()
    hand = ByHand(pipeline)
    for number in range(3):
        x, y = batch(number)
        with pytest.raises(Misuse, match="dimension 0 of the input is 3, of shape"):
            pipeline.step((x[:3], y[:3]))
        pipeline.step((x, y))
        hand.update((x, y))
    pipeline.drain()
    assert_same(pipeline, hand)


def test_gradients_that_were_cleared_under_way_are_missed(make: Callable[..., Pipeline]) -> None:
    pipeline = make()
    pipeline.step(batch(0))
    for module in pipeline.stages.values():
        module.zero_grad()
    with pytest.raises(Misuse, match=r"stages\.[01]\.0\.(weight|bias) was taken away while .*: leave out zero_grad"):
        pipeline.step(batch(1))


def test_after_a_step_that_failed_there_is_no_further_one(make: Callable[..., Pipeline]) -> None:
    def fails(step: StageStep) -> None:
        if step.update == 1:
            raise ValueError("not today")

    pipeline = make(before_step=fails)
    for number in range(2):
        pipeline.step(batch(number))
    with pytest.raises(ModelError, match=r"before_step of stage [01]"):
        pipeline.step(batch(2))
    for call in (pipeline.drain, lambda: pipeline.step(batch(0))):
        with pytest.raises(Misuse, match="an update has failed on this pipeline: make a new one"):
            call()


# A stream whose two stages share a parameter, on one rank that holds both: against autograd on one parameter.


def test_what_stages_share_is_one_parameter_with_an_optimizer_and_hooks_of_its_own(
    alone: World, tmp_path: Path
) -> None:
    (tmp_path / "both.chim").write_text(SCHEME)
    chimera_ir.compile(tmp_path / "both.chim", options=chimera_ir.Options(tied=[[0, 1]])).write(tmp_path / "out")
    x, y = batch(0)
    tied = [[(0, "0.weight"), (1, "0.weight")]]
    steps: list[tuple[Any, int]] = []
    options: dict[str, Any] = {"optimizer": adam, "after_step": lambda step: steps.append((step.stage, step.update))}
    pipeline = Pipeline(tmp_path / "out", layer, loss, (x[:B], y[:B]), tied=tied, **options)
    assert [name for name, _ in pipeline.named_parameters()] == [
        *("stages.0.0.weight", "stages.0.0.bias", "stages.1.0.bias")
    ]
    assert pipeline.optimizers.keys() == {(0, 1), 1}
    modules = [layer(stage, STAGES) for stage in range(STAGES)]
    for module, theirs in zip(modules, pipeline.stages.values(), strict=True):
        module.load_state_dict(theirs.state_dict())
    modules[1][0].weight = modules[0][0].weight  # type: ignore[index, union-attr]
    parameters = [*nn.Sequential(*modules).parameters()]
    optimizer = adam([("", p) for p in parameters if p.requires_grad])
    versions = [[p.detach().clone() for p in parameters]]
    for drained in (False, True):
        for number in range(3):
            for parameter, tensor in zip(parameters, versions[max(0, len(versions) - 2)], strict=True):
                parameter.data = tensor.clone()
            optimizer.zero_grad()
            x, y = batch(number)
            loss(nn.Sequential(*modules)(x), y).backward()
            for parameter, tensor in zip(parameters, versions[-1], strict=True):
                parameter.data = tensor.clone()
            optimizer.step()
            versions.append([p.detach().clone() for p in parameters])
            pipeline.step((x, y))
        pipeline.drain()
        for mine, expected in zip(pipeline.parameters(), versions[-1], strict=True):
            torch.testing.assert_close(mine.detach(), expected, rtol=1e-12, atol=1e-13)
        versions = versions[-1:]
        assert drained == (len(steps) == 12)
    assert [update for stage, update in steps if stage == (0, 1)] == [*range(6)]
    pipeline.step(batch(0))
    pipeline.stages[1][0].weight.grad = None  # type: ignore[index, union-attr]
    with pytest.raises(Misuse, match=r"the gradient of stages\.0\.0\.weight was taken away"):
        pipeline.step(batch(1))
    pipeline.close()
