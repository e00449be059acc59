"""A check finds what is wrong, and leaves no trace: what it shares with the training that follows is put back."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.check.check import WatchedOptimizer, check, kept
from chimera_runtime.errors import CheckFailed, Misuse
from chimera_runtime.lane import Lane
from chimera_runtime.model.model import ModelFile
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.weight_versions import Versions, masters
from chimera_runtime.start.assemble import RankContext
from tests.unit.runtime.models import Layer, facts, model, sequential, setting
from tests.unit.runtime.thread_ranks import alone_job, worlds


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def checked(made: RankContext, used: ModelFile, size: int, built: dict[int, nn.Module]) -> str | None:
    return check(made, used, size, built, lambda _group, parameters: used.steps(parameters))


def test_modules_are_put_back_with_their_buffers_gradients_and_memory() -> None:
    """Holds also after weights had versions: the parameters then show other memory."""
    module = Normed()
    before, places = state(module), [p.data_ptr() for p in module.parameters()]
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.grad = parameter.main_grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in parameters]
    with kept({3: module}) as restore:
        assert all(parameter.grad is None for parameter in parameters)
        stepped = masters(parameters)
        versions = Versions(parameters, stepped, torch.optim.SGD(stepped, lr=0.1))
        versions.stash(0)
        for parameter in parameters:
            parameter.grad = parameter.main_grad = torch.ones_like(parameter)
        versions.step()
        versions.select(1)
        module.norm.running_mean.add_(1)  # type: ignore[operator,union-attr]
        module.norm.num_batches_tracked.add_(1)  # type: ignore[operator,union-attr]
        assert any(not torch.equal(tensor, before[name]) for name, tensor in state(module).items())
        restore()
        assert all(torch.equal(tensor, before[name]) for name, tensor in state(module).items())
        assert all(parameter.grad is None for parameter in parameters)
    assert [p.data_ptr() for p in module.parameters()] == places
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is parameter.main_grad is gradient
        assert torch.equal(gradient, torch.ones_like(parameter))


# The loops against one process.


def test_a_script_that_trains_as_one_process_does_passes_and_leaves_its_modules_alone(alone: World) -> None:
    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world, options="--micro-batch-size 3 --seed 5")
        before = [state(module) for module in built.values()]
        verdict = checked(made, model(), 3, built)
    assert verdict is not None
    assert verdict.splitlines()[0] == "check: passed"
    assert "gradients of 3 updates: " in verdict
    for module, earlier in zip(built.values(), before, strict=True):
        assert all(torch.equal(tensor, earlier[name]) for name, tensor in module.state_dict().items())


def test_a_model_that_builds_its_stages_once_passes_and_is_left_as_it_was(alone: World) -> None:
    """Ranks and reference then train the same modules, one after the other."""
    once = [Layer(stage, 2) for stage in range(2)]
    used = model(lambda stage, _: once[stage])
    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world, of_model=used)
        before = [state(module) for module in built.values()]
        assert str(checked(made, used, 1, built)).startswith("check: passed")
    for module, earlier in zip(built.values(), before, strict=True):
        assert all(torch.equal(tensor, earlier[name]) for name, tensor in module.state_dict().items())


def forgetting(lane: Lane) -> None:
    """Leaves a micro-batch out."""
    first, last = lane.stage(0), lane.stage(1)
    first.forward(0, lane.input(0))
    last.forward(0, first.outputs(0), lane.target(0))
    last.backward(0)
    first.backward(0, last.input_gradients(0))
    first.step()
    last.step()


def mixing(lane: Lane) -> None:
    """Judges a micro-batch by the target of the other."""
    first, last = lane.stage(0), lane.stage(1)
    for micro in range(2):
        first.forward(micro, lane.input(micro))
        last.forward(micro, first.outputs(micro), lane.target(1 - micro))
        last.backward(micro)
        first.backward(micro, last.input_gradients(micro))
    first.step()
    last.step()


def resting(lane: Lane) -> None:
    """Steps one stage alone."""
    lane.stage(0).step()


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (forgetting, "stage 0: gradients of update 1 differ by "),
        (mixing, "stage 1: gradients of update 1 differ by "),
        (resting, "stage 1 on rank 0: the optimizer has made 0 steps in 3 updates"),
    ],
)
def test_a_script_that_does_something_else_fails_with_where(alone: World, update: object, words: str) -> None:
    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world, update=update)  # type: ignore[arg-type]
        with pytest.raises(CheckFailed, match="check: FAILED") as failed:
            checked(made, model(), 1, built)
    assert words in str(failed.value)


def test_recomputation_and_grouping_pass_too(alone: World) -> None:
    def grouped(lane: Lane) -> None:
        first, last = lane.stage(0), lane.stage(1)
        first.forward((0, 1), lane.input((0, 1)))
        last.forward((0, 1), first.outputs((0, 1)), lane.target((0, 1)))
        last.backward((0, 1))
        first.backward((0, 1), last.input_gradients((0, 1)))
        for stage in (first, last):
            stage.step()

    for update in (grouped, sequential):
        with worlds(alone, alone_job(recomputing=(0, 1), grouped=(0, 1))) as (world,):
            made, built = setting(world, facts(0, 1, recomputed=((0, 2),)), update=update)
            assert str(checked(made, model(), 1, built)).startswith("check: passed")


def test_the_gradients_of_every_step_are_kept_as_they_were() -> None:
    """Whatever the optimizer does to them."""

    class Clearing:
        def step(self) -> None:
            assert weight.grad is not None
            weight.grad.zero_()

    weight, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    watched = WatchedOptimizer([weight, unused], Clearing())
    for value in (2.0, 3.0):
        weight.grad = torch.tensor([value])
        watched.step()
    assert [[None if g is None else g.item() for g in step] for step in watched.gradients] == [[2, None], [3, None]]


# The state with which ranks and one process begin.


@pytest.mark.parametrize("change", ["weight", "table"])
def test_modules_that_are_not_as_they_were_made_fail_by_name(alone: World, change: str) -> None:
    """As after a start that leaves in them what its forwards have written."""

    class Tabled(Layer):
        def __init__(self, stage: int, stages: int) -> None:
            super().__init__(stage, stages)
            self.register_buffer("table", torch.ones(2, dtype=torch.float64))
            self.table: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.table[0]

    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world, of_model=model(Tabled))
        getattr(built[1], change).data.mul_(1.5)
        with pytest.raises(CheckFailed, match=rf"stage 1 begins with other values of {change} than modules that are"):
            checked(made, model(Tabled), 1, built)


def test_memory_that_parameters_and_buffers_of_a_stage_share_is_shared_in_one_process(alone: World) -> None:
    class Sharing(nn.Module):
        def __init__(self, stage: int, _stages: int) -> None:
            super().__init__()
            self.first, self.second = Layer(0, 2), Layer(0, 2)
            self.second.weight.data = self.first.weight.data
            self.register_buffer("view", self.first.weight.data[: 1 + (stage == 0)])
            self.view: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)) @ self.view.t()

    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world, of_model=model(Sharing))
        assert str(checked(made, model(Sharing), 1, built)).startswith("check: passed")


class Reading(Layer):
    """A layer with a table, in one memory for all stages."""

    TABLE = torch.eye(2, dtype=torch.float64)

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        self.table = nn.Parameter(self.TABLE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.table)


def test_a_parameter_that_two_stages_have_in_one_memory_is_refused(alone: World) -> None:
    """It is two weights where the stages are on two ranks."""

    class Apart(Reading):
        TABLE = property(lambda _: torch.eye(2, dtype=torch.float64))  # type: ignore[assignment]

    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world, of_model=model(Apart))
        with pytest.raises(Misuse, match="share the parameter table, and nothing says so"):
            checked(replace(made, model=model(Reading)), model(Reading), 1, built)


def test_a_parameter_that_the_ranks_do_not_have_fails(alone: World) -> None:
    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world)
        with pytest.raises(CheckFailed, match="stage 1: table is on one side alone, or has another shape or dtype"):
            checked(made, model(lambda s, n: Reading(s, n) if s else Layer(s, n)), 1, built)


def test_what_a_check_has_made_is_freed_with_it(alone: World) -> None:
    """Without the collector of cycles: stages, with their optimizers and buffers, and the modules of one process."""
    made_objects: list[weakref.ref[Any]] = []

    def building(stage: int, stages: int) -> Layer:
        made_objects.append(weakref.ref(layer := Layer(stage, stages)))
        return layer

    def steps(_group: Any, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made_objects.append(weakref.ref(optimizer := used.steps(parameters)))
        return optimizer

    with worlds(alone, alone_job()) as (world,):
        used = model(building)
        made, built = setting(world, of_model=used)
        made_objects.clear()
        gc.collect()
        gc.disable()
        try:
            assert str(check(made, used, 1, built, steps)).startswith("check: passed")
            assert len(made_objects) == 4
            assert [reference() for reference in made_objects] == [None] * 4
        finally:
            gc.enable()
