"""Stages whose compute is a sleep: messages and sums as large as the real ones, and nothing trained."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from chimera_runtime.program.numbering import Micros
from chimera_runtime.ranks.world import World
from chimera_runtime.stage.stage import Stage
from chimera_runtime.start import assemble
from chimera_runtime.start.assemble import components_of, lane_of
from chimera_runtime.tools.loop import saving
from chimera_runtime.tools.loop.saving import RehearsedStage, cost_weights, overshoot, rehearsed
from tests.unit.runtime.models import facts, sequential, setting
from tests.unit.runtime.thread_ranks import alone_job, groups, job, worlds


class Clock:
    """Stands in for the module `time`: a sleep lasts as long as it should, and ``late`` more; most also ``busy``."""

    def __init__(self, late: float = 0.0) -> None:
        self.now = 0.0
        self.late = late
        self.busy = 0.0
        self.sleeps: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds + self.late + self.busy * (len(self.sleeps) % 5 != 0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(saving, "time", made)
    return made


def stages(world: World, seconds: dict[str, float], parts: int = 1, **sliced: Any) -> dict[int, Stage]:
    made, built = setting(world)
    return assemble.assemble(
        made, built, made.model.steps, rehearsed(seconds, replace(world.job, parts=parts, **sliced))
    )


def test_passes_sleep_as_long_as_they_would_take_each_micro_batch(alone: World, clock: Clock) -> None:
    with worlds(alone, alone_job(stages=3)) as (world,):
        middle = stages(world, {"F": 0.25, "B": 0.5})[1]
        clock.sleeps.clear()
        middle.forward(0, None)
        middle.forward((1, 2), None)
        middle.backward((1, 2))
        middle.backward(0)
    assert clock.sleeps == [0.25] * 3 + [0.5] * 3


def test_a_micro_batch_sleeps_as_long_as_it_weighs_and_a_pair_as_the_mean(alone: World, clock: Clock) -> None:
    job = alone_job(stages=3, kinds=("F", "B", "pair"), weights=(1, 3, 2))
    with worlds(alone, job) as (world,):
        middle = stages(world, {"F": 0.25, "B": 0.5, "pair": 0.5})[1]
        clock.sleeps.clear()
        middle.forward((1, 2), None)
        middle.forward(3, None)
        middle.pair((4, None), middle, (2, ()))
    assert clock.sleeps == [0.75, 0.5, 0.25, 1.25]


def test_halves_of_a_backward_sleep_as_long_as_each_takes(alone: World, clock: Clock) -> None:
    with worlds(alone, alone_job(stages=3, kinds=("F", "I", "W"))) as (world,):
        middle = stages(world, {"F": 0.25, "I": 0.5, "W": 0.125})[1]
        clock.sleeps.clear()
        middle.forward((1, 2), None)
        middle.backward_input((1, 2))
        assert [tuple(t.shape) for t in middle.input_gradients((1, 2))] == [(2, 2)]
        middle.backward_weights(1)
        middle.backward_weights(2)
    assert clock.sleeps == [0.25] * 2 + [0.5] * 2 + [0.125] * 2


def test_a_pair_sleeps_as_long_as_it_takes_and_hands_on_both_ways(alone: World, clock: Clock) -> None:
    with worlds(alone, alone_job(stages=3, kinds=("F", "B", "pair"))) as (world,):
        middle = stages(world, {"F": 0.25, "B": 0.5, "pair": 0.625})[1]
        clock.sleeps.clear()
        middle.pair((1, None), middle, (0,))
        middle.pair(((2, 3), None), middle, ((4, 5),))
        assert [tuple(t.shape) for t in middle.outputs(1)] == [(1, 2)]
        assert [tuple(t.shape) for t in middle.input_gradients((4, 5))] == [(2, 2)]
    assert clock.sleeps == [0.625] * 3


def test_moves_run_one_after_the_other_beside_the_passes_and_a_wait_sleeps_for_the_rest(
    alone: World, clock: Clock
) -> None:
    """Stages of a rank share the link."""
    with worlds(alone, alone_job(stages=3)) as (world,):
        first, middle, _ = stages(world, {"F": 0.25, "offload": 0.5, "reload": 0.125}).values()
        clock.sleeps.clear()
        first.offload((0, 1))
        middle.offload(0)
        first.forward(2, None)
        first.wait_offload((0, 1))
        first.reload((0, 1))
        middle.wait_offload(0)
        middle.forward(1, None)
        first.wait_reload((0, 1))
    assert clock.sleeps == [0.25, 0.75, 0.5, 0.25, 0.0]


def test_a_longer_slice_moves_for_longer_whatever_its_micro_batch_weighs(alone: World, clock: Clock) -> None:
    """A micro-batch moves in 4 s: 3 s for one slice, 1 s for the other."""
    with worlds(alone, alone_job()) as (world,):
        first = stages(world, {"offload": 4.0}, parts=2, lengths=(3, 1), weights=(2, 2))[0]
        clock.sleeps.clear()
        for micro in (0, 1):
            first.offload(micro)
            first.wait_offload(micro)
    assert clock.sleeps == [3.0, 1.0]


def test_a_sleep_is_shorter_by_what_sleeps_last_too_long(alone: World, clock: Clock) -> None:
    clock.late, clock.busy = 0.01, 0.02
    assert overshoot() == pytest.approx(0.01)
    with worlds(alone, alone_job()) as (world,):
        first = stages(world, {"F": 0.25, "B": 0.005}, parts=5)[0]
        clock.sleeps.clear()
        first.forward(0, None)
        first.backward(0)
    assert clock.sleeps == [pytest.approx(0.25 / 5 - 0.01), 0.0]


def passed(stage: Stage, micros: Micros) -> list[Any]:
    """Messages of a stage in the middle, both ways, as shapes and dtypes."""
    rows = len(micros) if isinstance(micros, tuple) else 1
    stage.forward(micros, (torch.ones(rows, 2, dtype=torch.float64),))
    outputs = stage.outputs(micros)
    stage.backward(micros, tuple(torch.ones_like(t) for t in outputs))
    return [(t.shape, t.dtype) for t in (*outputs, *stage.input_gradients(micros))]


@pytest.mark.parametrize("micros", [0, (0, 1)])
def test_what_is_sent_and_received_has_the_real_sizes(alone: World, clock: Clock, micros: Micros) -> None:
    with worlds(alone, alone_job(stages=3)) as (world,):
        made, built = setting(world, facts(*range(3), inputs=(2,), gradients=(1,)))
        real, slept = (
            assemble.assemble(made, built, made.model.steps, make)[1]
            for make in (Stage, rehearsed({"F": 1, "B": 1}, world.job))
        )
    assert passed(slept, micros) == passed(real, micros)
    for slots in ("inputs", "gradients"):
        sizes = [
            [[t.shape for t in slot] for of_maker in getattr(stage, slots) for slot in of_maker]
            for stage in (slept, real)
        ]
        assert sizes[0] == sizes[1] != []


def test_an_update_changes_no_weight_and_counts(alone: World, clock: Clock) -> None:
    """Holds also if the sums are over several ranks."""
    with worlds(alone, alone_job(), copies=2) as ranks, groups(2) as members:
        made, built = setting(replace(ranks[0], sums=dict.fromkeys([(0,), (1,)], (members[0], (0, 1)))))
        slept = assemble.assemble(made, built, made.model.steps, rehearsed({"F": 1, "B": 1}, ranks[0].job))
        before = [p.clone() for module in built.values() for p in module.parameters()]
        stepped: list[int] = []
        for stage in slept.values():
            stage.on_step = lambda stage: stepped.append(stage.number)
        others = [torch.ones(2 + 1, dtype=torch.float64), torch.ones(4 + 1, dtype=torch.float64)]
        works = [torch.distributed.all_reduce(other, group=members[1], async_op=True) for other in others]
        sequential(lane_of(made, components_of(made, slept)))
        for work in works:
            assert work is not None
            work.wait()
    assert stepped == [1, 0]
    assert [other.tolist() for other in others] == [[1] * 3, [1] * 5], "zeros were added"
    assert all(map(torch.equal, before, (p for module in built.values() for p in module.parameters())))


def test_versions_are_neither_made_nor_read(alone: World, clock: Clock) -> None:
    with worlds(alone, alone_job(period=2, reads=(((-1, 2),),) * 2)) as (world,):
        first = stages(world, {"F": 1, "B": 1})[0]
        first.stash(5)
        first.drop(-3)
        assert first.at(9) is first


def test_nothing_piles_up_that_nobody_takes(alone: World, clock: Clock) -> None:
    """The ends of the pipeline send nothing; a stream has ever new micro-batches."""
    with worlds(alone, alone_job()) as (world,):
        first, last = stages(world, {"F": 1, "B": 1}).values()
        for micro in range(5):
            first.forward(micro, None)
            first.outputs(micro)
            last.forward(micro, (), None)
            last.backward(micro)
            last.input_gradients(micro)
            first.backward(micro)
    for stage in (first, last):
        assert isinstance(stage, RehearsedStage)
        assert stage._made == {}


def test_a_slice_sleeps_as_long_as_its_share_of_the_sequence() -> None:
    """Of weights 2 and 1 for two micro-batches in slices of lengths 3 and 1."""
    assert cost_weights(job(slices=2, parts=2, lengths=(3, 1), weights=(2, 2, 1, 1))) == [3, 1, 1.5, 0.5]
    assert cost_weights(job(slices=2, parts=2, lengths=(3, 1))) == [1.5, 0.5]
    assert cost_weights(job(weights=(2, 1))) == (2, 1)
