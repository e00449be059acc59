"""The stages of a rank, made of its facts; what two ranks or two stages must not do."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from chimera_runtime.errors import Misuse
from chimera_runtime.lane import Lane
from chimera_runtime.lane.stream_lane import StreamLane
from chimera_runtime.program.rank_facts import Turns
from chimera_runtime.ranks.messages import tag_of
from chimera_runtime.ranks.world import World
from chimera_runtime.stage import saved_tensors
from chimera_runtime.stage.stage import Stage
from chimera_runtime.stage.weight_versions import Versions, Weights
from chimera_runtime.start import assemble
from chimera_runtime.start.assemble import components_of, lane_of, needed_inputs, run_stream
from tests.unit.runtime.models import Layer, facts, item, model, reference, setting
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


def test_slots_recomputation_and_numbers_are_those_of_the_facts(alone: World) -> None:
    with worlds(alone, alone_job(stages=3, micro_batches=5)) as (world,):
        known = facts(*range(3), inputs=(1, 2), gradients=(3,), recomputed=((0, 2), (4, 5)))
        stages, _ = assembled(world, known)
        assert [len(slot[0]) for slot in stages[1].inputs[0]] == [1, 2]
        assert [len(slot[0]) for slot in stages[1].gradients[0]] == [3]
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


# What a worker uses of a mini-batch: inputs at the first stage, targets at the last, keyword arguments on the way.


@pytest.mark.parametrize(
    ("of_job", "inputs", "targets", "looks", "expected"),
    [
        ({}, ((0, 2),), (), {}, {0: {0}, 1: {0}}),
        ({}, (), ((1, 2), (3, 4)), {}, {1: {1}, 3: {1}}),
        ({}, ((0, 2),), ((2, 4),), {}, {0: {0}, 1: {0}, 2: {1}, 3: {1}}),
        ({"parts": 2}, ((0, 1), (2, 3)), (), {}, {0: {0}, 2: {0}}),
        ({}, (), (), {}, {}),
        pytest.param({"period": 8}, ((0, 1), (5, 6)), (), {}, {0: {0}, 1: {0}}, id="any update of a longer period"),
        pytest.param(
            {"micro_batches": 2}, ((0, 1),), (), {"takes_keywords": True}, {0: {0, 2}, 1: {2}}, id="all keywords"
        ),
    ],
)
def test_what_is_loaded_is_counted_in_whole_micro_batches(
    of_job: Any, inputs: Any, targets: Any, looks: dict[str, bool], expected: dict[int, set[int]]
) -> None:
    of_worker = replace(facts(0), inputs=inputs, targets=targets)
    looks = {"takes_keywords": False} | looks
    assert needed_inputs(job(**{"micro_batches": 4} | of_job), of_worker, **looks) == expected


# The lane that a rank makes of its facts: stages, links with their slots, loading, and the turns of a stream.


class Peer:
    """Notes what is posted."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, Any, int]] = []

    def isend(self, tensors: Any, tag: int) -> None:
        self.posted.append(("send", tensors, tag))

    def irecv(self, buffers: Any, tag: int) -> None:
        self.posted.append(("recv", buffers, tag))


def test_a_micro_batch_counts_its_share_of_the_mean_over_all_copies(alone: World) -> None:
    with worlds(alone, alone_job(micro_batches=3, parts=2), copies=4) as (world, *_):
        made, _ = setting(world, options="--micro-batch-size 2")
        assert assemble.loss_share(made.probed, 3 * 2 * 4) == pytest.approx(1 / (3 * 2 * 4))


def test_a_lane_trains_with_the_data_of_its_micro_batches(alone: World) -> None:
    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world)
        stages = assemble.assemble(made, built, made.model.steps)
        lane = lane_of(made, components_of(made, stages))
        assert type(lane) is Lane
        assert lane.stage(1) is stages[1]
        rows = {tuple(item(i)[0].tolist()): item(i)[1].tolist() for i in range(24)}
        for micro in range(2):
            (x,), (target,) = lane.input(micro).tolist(), lane.target(micro).tolist()
            assert rows[tuple(x)] == target
        made.script.update(lane)
        assert stages[0].updates == 1


def test_a_rehearsal_loads_nothing(alone: World) -> None:
    with worlds(alone, alone_job()) as (world,):
        made, _ = setting(world, options="--rehearse F=1,B=2")
        lane = lane_of(made, components_of(made, {}))
        assert lane.input(0) is None
        assert lane.target((0, 1)) == (None, None)


def test_links_receive_into_the_slots_of_their_stage(alone: World) -> None:
    """Activations into its input slots, gradients into its gradient slots, each with the room that it has."""
    with worlds(alone, alone_job(stages=3)) as (world,):
        known = facts(
            *range(3), inputs=(1, 2), gradients=(2,), incoming=((0, 1, 7), (2, 1, 7)), outgoing=((1, 2, 7), (1, 0, 7))
        )
        made, built = setting(world, known)
        stages = assemble.assemble(made, built, made.model.steps)
        peer = Peer()
        with patch.object(World, "peer", lambda _world, _worker: peer):
            lane = lane_of(made, components_of(made, stages))
        lane.incoming(0, 1, worker=7).irecv(4, into=1)
        lane.incoming(2, 1, worker=7).irecv((5, 6), into=0)
        lane.outgoing(1, 2, worker=7).isend(4, ())
        lane.outgoing(1, 0, worker=7).isend(5, ())
        (_, roomy, _), (_, gradients, _), *_ = peer.posted
        assert roomy[0].data_ptr() == stages[1].inputs[0][1][0].data_ptr()
        assert len(roomy[0]) == len(stages[1].inputs[0][1][0]) // 2
        assert gradients is stages[1].gradients[0][0]
        assert [(verb, tag) for verb, _, tag in peer.posted] == [
            ("recv", tag_of(4, 0, 1, "y", 3)),
            ("recv", tag_of((5, 6), 2, 1, "dx", 3)),
            ("send", tag_of(4, 1, 2, "y", 3)),
            ("send", tag_of(5, 1, 0, "dx", 3)),
        ]


@pytest.fixture(name="known")
def _known() -> Any:
    return facts(0, 1, turns=Turns(-1, 2, 2, 1), initial=(-1, 0))


def test_a_stream_runs_every_turn_of_its_script_as_soon_as_it_can_end(alone: World, known: Any) -> None:
    with worlds(alone, alone_job(period=2, reads=(((0, 2),),) * 2)) as (world,):
        made, built = setting(world, known)
        stages = assemble.assemble(made, built, made.model.steps)
        lane = lane_of(made, components_of(made, stages))
        assert isinstance(lane, StreamLane)
        turns: list[tuple[int, int]] = []
        made.script.turn = lambda of, number: turns.append((of.run.updates, number))  # type: ignore[method-assign,attr-defined,assignment]
        run_stream(made, lane, 5)
        assert turns == [(1, -1), (3, 1), (5, 3), (5, 5)]
        lane.stage(0).stash(-1)
        stages[0].step()
        lane.stage(0).at(-2).forward(0, lane.input(0))
        assert torch.equal(stages[0].outputs(0)[0], torch.tanh(lane.input(0) @ built[0].weight.t()))
