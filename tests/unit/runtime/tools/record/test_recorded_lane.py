"""A recorded lane does what the plain one does, and notes it in order, in the words of schedule.sir."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from chimera_runtime.lane import Lane
from chimera_runtime.lane.lane import LaneComponents
from chimera_runtime.program.rank_facts import Turns
from chimera_runtime.ranks.world import World
from chimera_runtime.start import assemble
from chimera_runtime.start.assemble import RankContext, components_of, lane_of, run_stream
from chimera_runtime.tools.record.recorder import Recorder, prepare, traced
from tests.unit.runtime.models import facts, given, setting
from tests.unit.runtime.thread_ranks import alone_job, worlds


def weights(modules: dict[int, nn.Module]) -> list[Any]:
    return [p.tolist() for module in modules.values() for p in module.parameters()]


class Transfer:
    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors

    def wait(self) -> None:
        """Ends the wait."""


class Echo:
    """Another worker that holds the last stage: what it sends back is twice what it was sent."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def isend(self, tensors: Any, tag: int) -> Transfer:
        self.calls.append(("isend", tag))
        self.kept = [t.clone() for t in tensors]
        return Transfer(tensors)

    def irecv(self, buffers: Any, tag: int) -> Transfer:
        self.calls.append(("irecv", tag))
        for buffer, tensor in zip(buffers, self.kept, strict=True):
            buffer.copy_(2 * tensor)
        return Transfer(buffers)


def first_of_two(lane: Lane) -> None:
    stage, sends, receives = lane.stage(0), lane.outgoing(0, 1, 1), lane.incoming(1, 0, 1)
    for micro in range(2):
        stage.forward(micro, lane.input(micro))
        sends.isend(micro, stage.outputs(micro))
        sends.wait(micro)
        receives.irecv(micro, into=0)
        receives.wait(micro)
        stage.backward(micro, receives.take(micro))
    stage.all_reduce()
    stage.wait_all_reduce()
    stage.step()


OF_AN_UPDATE = [
    line
    for m in range(2)
    for line in (
        f"load input m{m}",
        f"F m{m} s0",
        f"send m{m} s0->s1",
        f"wait send m{m} s0->s1",
        f"recv m{m} s1->s0",
        f"wait recv m{m} s1->s0",
        f"B m{m} s0",
    )
] + ["all_reduce s0", "wait all_reduce s0", "step s0"]


def operations(folder: Path, rank: int = 0) -> list[list[Any]]:
    """Records of a rank: [update, words, start, end]."""
    lines = [json.loads(line) for line in (folder / f"rank_{rank}.jsonl").read_text().splitlines()]
    return [operation for line in lines for operation in line.get("operations", ())]


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "schedule.sir").write_text("a program\n")
    return tmp_path / "scripts"


@contextmanager
def lane_into(folder: Path | None, scripts: Path, made: RankContext, parts: LaneComponents) -> Iterator[Lane]:
    """A lane, recorded into a folder if one is given."""
    if folder is None:
        yield lane_of(made, parts)
        return
    prepare(made.world.control_group, folder, scripts)
    recorder = Recorder(made.world, given(folder))
    yield lane_of(made, traced(parts, recorder))
    recorder.close()


def trained(world: World, folder: Path | None, scripts: Path, updates: int = 2) -> tuple[list[Any], Echo]:
    """The weights after some updates of the first worker of two, plain or recorded into a folder."""
    known = facts(0, gradients=(1,), incoming=((1, 0, 1),), outgoing=((0, 1, 1),))
    made, built = setting(world, known, update=first_of_two)
    stages = assemble.assemble(made, {0: built[0]}, made.model.steps)
    echo = Echo()
    with patch.object(World, "peer", lambda _world, _worker: echo):
        parts = components_of(made, stages)
    with lane_into(folder, scripts, made, parts) as lane:
        for update in range(updates):
            lane.begin(update)
            made.script.update(lane)
    return weights({0: built[0]}), echo


def test_what_is_recorded_is_what_the_plain_lane_does(alone: World, tmp_path: Path, scripts: Path) -> None:
    with worlds(alone, alone_job()) as (world,):
        plain, silent = trained(world, None, scripts)
        noted, heard = trained(world, tmp_path / "trace", scripts)
    assert noted == plain
    assert heard.calls == silent.calls
    rows = operations(tmp_path / "trace")
    assert [words for _, words, _, _ in rows] == OF_AN_UPDATE * 2
    assert [update for update, *_ in rows] == [0] * len(OF_AN_UPDATE) + [1] * len(OF_AN_UPDATE)


def test_operations_follow_one_another(alone: World, tmp_path: Path, scripts: Path) -> None:
    with worlds(alone, alone_job()) as (world,):
        trained(world, tmp_path / "trace", scripts)
    times = [time for *_, start, end in operations(tmp_path / "trace") for time in (start, end)]
    assert times == sorted(times)


def turn(lane: Any, m: int) -> None:
    """Makes a stream on one worker: an update for each micro-batch; stage 0 reads the version before the newest."""
    first, last = lane.stage(0), lane.stage(1)
    first.at(m - 1).forward(m, lane.input(m))
    last.at(m).forward(m, first.outputs(m), lane.target(m))
    last.at(m).backward(m)
    first.at(m - 1).backward(m, last.input_gradients(m))
    first.drop(m - 1)
    for stage in (first, last):
        stage.all_reduce(m + 1)
        stage.wait_all_reduce(m + 1)
    first.stash(m)
    for stage in (first, last):
        stage.step(m + 1)


def words_of_turn(m: int) -> list[tuple[int, str]]:
    """Operations of a turn, each line with the update that it is about."""
    passes = [(m, f"load input m{m}"), (m, f"F m{m} s0"), (m, f"load target m{m}"), (m, f"F m{m} s1")]
    passes += [(m, f"B m{m} s1"), (m, f"B m{m} s0")]
    dropped = [(m - 1, f"drop s0 v{m - 1}")] if m else []
    sums = [(m, f"{name} s{s}") for s in range(2) for name in ("all_reduce", "wait all_reduce")]
    return passes + dropped + sums + [(m, f"stash s0 v{m}"), (m, "step s0"), (m, "step s1")]


def streamed(world: World, folder: Path | None, scripts: Path) -> list[Any]:
    made, built = setting(world, facts(0, 1, turns=Turns(-1, 2, 1, 0), initial=(0, 0)))
    made.script.turn = turn  # type: ignore[method-assign,assignment]
    stages = assemble.assemble(made, built, made.model.steps)
    with lane_into(folder, scripts, made, components_of(made, stages)) as lane:
        run_stream(made, lane, 3)  # type: ignore[arg-type]
    return [[t.tolist() for t in stage.weights._front] for stage in stages.values()]  # type: ignore[attr-defined]


def test_in_a_stream_versions_are_named_and_what_is_not_in_the_run_is_not_recorded(
    alone: World, tmp_path: Path, scripts: Path
) -> None:
    with worlds(alone, alone_job(micro_batches=1, period=1, reads=(((-1, 1),), ((0, 1),)))) as (world,):
        assert streamed(world, tmp_path / "trace", scripts) == streamed(world, None, scripts)
    rows = operations(tmp_path / "trace")
    expected = [line for m in range(3) for line in words_of_turn(m)]
    assert [(update, words) for update, words, *_ in rows] == [*expected, (2, "drop s0 v2")]


def test_a_group_is_noted_as_one_over_its_first(alone: World, tmp_path: Path, scripts: Path) -> None:
    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world)
        stages = assemble.assemble(made, built, made.model.steps)
        with lane_into(tmp_path / "trace", scripts, made, components_of(made, stages)) as lane:
            lane.begin(3)
            first, last = lane.stage(0), lane.stage(1)
            first.forward((0, 1), lane.input((0, 1)))
            last.forward((0, 1), first.outputs((0, 1)), lane.target((0, 1)))
            last.backward((0, 1))
            first.backward((0, 1), last.input_gradients((0, 1)))
    assert [(update, words) for update, words, *_ in operations(tmp_path / "trace")] == [
        (3, words)
        for words in (
            *("load input m0", "load input m1", "F m0 s0", "load target m0", "load target m1"),
            *("F m0 s1", "B m0 s1", "B m0 s0"),
        )
    ]


def test_an_operation_that_fails_is_not_recorded_as_over(alone: World, tmp_path: Path, scripts: Path) -> None:
    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world)
        prepare(world.control_group, tmp_path / "trace", scripts)
        recorder = Recorder(made.world, given(tmp_path / "trace"))
        stages = assemble.assemble(made, built, made.model.steps)
        lane = lane_of(made, traced(components_of(made, stages), recorder))
        lane.stage(0).forward(0, lane.input(0))
        with pytest.raises(KeyError):
            lane.stage(0).backward(1, (torch.ones(1),))
        recorder.abandon("rank 0: it failed")
    assert [words for _, words, *_ in operations(tmp_path / "trace")] == ["load input m0", "F m0 s0"]


def test_a_pair_is_noted_as_one_operation_of_two_stages(alone: World, tmp_path: Path, scripts: Path) -> None:
    class Paired:
        """A stage that only runs pairs."""

        def __init__(self, number: int) -> None:
            self.number, self.seconds = number, list[Any]()

        def pair(self, _forward: Any, other: Any, _backward: Any) -> None:
            self.seconds.append(other)

    with worlds(alone, alone_job()) as (world,):
        prepare(world.control_group, tmp_path / "trace", scripts)
        recorder = Recorder(world, given(tmp_path / "trace"))
        inner = {number: Paired(number) for number in range(2)}
        nothing = LaneComponents(inner, {}, {}, lambda *_: None, lambda *_: None)
        stages = traced(nothing, recorder).stages
        stages[1].pair((1, None), stages[0], ((0,), ()))
        recorder.close()
    assert inner[1].seconds == [inner[0]]
    assert [words for _, words, *_ in operations(tmp_path / "trace")] == ["F m1 s1 & B m0 s0"]


def test_sums_of_a_resumed_run_belong_to_the_update_of_their_step(alone: World, tmp_path: Path, scripts: Path) -> None:
    with worlds(alone, alone_job()) as (world,):
        made, built = setting(world)
        stages = assemble.assemble(made, built, made.model.steps)
        for stage in stages.values():
            stage.count_from(4)
        with lane_into(tmp_path / "trace", scripts, made, components_of(made, stages)) as lane:
            lane.begin(4)
            made.script.update(lane)
    assert {update for update, *_ in operations(tmp_path / "trace")} == {4}
