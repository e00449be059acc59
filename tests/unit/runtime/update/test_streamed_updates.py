"""A stream in a loop of one's own, on one rank that holds both stages: against plain autograd on stored versions."""

from collections.abc import Callable, Iterable
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
from tests.unit.runtime import one_rank
from tests.unit.runtime.models import loss
from tests.unit.runtime.one_rank import STAGES, WIDTH, B, example, micro_batches
from tests.unit.runtime.test_pipeline import layer

N, UPDATES = 2, 7

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


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return one_rank.batch(seed, B * N)


def adam(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=0.1)


@pytest.fixture
def make(opened: Callable[..., Any], compiled: Path) -> Callable[..., Pipeline]:
    return lambda build=layer, **options: opened(
        Pipeline, compiled, build, loss, example(), **{"optimizer": adam} | options
    )


class ByHand:
    """The whole model in one process: an update's micro-batches on the version that a run makes of them."""

    def __init__(self, start: Pipeline, tied: bool = False) -> None:
        modules = [layer(stage, STAGES) for stage in range(STAGES)]
        for module, theirs in zip(modules, start.stages.values(), strict=True):
            module.load_state_dict(theirs.state_dict())
        if tied:
            modules[1][0].weight = modules[0][0].weight  # type: ignore[index, union-attr]
        self.module = nn.Sequential(*modules)
        self.parameters = [*self.module.parameters()]
        self.optimizer = adam([("", p) for p in self.parameters if p.requires_grad])
        self.begin()

    def begin(self) -> None:
        """A run begins: its versions are counted from the weights that there are."""
        self.versions = [self.weights()]

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.parameters]

    def show(self, version: list[torch.Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, version, strict=True):
            parameter.data = tensor.clone()

    def update(self, pair: tuple[torch.Tensor, torch.Tensor]) -> float:
        self.show(self.versions[max(0, len(self.versions) - 2)])
        value = loss(self.module(pair[0]), pair[1])
        self.optimizer.zero_grad()
        value.backward()
        self.show(self.versions[-1])
        self.optimizer.step()
        self.versions.append(self.weights())
        return value.item()


def trained(pipeline: Pipeline, hand: ByHand, numbers: Iterable[int]) -> list[Any]:
    """The outcomes of some updates, made by both."""
    outcomes = []
    for number in numbers:
        outcomes.append(pipeline.step(batch(number)))
        hand.update(batch(number))
    return outcomes


def assert_same(pipeline: Pipeline, hand: ByHand) -> None:
    mine = [p.detach() for p in pipeline.parameters()]
    torch.testing.assert_close(mine, hand.versions[-1], rtol=1e-12, atol=1e-13)


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
    hands[1].module.load_state_dict(hands[0].module.state_dict())
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
    pairs = micro_batches(*batch(0))
    for number in range(2):
        pipeline.step(lambda micro, number=number: asked.append((number, micro)) or pairs[micro])  # type: ignore[misc]
    pipeline.drain()
    assert sorted(set(asked)) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("written", [0, 1])
def test_a_mini_batch_that_the_loop_writes_while_it_is_under_way_is_missed(
    make: Callable[..., Pipeline], written: int, apart: bool
) -> None:
    """When it is over it may be written."""
    pipeline, tensors = make(), batch(0)
    given: dict[str, Any] = {"micro_batches": micro_batches(*tensors)} if apart else {"batch": tensors}
    for drains in (True, False):
        pipeline.step(**given)
        if drains:
            pipeline.drain()
        tensors[written].add_(1)
    with pytest.raises(Misuse, match="the mini-batch of update 1 was written after its step, and is still under way"):
        pipeline.step(batch(1))


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
    with Pipeline(compiled, layer, loss, example(), optimizer=adam) as pipeline:
        hand = ByHand(pipeline)
        trained(pipeline, hand, range(3))
    assert_same(pipeline, hand)


def test_an_evaluation_drains_and_loses_no_outcome(make: Callable[..., Pipeline]) -> None:
    pipeline = make()
    hand = ByHand(pipeline)
    told = trained(pipeline, hand, range(3))
    x, y = batch(9)
    hand.show(hand.versions[-1])
    assert pipeline.evaluate([(x, y)]) == pytest.approx(loss(hand.module(x), y).item(), rel=1e-12)
    (outputs,) = pipeline.predict([(x, None)])
    torch.testing.assert_close(outputs, hand.module(x).detach(), rtol=1e-12, atol=1e-13)
    hand.begin()
    told += [*trained(pipeline, hand, range(3, 6)), *pipeline.drain()]
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


def test_gradients_may_be_summed_in_a_wider_dtype(opened: Callable[..., Any], compiled: Path) -> None:
    seen: list[torch.dtype] = []

    def before(step: StageStep) -> None:
        for _, parameter in step.named_parameters:
            seen.append(parameter.main_grad.dtype)  # type: ignore[attr-defined]
            torch.testing.assert_close(parameter.main_grad.bfloat16(), parameter.grad)  # type: ignore[attr-defined]

    x, y = (t.bfloat16() for t in batch(0))
    options: dict[str, Any] = {"optimizer": adam, "before_step": before, "sum_dtype": torch.float32}
    pipeline = opened(Pipeline, compiled, lambda *a: layer(*a).bfloat16(), loss, (x[:B], y[:B]), **options)
    for _ in range(3):
        pipeline.step((x, y))
    pipeline.drain()
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
        trained(pipeline, hand, [number])
        with pytest.raises(Misuse, match=message):
            call(pipeline)
    pipeline.drain()
    assert_same(pipeline, hand)


def test_a_batch_of_the_wrong_size_is_refused_and_the_next_one_trains(make: Callable[..., Pipeline]) -> None:
    pipeline = make()
    hand = ByHand(pipeline)
    for number in range(3):
        with pytest.raises(Misuse, match="dimension 0 of the input is 3, of shape"):
            pipeline.step(tuple(t[:3] for t in batch(number)))
        trained(pipeline, hand, [number])
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
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "both.chim").write_text(SCHEME)
    chimera_ir.compile(tmp_path / "both.chim", options=chimera_ir.Options(tied=[[0, 1]])).write(tmp_path / "out")
    tied = [[(0, "0.weight"), (1, "0.weight")]]
    steps: list[tuple[Any, int]] = []
    options: dict[str, Any] = {"optimizer": adam, "after_step": lambda step: steps.append((step.stage, step.update))}
    pipeline = opened(Pipeline, tmp_path / "out", layer, loss, example(), tied=tied, **options)
    assert [name for name, _ in pipeline.named_parameters()] == [
        *("stages.0.0.weight", "stages.0.0.bias", "stages.1.0.bias")
    ]
    assert pipeline.optimizers.keys() == {(0, 1), 1}
    hand = ByHand(pipeline, tied=True)
    for drained in (False, True):
        trained(pipeline, hand, range(3))
        pipeline.drain()
        assert_same(pipeline, hand)
        hand.begin()
        assert drained == (len(steps) == 12)
    assert [update for stage, update in steps if stage == (0, 1)] == [*range(6)]
    pipeline.step(batch(0))
    pipeline.stages[1][0].weight.grad = None
    with pytest.raises(Misuse, match=r"the gradient of stages\.0\.0\.weight was taken away"):
        pipeline.step(batch(1))
