"""A check finds what is wrong, and leaves no trace: what it shares with the training that follows is put back."""

import pytest
import torch
from torch import nn

from chimera_runtime.check.check import Snapshot, WatchedOptimizer, check, shared
from chimera_runtime.errors import CheckFailed
from chimera_runtime.lane import Lane
from chimera_runtime.model.model import ModelFile
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.weight_versions import Versions, masters
from chimera_runtime.start.rank_context import RankContext
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


def test_modules_that_are_made_anew_share_nothing() -> None:
    assert shared({0: Normed(), 1: Normed()}, {0: Normed(), 1: Normed()}) == []


@pytest.mark.parametrize("wrapped", [nn.Sequential, lambda module: nn.ModuleList(module.children())])
def test_modules_that_are_made_once_are_put_back_with_their_buffers(wrapped: type[nn.Module]) -> None:
    """Holds also after weights had versions: the parameters then show other memory."""
    module = Normed()
    before, places = state(module), [p.data_ptr() for p in module.parameters()]
    kept = [Snapshot(tensor) for tensor in shared({3: module}, {3: wrapped(module)})]
    parameters = list(module.parameters())
    stepped = masters(parameters)
    versions = Versions(parameters, stepped, torch.optim.SGD(stepped, lr=0.1))
    versions.stash(0)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    versions.step()
    versions.select(1)
    module.norm.running_mean.add_(1)  # type: ignore[operator,union-attr]
    module.norm.num_batches_tracked.add_(1)  # type: ignore[operator,union-attr]
    assert any(not torch.equal(tensor, before[name]) for name, tensor in state(module).items())
    for tensor in kept:
        tensor.restore()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(module).items())
    assert [p.data_ptr() for p in module.parameters()] == places
    assert all(p.grad is None for p in module.parameters())


def test_a_weight_in_the_same_memory_is_put_back() -> None:
    table = torch.ones(4)
    first, second = nn.ParameterList([nn.Parameter(table)]), nn.ParameterList([nn.Parameter(table)])
    (kept,) = [Snapshot(tensor) for tensor in shared({0: first}, {0: second})]
    with torch.no_grad():
        second[0].zero_()
    kept.restore()
    assert torch.equal(first[0], torch.ones(4))


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
