"""`Pipeline` on one rank: a worker with all stages, in a loop of one's own, against plain autograd."""

import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.torch_version import TorchVersion

import chimera_ir
import chimera_runtime
from chimera_runtime import BadModel, CheckFailed, Misuse, Pipeline
from chimera_runtime.blame import ModelError
from chimera_runtime.pipeline import OLDEST_TORCH
from chimera_runtime.ranks.world import World
from tests.unit.runtime.models import loss
from tests.unit.runtime.one_rank import STAGES, WIDTH, B, N, batch, clear, example, micro_batches, step, whole

RATE = 0.1


def layer(stage: int, _stages: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    if stage == 0:
        module[0].bias.requires_grad_(False)
    return module


@pytest.fixture
def make(opened: Callable[..., Any], interleaved: Path) -> Callable[..., Pipeline]:
    def pipeline(
        build: Callable[[int, int], nn.Module] = layer,
        dtype: torch.dtype = torch.float64,
        of: Any = loss,
        keywords: tuple[Any, ...] = (),
        **options: Any,
    ) -> Pipeline:
        given = (*(t.to(dtype) for t in example()), *keywords)
        return opened(Pipeline, interleaved, build, of, given, **options)  # type: ignore[no-any-return]

    return pipeline


def by_hand(pipeline: Pipeline, x: torch.Tensor, y: torch.Tensor) -> tuple[float, list[torch.Tensor | None]]:
    """Loss and gradients of the same modules, run one after the other."""
    parameters = list(pipeline.parameters())
    trained = [p for p in parameters if p.requires_grad]
    value = loss(whole(pipeline)(x), y)
    gradients = dict(zip(trained, torch.autograd.grad(value, trained), strict=True))
    return value.item(), [gradients.get(p) for p in parameters]


def assert_gradients(pipeline: Pipeline, expected: list[torch.Tensor | None], scale: float = 1.0) -> None:
    for (name, parameter), gradient in zip(pipeline.named_parameters(), expected, strict=True):
        assert (parameter.grad is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient * scale, rtol=1e-12, atol=1e-14)


# Gradients and losses.


def test_a_step_leaves_the_gradients_of_the_mini_batch(make: Callable[..., Pipeline]) -> None:
    pipeline = make()
    value, gradients = by_hand(pipeline, *batch(1))
    assert step(pipeline, batch(1)).loss == pytest.approx(value, rel=1e-13)
    assert_gradients(pipeline, gradients)
    assert [name for name, _ in pipeline.named_parameters()][:2] == ["stages.0.0.weight", "stages.0.0.bias"]


def test_a_torch_below_the_range_of_the_project_is_refused(
    make: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = Path(chimera_ir.__file__).parent.parent.joinpath("pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={OLDEST_TORCH}"' in ranges
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1+cu130"))
    with pytest.raises(
        Misuse, match=re.escape("torch 2.9.1+cu130 is too old: chimera_runtime needs torch 2.10 or newer")
    ):
        make()


def test_a_pipeline_says_what_it_takes_and_which_copy_this_is(make: Callable[..., Pipeline]) -> None:
    pipeline = make()
    assert (pipeline.needs, pipeline.micro_batches, pipeline.copies, pipeline.copy) == ({*range(N)}, N, 1, 0)


def test_forms_of_a_mini_batch_give_bitwise_the_same(make: Callable[..., Pipeline]) -> None:
    x, y = batch(1)
    pairs = micro_batches(x, y)
    seen = []
    for arguments in ({"batch": (x, y)}, {"batch": pairs.__getitem__}, {"micro_batches": pairs}):
        pipeline = make()
        outcome = step(pipeline, **arguments)
        seen.append([outcome.loss, *(None if p.grad is None else p.grad.tolist() for p in pipeline.parameters())])
    assert seen[0] == seen[1] == seen[2]


def test_gradients_accumulate_as_those_of_one_larger_mini_batch(make: Callable[..., Pipeline]) -> None:
    pipeline = make()
    x, y = batch(1, 3 * B * N)
    _, gradients = by_hand(pipeline, x, y)
    for part in zip(x.split(B * N), y.split(B * N), strict=True):
        pipeline.step(part, accumulate=True)
    assert_gradients(pipeline, gradients)


@pytest.mark.parametrize("to_none", [True, False])
def test_training_is_that_of_one_process_with_clipping(make: Callable[..., Pipeline], to_none: bool) -> None:
    pipeline, twin = make(), make()
    optimizers = [torch.optim.Adam([p for p in of.parameters() if p.requires_grad], lr=RATE) for of in (pipeline, twin)]
    for number in range(4):
        pipeline.step(batch(number))
        norm = pipeline.clip_grad_norm_(0.05)
        loss(whole(twin)(batch(number)[0]), batch(number)[1]).backward()
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        assert float(norm) == pytest.approx(float(expected), rel=1e-13)
        assert norm > 0.05, "or nothing is clipped"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    for mine, theirs in zip(pipeline.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


def test_a_norm_that_is_no_number_raises_where_that_is_asked_for(make: Callable[..., Pipeline]) -> None:
    pipeline = make()
    x, y = batch(1)
    assert not pipeline.step((x, y * float("inf"))).loss < float("inf")
    with pytest.raises(RuntimeError, match=r"the norm of order 2 of the gradients is (inf|nan)"):
        pipeline.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_a_scaler_multiplies_the_loss_and_skips_a_step_with_infinite_gradients(make: Callable[..., Pipeline]) -> None:
    pipeline = make()
    optimizer = torch.optim.SGD([p for p in pipeline.parameters() if p.requires_grad], lr=RATE)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    value, gradients = by_hand(pipeline, *batch(1))
    assert pipeline.step(batch(1), scaler=scaler).loss == pytest.approx(value, rel=1e-13)
    assert_gradients(pipeline, gradients, 512.0)
    pipeline.unscale_(scaler, optimizer)
    assert_gradients(pipeline, gradients)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in pipeline.parameters()]
    pipeline.step((batch(2)[0], batch(2)[1] * float("inf")), scaler=scaler)
    pipeline.unscale_(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 256.0
    assert all(torch.equal(p, b) for p, b in zip(pipeline.parameters(), before, strict=True))


def test_gradients_of_bfloat16_are_summed_clipped_and_accumulated_in_float32(make: Callable[..., Pipeline]) -> None:
    def half(stage: int, stages: int) -> nn.Module:
        return layer(stage, stages).bfloat16()

    x, y = (t.bfloat16() for t in batch(1, 2 * B * N))
    pipeline = make(half, torch.bfloat16, sum_dtype=torch.float32)
    trained = [p for p in pipeline.parameters() if p.requires_grad]
    expected = [torch.zeros(p.shape) for p in trained]
    for of_x, of_y in micro_batches(x, y):
        made = torch.autograd.grad(loss(whole(pipeline)(of_x), of_y) / N, trained)
        for total, gradient in zip(expected, made, strict=True):
            total += gradient.float() / 2
    for part in zip(x.split(B * N), y.split(B * N), strict=True):
        pipeline.step(part, accumulate=True)
    norm = pipeline.clip_grad_norm_(1e-3)
    assert float(norm) == pytest.approx(float(nn.utils.get_total_norm(expected)), rel=1e-5)
    for parameter, total in zip(trained, expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.main_grad, total * 1e-3 / float(norm), rtol=1e-4, atol=1e-8)
        torch.testing.assert_close(parameter.grad.float(), parameter.main_grad, rtol=1e-2, atol=1e-8)
    with pytest.raises(Misuse, match="a GradScaler unscales grad, not main_grad"):
        pipeline.step((x[: B * N], y[: B * N]), scaler=torch.amp.GradScaler("cpu"), accumulate=True)


# What is left alone.


def dropping(*_: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()).double()


def test_random_numbers_of_the_process_are_as_before(make: Callable[..., Pipeline]) -> None:
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(3), random.random()
    torch.manual_seed(5)
    random.seed(5)
    make(dropping).step(batch(1))
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


def test_what_is_drawn_depends_on_seed_and_update_alone(make: Callable[..., Pipeline]) -> None:
    def losses(seed: int, noise: int) -> list[float]:
        torch.manual_seed(noise)
        pipeline, seen = make(dropping, seed=seed), []
        for number in range(2):
            seen.append(step(pipeline, batch(0)).loss)
            clear(pipeline)
            torch.rand(number + noise)
        return seen

    first = losses(1, noise=1)
    assert losses(1, noise=2) == first
    assert first[0] != first[1], "dropout differs from update to update"
    assert losses(2, noise=1) != first


def test_two_pipelines_do_not_know_of_each_other(make: Callable[..., Pipeline]) -> None:
    first, second = make(), make(seed=3)
    expected = [by_hand(of, *batch(1))[1] for of in (first, second)]
    first.step(batch(1))
    second.step(batch(1))
    for of, gradients in zip((first, second), expected, strict=True):
        assert_gradients(of, gradients)


# What is refused.


def test_a_gradient_that_was_not_cleared_is_refused_and_nothing_is_lost(make: Callable[..., Pipeline]) -> None:
    pipeline = make()
    _, gradients = by_hand(pipeline, *batch(1))
    pipeline.step(batch(1))
    with pytest.raises(Misuse, match=r"stages.0.0.weight still has the gradient .* optimizer.zero_grad\(\)"):
        pipeline.step(batch(2))
    assert_gradients(pipeline, gradients)


REFUSED: dict[str, tuple[Callable[[Pipeline], object], str]] = {
    "neither form of a batch": (lambda pipe: pipe.step(), "step takes either a batch or micro_batches"),
    "both forms": (lambda pipe: pipe.step((1, 2), micro_batches=[]), "step takes either a batch or micro_batches"),
    "a negative norm": (lambda pipe: pipe.clip_grad_norm_(-1.0), r"max_norm=-1\.0: a norm is 0 or more"),
    "a sampler that divides items among ranks": (
        lambda pipe: pipe.loader(
            [*zip(*batch(), strict=True)],
            sampler=torch.utils.data.DistributedSampler([1, 2], num_replicas=2, rank=0),  # type: ignore[arg-type]
        ),
        "and so does the loader: use shuffle=True",
    ),
    "closed": (lambda pipe: (pipe.close(), pipe.close(), pipe.step(batch())), "the pipeline is closed"),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_means_nothing_is_refused(make: Callable[..., Pipeline], call: str) -> None:
    pipeline = make()
    pipeline.step(batch())
    clear(pipeline)
    asked, message = REFUSED[call]
    with pytest.raises(Misuse, match=message):
        asked(pipeline)


def test_a_batch_of_the_wrong_size_is_refused_and_the_next_one_trains(make: Callable[..., Pipeline]) -> None:
    pipeline = make()
    x, y = batch(1)
    _, gradients = by_hand(pipeline, x, y)
    with pytest.raises(Misuse, match=r"dimension 0 of the input is 7, of shape"):
        pipeline.step((x[:7], y[:7]))
    pipeline.step((x, y))
    assert_gradients(pipeline, gradients)
    with pytest.raises(Misuse, match=r"dimension 0 of the input is 7, of shape"):
        pipeline.step((x[:7], y[:7]), accumulate=True)
    assert_gradients(pipeline, gradients)


def test_after_an_update_that_failed_there_is_no_further_one(make: Callable[..., Pipeline]) -> None:
    class Moody(nn.Linear):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if Moody.fails:
                raise ValueError("not today")
            return super().forward(x)

    pipeline = make(lambda *_: Moody(WIDTH, WIDTH).double())
    Moody.fails = True
    with pytest.raises(ModelError) as error:
        pipeline.step(batch(1))
    assert isinstance(error.value.__cause__, ValueError)
    with pytest.raises(Misuse, match="an update has failed on this pipeline: make a new one"):
        pipeline.step(batch(1))


def test_a_directory_without_a_program_is_refused(alone: World, tmp_path: Path) -> None:
    with pytest.raises(Misuse, match=r"is no output directory: `chimera compile SCHEME --out .*` writes one"):
        Pipeline(tmp_path, layer, loss, batch())


@pytest.mark.parametrize(
    ("build_stage", "message"),
    [
        ([nn.Identity], "build_stage is a list: for layers write Layers(layers()), the functions that make them"),
        (nn.Identity(), "build_stage is a Identity: give a function build_stage(stage, num_stages), or the Layers"),
        (None, "build_stage is None: give a function build_stage(stage, num_stages), or the Layers"),
    ],
)
def test_what_makes_no_stages_is_refused(interleaved: Path, build_stage: Any, message: str) -> None:
    with pytest.raises(Misuse, match=re.escape(message)):
        Pipeline(interleaved, build_stage, loss, batch())


def test_without_a_process_group_there_is_no_pipeline(interleaved: Path) -> None:
    assert not dist.is_initialized()
    with pytest.raises(Misuse, match=r"call torch.distributed.init_process_group\(\) before"):
        Pipeline(interleaved, layer, loss, batch())


@pytest.mark.parametrize(
    ("scheme", "items", "message"),
    [
        ("gpipe", 2, r"gpipe.* runs on 2 workers and there is 1 rank; start a multiple of 2"),
        ("chimera_halving", 3, "cuts every micro-batch into 2, and dimension 0 of the example is 3"),
    ],
)
def test_a_program_for_other_ranks_or_another_example_is_refused(
    alone: World, tmp_path: Path, scheme: str, items: int, message: str
) -> None:
    chimera_ir.compile(scheme, D=2, N=2).write(tmp_path / "out")
    with pytest.raises(Misuse, match=message):
        Pipeline(tmp_path / "out", layer, loss, batch(items=items))


def test_gloo_leaves_no_choice_of_communicators(make: Callable[..., Pipeline]) -> None:
    with pytest.raises(Misuse, match="communicators pair: gloo finds messages by their tags"):
        make(communicators="pair")
    make(communicators="directed").step(batch())


def test_the_package_names_what_it_offers() -> None:
    assert all(hasattr(chimera_runtime, name) for name in chimera_runtime.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Pipelines'"):
        _ = chimera_runtime.Pipelines  # type: ignore[attr-defined]


def test_an_evaluation_divides_sums_by_counts(make: Callable[..., Pipeline]) -> None:
    """Targets above 0 count; where there is none the result is not a number."""

    def summed(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counted = target > 0
        return ((output - target).square() * counted).sum(), counted.sum()

    x, y = batch(1)
    pipeline = make(of=summed)
    with torch.no_grad():
        total, count = summed(whole(pipeline)(x), y)
    assert pipeline.evaluate([(x, y)]) == pytest.approx(float(total / count), rel=1e-12)
    assert math.isnan(pipeline.evaluate([(x, -y.abs())]))


def test_a_scaler_that_is_off_leaves_gradients_as_they_are(make: Callable[..., Pipeline]) -> None:
    pipeline = make()
    scaler, optimizer = torch.amp.GradScaler("cpu", enabled=False), torch.optim.SGD(pipeline.parameters(), lr=RATE)
    pipeline.step(batch(), scaler=scaler)
    expected = [None if p.grad is None else p.grad.clone() for p in pipeline.parameters()]
    pipeline.unscale_(scaler, optimizer)
    for parameter, gradient in zip(pipeline.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)


# Checks.


class Counted(nn.Module):
    """A layer with dropout and batch statistics, which counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(self.norm(self.drop(self.linear(x)))) / self.calls**0.5


def counted(stage: int, _stages: int) -> nn.Module:
    torch.manual_seed(stage)
    return Counted().double()


def test_a_check_begins_with_the_state_of_the_modules_and_leaves_it(make: Callable[..., Pipeline]) -> None:
    """Gradients that accumulate, buffers, attributes and random numbers; a second check finds nothing of the first."""
    pipeline = make(counted, varying=True)
    pipeline.step(batch(1))
    with torch.no_grad():
        for parameter in pipeline.parameters():
            parameter.mul_(1.5)
    stages = pipeline.stages.values()
    state = [t.clone() for module in stages for t in module.state_dict().values()]
    gradients = [(p.grad, p.grad.clone()) for p in pipeline.parameters() if p.grad is not None]
    assert gradients
    for _ in range(2):
        torch.manual_seed(5)
        report = pipeline.check(batch(2))
        assert report.startswith("check: passed")
        assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(5)))
        assert all(map(torch.equal, state, (t for module in stages for t in module.state_dict().values())))
        assert [module.calls for module in stages] == [N, N]  # type: ignore[union-attr]
    after = [p.grad for p in pipeline.parameters() if p.grad is not None]
    assert all(now is grad and torch.equal(now, v) for now, (grad, v) in zip(after, gradients, strict=True))
    pipeline.step(batch(2), accumulate=True)


def scaled(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 1.5


def test_a_check_names_the_place_of_a_fault_and_the_pipeline_goes_on(make: Callable[..., Pipeline]) -> None:
    pipeline = make(lambda *_: nn.Linear(WIDTH, WIDTH).double())
    first, last = pipeline.stages.values()
    faults: dict[str, Callable[[], Any]] = {
        "what stage 0 hands on for micro-batch 0 of update 1, by ": lambda: first.register_forward_hook(scaled),
        "the loss, in update 1, as all that stages hand on agrees": lambda: last.register_forward_hook(scaled),
        "the gradient of weight of stage 1, among the gradients of update 1": lambda: last.weight.register_hook(  # type: ignore[union-attr]
            lambda gradient: 2 * gradient
        ),
    }
    for words, fault in faults.items():
        hook = fault()
        with pytest.raises(CheckFailed, match="stage 1: gradients of update 1 differ by ") as failed:
            pipeline.check(batch(1))
        assert f"the first tensor that differs: {words}" in str(failed.value)
        hook.remove()
    assert pipeline.check(micro_batches(*batch(1)).__getitem__).startswith("check: passed")
    pipeline.step(batch(1))


def test_a_check_says_which_weights_are_not_those_of_build_stage_before_the_first_step(
    make: Callable[..., Pipeline],
) -> None:
    pipeline = make(counted)
    with torch.no_grad():
        pipeline.stages[1].linear.weight.add_(1)  # type: ignore[union-attr,operator]
    *_, line = pipeline.check(batch(1)).splitlines()
    assert line.startswith("  stage 1 begins with other values of linear.weight than modules that are made anew")
    pipeline.step(batch(1))
    assert "stage 1 begins" not in pipeline.check(batch(1))


def test_a_check_that_cannot_be_made_is_refused_and_the_pipeline_goes_on(make: Callable[..., Pipeline]) -> None:
    made: list[int] = []

    def once(stage: int, stages: int) -> nn.Module:
        made.append(stage)
        if len(made) > STAGES:
            raise KeyError(stage)
        return layer(stage, stages)

    pipeline, (x, y) = make(once), batch(1)
    with pytest.raises(Misuse, match="check takes either a batch or micro_batches, as step does"):
        pipeline.check()
    with pytest.raises(Misuse, match="dimension 0 of the input is 7, of shape"):
        pipeline.check((x[:7], y[:7]))
    with pytest.raises(ModelError, match="making all stages in one process"):
        pipeline.check((x, y))
    pipeline.step((x, y))


# Stages that change what they are given in place: the user's tensors stay as they are, or an error says what to do.


@pytest.mark.parametrize("takers", [1, 2])
def test_a_keyword_argument_of_several_stages_is_not_changed_in_place(
    make: Callable[..., Pipeline], takers: int
) -> None:
    """Whether the other stage sees the change would depend on where it is. A stage's own argument is its own."""

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * scale.mul_(2)

    (x, y), scale = batch(), torch.ones(B * N, 1, dtype=torch.float64)
    pipeline = make(
        lambda stage, _: (Scaled if stage < takers else nn.Linear)(WIDTH, WIDTH).double(),
        keywords=({"scale": scale[:B].clone()},),
    )
    if takers == 1:
        pipeline.step((x, y, {"scale": scale}))
        return
    with pytest.raises(BadModel, match="stage 0 changes its keyword argument scale in place, and other stages"):
        pipeline.step((x, y, {"scale": scale}))


def test_an_input_that_the_first_stage_changes_in_place_is_as_before(make: Callable[..., Pipeline]) -> None:
    class Changing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(2))

    x, y = batch()
    pipeline = make(lambda stage, _: (nn.Linear if stage else Changing)(WIDTH, WIDTH).double())
    value, expected = by_hand(pipeline, x.clone(), y)
    assert step(pipeline, (x, y)).loss == pytest.approx(value)
    assert_gradients(pipeline, expected)
    assert torch.equal(x, batch()[0])
