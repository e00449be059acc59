"""The stages of a rank, made of its facts; what two ranks or two stages must not do."""

from typing import Any

import pytest
import torch
from torch import nn

from chimera_runtime.errors import Misuse
from chimera_runtime.ranks.world import World
from chimera_runtime.stage import saved_tensors
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.stage_output import LossOutput, SendOutput
from chimera_runtime.stage.weight_versions import Versions, Weights
from chimera_runtime.start import assemble
from tests.unit.runtime.models import Layer, facts, model, reference, setting
from tests.unit.runtime.thread_ranks import alone_job, job, worlds


class Random(Layer):
    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        nn.init.normal_(self.weight)


def weights(module: nn.Module) -> list[Any]:
    return [p.tolist() for p in module.parameters()]


# Modules.


def test_a_rank_builds_the_stages_that_its_worker_holds(alone: World) -> None:
    both = job(workers=2, stages=4, placement=((0, 1, 1, 0), (1, 0, 0, 0)))
    with worlds(alone, both) as ranks:
        held = [sorted(assemble.modules(world, model(), 0)) for world in ranks]
    assert held == [[0, 1, 2, 3], [0, 1, 2]]


def test_initial_weights_depend_on_seed_and_stage_alone(alone: World) -> None:
    """Whoever builds them, after whatever was drawn; the reference builds the same."""
    with worlds(alone, alone_job()) as (world,):
        first = assemble.modules(world, model(Random), 0)
        torch.manual_seed(99)
        torch.rand(7)
        again = assemble.modules(world, model(Random), 0)
        other = assemble.modules(world, model(Random), 1)
    for stage in range(2):
        assert weights(first[stage]) == weights(again[stage]) == weights(reference(1, build=Random).build(stage))
        assert weights(first[stage]) != weights(other[stage])


# Stages.


def assembled(
    world: World, known: Any = None, of_model: Any = None, **options: Any
) -> tuple[dict[int, Stage], dict[int, nn.Module]]:
    made, built = setting(world, known, of_model)
    return assemble.assemble(made, built, made.model.steps, **options), built


def test_every_stage_but_the_last_hands_on(alone: World) -> None:
    with worlds(alone, alone_job(stages=3)) as (world,):
        stages, _ = assembled(world)
        assert [type(stages[s]._output) for s in range(3)] == [SendOutput, SendOutput, LossOutput]
        assert [stages[s]._input.before is None for s in range(3)] == [True, False, False]


def test_slots_recomputation_and_numbers_are_those_of_the_facts(alone: World) -> None:
    with worlds(alone, alone_job(stages=3, micro_batches=5)) as (world,):
        known = facts(*range(3), inputs=(1, 2), gradients=(3,), recomputed=((0, 2), (4, 5)))
        stages, _ = assembled(world, known)
        assert [len(slot[0]) for slot in stages[1].inputs] == [1, 2]
        assert [len(slot[0]) for slot in stages[1].gradients] == [3]
        assert [*stages[0].inputs] == [*stages[2].gradients] == []
        assert stages[1]._recomputed == {0, 1, 4}
        assert {(s._numbering.passes, s._numbering.cycle) for s in stages.values()} == {(5, 5)}
        assert {s.number for s in stages.values()} == {0, 1, 2}


def test_a_flush_needs_one_version_and_a_stream_has_several(alone: World) -> None:
    with worlds(alone, alone_job()) as (world,):
        assert {type(stage.weights) for stage in assembled(world)[0].values()} == {Weights}
    with worlds(alone, alone_job(period=2, reads=(((-1, 2),),) * 2)) as (world,):
        stages, built = assembled(world)
        assert {type(stage.weights) for stage in stages.values()} == {Versions}
        before = weights(built[0])
        stages[0].stash(0)
        for parameter in built[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        stages[0].step()
        assert weights(built[0]) == before, "version 0 is still the one that is shown"
        stages[0].at(1)
        assert weights(built[0]) != before


def test_frozen_parameters_are_neither_summed_nor_stepped(alone: World) -> None:
    class Frozen(Layer):
        def __init__(self, stage: int, stages: int) -> None:
            super().__init__(stage, stages)
            self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    given: list[int] = []

    def optimizer(parameters: list[nn.Parameter]) -> Any:
        given.append(len(parameters))
        return torch.optim.SGD(parameters, lr=0.1)

    with worlds(alone, alone_job()) as (world,):
        stages, _ = assembled(world, None, model(Frozen, optimizer=optimizer))
        assert given == [1, 1]
        assert [len(stage.gradient_sum._parameters) for stage in stages.values()] == [1, 1]


def test_a_parameter_of_two_stages_is_refused_with_its_name(alone: World) -> None:
    shared = nn.Parameter(torch.ones(1, 2, dtype=torch.float64))

    class Sharing(Layer):
        def __init__(self, stage: int, stages: int) -> None:
            super().__init__(stage, stages)
            self.tied = shared

    with (
        worlds(alone, alone_job()) as (world,),
        pytest.raises(Misuse, match="stages 0 and 1 share the parameter tied, and nothing says so: write `def tied"),
    ):
        assembled(world, None, model(Sharing))


def test_other_stages_are_made_of_the_same_parts(alone: World) -> None:
    class Other(Stage):
        pass

    with worlds(alone, alone_job()) as (world,):
        assert {type(stage) for stage in assembled(world, make_stage=Other)[0].values()} == {Other}


# Remarks.


def test_a_stage_that_runs_groups_one_by_one_is_remarked_upon(alone: World) -> None:
    """Where it runs forwards again; one that does not runs them one by one in any case."""

    class Dropping(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(super().forward(x), 0.5)

    said = "stage 0 draws random numbers: it runs one micro-batch at a time, also where it has several"
    for of_job, remarks in (
        (alone_job(grouped=(0,), recomputing=(0,)), [said]),
        (alone_job(grouped=(0,)), []),
        (alone_job(recomputing=(0,)), []),
    ):
        with worlds(alone, of_job) as (world,):
            made, _ = setting(world, of_model=model(Dropping))
            assert assemble.remarks(world.job, world.backend, world.device, made.probed) == remarks
    with worlds(alone, alone_job(grouped=(0, 1), recomputing=(0, 1))) as (world,):
        assert assemble.remarks(world.job, world.backend, world.device, setting(world)[0].probed) == []


def test_a_stage_of_which_nothing_can_move_is_remarked_upon(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 0 saves its input and its output; so does stage 1, whose loss saves a further tensor."""
    monkeypatch.setattr(saved_tensors, "SMALLEST", 1)
    with worlds(alone, alone_job(moving=(0, 1))) as (world,):
        (said,) = assemble.remarks(world.job, world.backend, world.device, setting(world)[0].probed)
    assert said.startswith("stage 0 saves no tensor of 1024 bytes or more that can move to the host, as weights")
