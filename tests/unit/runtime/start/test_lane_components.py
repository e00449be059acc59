"""The lane that a rank makes of its facts: stages, links with their slots, loading, and the turns of a stream."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from chimera_runtime.lane import Lane
from chimera_runtime.lane.stream_lane import StreamLane
from chimera_runtime.program.rank_facts import Turns
from chimera_runtime.ranks.messages import tag_of
from chimera_runtime.ranks.world import World
from chimera_runtime.start import assemble
from chimera_runtime.start.assemble import components_of, lane_of, run_stream
from tests.unit.runtime.models import facts, item, setting
from tests.unit.runtime.thread_ranks import alone_job, worlds


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
        assert assemble.loss_share(world.job, world.place.copies, made.probed) == pytest.approx(1 / (3 * 2 * 4))


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
        assert roomy[0].data_ptr() == stages[1].inputs[1][0].data_ptr()
        assert len(roomy[0]) == len(stages[1].inputs[1][0]) // 2
        assert gradients is stages[1].gradients[0]
        assert [(verb, tag) for verb, _, tag in peer.posted] == [
            ("recv", tag_of(4, 0, "y", 3)),
            ("recv", tag_of((5, 6), 2, "dx", 3)),
            ("send", tag_of(4, 1, "y", 3)),
            ("send", tag_of(5, 1, "dx", 3)),
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
