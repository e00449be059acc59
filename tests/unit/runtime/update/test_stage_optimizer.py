"""The steps of a stage inside a schedule: an optimizer of its own, and what is called before and after."""

from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.blame import ModelError
from chimera_runtime.errors import FAILED, MISUSED, Misuse
from chimera_runtime.model.naming import parameters_by_name
from chimera_runtime.model.ties import Tie, by_group
from chimera_runtime.stage.weight_versions import masters
from chimera_runtime.update.stage_optimizer import Named, StageOptimizer, StageOptimizers, StageStep, StepHooks
from tests.unit.runtime.models import model


def module() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    made[0].bias.requires_grad_(False)
    return made


def newest(of: nn.Module) -> list[nn.Parameter]:
    return masters([p for p in of.parameters() if p.requires_grad])


def named(stage: int, of: nn.Module, parameters: list[nn.Parameter]) -> Named:
    names = [name for name, p in of.named_parameters() if p.requires_grad]
    return [(f"stages.{stage}.{name}", p) for name, p in zip(names, parameters, strict=True)]


def sgd(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.5)


def fails(_: object) -> Any:
    raise ValueError("no")


def stepping(make: Any, before: Any = None, after: Any = None, of: tuple[int, ...] = (0,)) -> StageOptimizer:
    """The optimizer of a stage, or of what stages share, with hooks."""
    stage = module()
    return StageOptimizer(of, stage, named(of[0], stage, newest(stage)), StepHooks(make, before, after))


def test_the_optimizer_is_made_of_the_newest_weights_by_the_names_of_the_stage() -> None:
    given: list[Named] = []
    stage = module()
    parameters = newest(stage)
    hooks = StepHooks(lambda named: (given.append(named), sgd(named))[1], None, None)
    stepped = StageOptimizer((3,), stage, named(3, stage, parameters), hooks)
    assert [name for name, _ in given[0]] == ["stages.3.0.weight", "stages.3.1.weight", "stages.3.1.bias"]
    assert [parameter for _, parameter in given[0]] == parameters
    assert isinstance(stepped.optimizer, torch.optim.SGD)


def test_hooks_see_every_step_with_its_update_and_what_they_change_counts() -> None:
    seen: list[tuple[str, int, int, float]] = []

    def before(step: StageStep) -> None:
        seen.append(("before", step.stage, step.update, step.named_parameters[-1][1].item()))
        nn.utils.clip_grad_norm_([parameter for _, parameter in step.named_parameters], 1.0)

    def after(step: StageStep) -> None:
        seen.append(("after", step.stage, step.update, step.named_parameters[-1][1].item()))
        step.optimizer.param_groups[0]["lr"] *= 2

    stage = module()
    parameters = newest(stage)
    bias = parameters[-1].item()
    stepped = StageOptimizer((1,), stage, named(1, stage, parameters), StepHooks(sgd, before, after))
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        parameters[-1].grad = torch.full((1,), 8.0)
        stepped.step()
    values = [bias, bias - 0.5, bias - 0.5, bias - 1.5]
    assert [line[:3] for line in seen] == [("before", 1, 0), ("after", 1, 0), ("before", 1, 1), ("after", 1, 1)]
    assert [value for *_, value in seen] == pytest.approx(values, abs=1e-5)


def test_a_hook_may_keep_what_it_gets() -> None:
    kept: list[Any] = []
    stepped = stepping(sgd, kept.append, kept.append)
    for _ in range(2):
        stepped.step()
    assert [step.update for step in kept] == [0, 0, 1, 1]


def test_a_stage_that_trains_nothing_has_no_optimizer_and_calls_no_hook() -> None:
    def never(_: Any) -> None:
        raise AssertionError

    stepped = StageOptimizer((0,), nn.Tanh(), [], StepHooks(never, never, never))
    stepped.step()
    assert stepped.optimizer is None


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(Misuse, match=r"optimizer returned a list, not a torch\.optim\.Optimizer"):
        stepping(lambda named: named)


@pytest.mark.parametrize(
    ("hooks", "of", "words", "status"),
    [
        ((fails,), (0,), r"optimizer\(named_parameters\)", MISUSED),
        ((sgd, fails), (0,), "before_step of stage 0", FAILED),
        ((sgd, None, fails), (0,), "after_step of stage 0", FAILED),
        ((sgd, fails), (0, 3), "before_step of the tie of stages 0 and 3", FAILED),
    ],
)
def test_an_error_of_the_callers_code_says_what_it_was_called_for(
    hooks: tuple[Any, ...], of: tuple[int, ...], words: str, status: int
) -> None:
    with pytest.raises(ModelError, match=words) as failed:
        stepping(*hooks, of=of).step()
    assert failed.value.status == status
    assert isinstance(failed.value.__cause__, ValueError)


def test_the_stages_of_a_rank_get_theirs_in_turn() -> None:
    built = {2: module(), 5: nn.Tanh(), 7: module()}
    optimizers = StageOptimizers(built, parameters_by_name(model(), built, ()), StepHooks(sgd, None, None))
    made = [optimizers(newest(stage)) for stage in built.values()]
    assert [stepped.stage for stepped in made] == [2, 5, 7]
    assert optimizers.optimizers == {2: made[0].optimizer, 7: made[2].optimizer}


def test_what_stages_share_is_stepped_once_under_the_name_of_its_first_end_on_every_rank() -> None:
    built = {2: module(), 3: module()}
    built[3][1].weight = built[2][1].weight  # type: ignore[index, union-attr]
    tie = Tie((0, 2, 3), (((0, "words"), (2, "1.weight"), (3, "1.weight")),))
    seen: list[object] = []
    hooks = StepHooks(sgd, lambda step: seen.append((step.stage, step.module)), None)
    optimizers = StageOptimizers(built, parameters_by_name(model(), built, [tie]), hooks, [tie])
    groups = by_group(built, [tie])
    made = [optimizers(masters([p for p in of_group if p.requires_grad])) for of_group in groups.values()]
    for stepped in made:
        stepped.step()
    assert seen == [((0, 2, 3), built[2]), (2, built[2]), (3, built[3])]
    assert [*optimizers.optimizers] == [(0, 2, 3), 2, 3]
    assert [name for stepped in made for name, _ in stepped.next_step.named_parameters] == [
        *("stages.0.words", "stages.2.0.weight", "stages.2.1.bias", "stages.3.0.weight", "stages.3.1.bias")
    ]
