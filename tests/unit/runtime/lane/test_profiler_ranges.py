"""Ranges have the lines of the program as their names, and change nothing of what runs within them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from chimera_runtime.lane import Lane, profiler_ranges
from chimera_runtime.lane.lane import LaneComponents
from chimera_runtime.lane.profiler_ranges import ranged, ranges_on
from chimera_runtime.program.rank_facts import Route, Turns
from chimera_runtime.ranks.world import World
from chimera_runtime.start import assemble
from chimera_runtime.start.assemble import RankContext, components_of, lane_of, run_stream
from tests.unit.runtime.models import facts, setting
from tests.unit.runtime.thread_ranks import alone_job, worlds

CPU = torch.device("cpu")


def named(run: Callable[[], Any]) -> list[str]:
    """The ranges of a run, in the order in which they begin."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    events = [e for e in recorded.events() if e.is_user_annotation and not e.name.startswith("Optimizer.")]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


def weights(stages: dict[int, Any]) -> list[Any]:
    return [p.tolist() for stage in stages.values() for p in stage.module.parameters()]


def test_every_call_of_a_lane_is_a_range_of_its_line_and_trains_as_without(alone: World) -> None:
    with worlds(alone, alone_job()) as (world,):
        trained = []
        for has_ranges in (False, True):
            made, built = setting(world)
            made = replace(made, ranges=has_ranges)
            stages = assemble.assemble(made, built, made.model.steps)
            lane = lane_of(made, components_of(made, stages))
            lane.begin(0)
            names = named(lambda made=made, lane=lane: made.script.update(lane))  # type: ignore[misc]
            trained.append((weights(stages), names))
    (plain, silent), (with_ranges, names) = trained
    assert silent == []
    assert with_ranges == plain
    operations = [f"{letter} m{m} s{s}" for m in range(2) for letter, s in (("F", 0), ("F", 1), ("B", 1), ("B", 0))]
    assert [name for name in names if name[0] in "FB"] == operations
    ends = {f"{line} s{s}" for line in ("all_reduce", "wait all_reduce", "step") for s in range(2)}
    assert set(names) - {*operations} == ends


class Link:
    """A link that does nothing but count its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def _called(self, *_arguments: Any, **_keywords: Any) -> int:
        self.calls += 1
        return self.calls

    irecv = isend = wait = take = _called


def watched(device: torch.device = CPU, **parts: Any) -> LaneComponents:
    """Components of a lane with ranges, of these parts and nothing else."""
    nothing = LaneComponents({}, {}, {}, lambda *_: None, lambda *_: None)
    return ranged(nothing._replace(**parts), ranges_on(device))


def test_messages_are_named_with_their_ends_the_other_worker_and_the_slot() -> None:
    receiving, sending, back, on = Link(), Link(), Route(2, 1, 3), Route(1, 2, 3)
    parts = watched(incoming={back: receiving}, outgoing={on: sending})
    incoming, outgoing = parts.incoming[back], parts.outgoing[on]

    def run() -> None:
        incoming.irecv(4, into=1)
        incoming.wait(4)
        assert incoming.take(4) == 3
        outgoing.isend((4, 5), ())
        outgoing.wait((4, 5))

    assert named(run) == [
        "recv m4 s2->s1 from w3 into 1",
        "wait recv m4 s2->s1",
        "send m4,m5 s1->s2 to w3",
        "wait send m4,m5 s1->s2",
    ]
    assert (receiving.calls, sending.calls) == (3, 2)


def test_ties_and_versions_are_named_as_in_the_program() -> None:
    class Shared:
        """Weights that count their sums."""

        sums = updates = 0

        def all_reduce(self) -> None:
            self.sums += 1

        def stash(self, version: int) -> None:
            assert version == 2

    tie = watched(ties={(0, 3): Shared()}).ties[0, 3]
    assert named(lambda: (tie.all_reduce(), tie.stash(2))) == ["all_reduce s0+s3", "stash s0+s3 v2"]
    assert tie.sums == 1


def test_moves_are_named_with_their_waits_and_without_a_version() -> None:
    class Moving:
        """A stage whose moves count."""

        calls = 0

        def _called(self, _micros: Any) -> None:
            self.calls += 1

        offload = wait_offload = reload = wait_reload = _called

        def at(self, _version: int) -> None:
            """Has one version."""

    moving = Moving()
    stage = watched(stages={1: moving}).stages[1].at(3)
    lines = named(lambda: (stage.offload(2), stage.wait_offload(2), stage.reload((2, 3)), stage.wait_reload((2, 3))))
    assert lines == ["offload m2 s1", "wait offload m2 s1", "reload m2,m3 s1", "wait reload m2,m3 s1"]
    assert moving.calls == 4


def turn(lane: Lane, m: int) -> None:
    """Ranges of a stream on one worker: an update for each micro-batch, on the newest weights."""
    first, last = lane.stage(0), lane.stage(1)
    first.at(m).forward(m, lane.input(m))
    last.at(m).forward(m, first.outputs(m), lane.target(m))
    last.at(m).backward(m)
    first.at(m).backward(m, last.input_gradients(m))
    for stage in (first, last):
        stage.all_reduce(m + 1)
        stage.wait_all_reduce(m + 1)
        stage.step(m + 1)


def test_operations_of_a_stream_name_their_version_and_what_is_not_in_the_run_has_no_range(alone: World) -> None:
    of_stream = facts(0, 1, turns=Turns(-1, 2, 1, 0), initial=(0, 0))

    def streamed(made: RankContext, built: Any) -> list[str]:
        made = replace(made, ranges=True)
        made.script.turn = turn  # type: ignore[method-assign,assignment]
        lane = lane_of(made, components_of(made, assemble.assemble(made, built, made.model.steps)))
        return named(lambda: run_stream(made, lane, 2))

    with worlds(alone, alone_job(micro_batches=1, period=1, reads=(((0, 1),), ((0, 1),)))) as (world,):
        names = streamed(*setting(world, of_stream))
    operations = [name for name in names if name[0] in "FB"]
    assert operations == [
        f"{o} v{m}" for m in range(2) for o in (f"F m{m} s0", f"F m{m} s1", f"B m{m} s1", f"B m{m} s0")
    ]


def test_an_update_is_a_range_around_its_lines() -> None:
    route = Route(1, 0, 1)
    link = watched(incoming={route: Link()}).incoming[route]

    def run() -> None:
        with ranges_on(CPU)("update 3"):
            link.wait(0)

    assert named(run) == ["update 3", "wait recv m0 s1->s0"]


def test_on_a_gpu_each_range_is_one_of_nvtx_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[str] = []

    @contextmanager
    def of_nvtx(name: str) -> Iterator[None]:
        marks.append(f"begin {name}")
        yield
        marks.append("end")

    monkeypatch.setattr(profiler_ranges.torch.cuda.nvtx, "range", of_nvtx)
    route = Route(0, 1, 1)
    outgoing = watched(torch.device("cuda", 0), outgoing={route: Link()}).outgoing[route]
    assert named(lambda: outgoing.wait(0)) == ["wait send m0 s0->s1"]
    assert marks == ["begin wait send m0 s0->s1", "end"]


def test_a_stage_for_forwards_alone_has_ranges_as_well() -> None:
    class Forwards:
        """As of an evaluation."""

        def forward(self, micros: int, inputs: Any) -> Any:
            return micros, inputs

    stage = watched(stages={1: Forwards()}).stages[1]
    assert named(lambda: stage.forward(2, ())) == ["F m2 s1"]
