"""The lane of a stream: warm-up and drain are turns whose calls about what is not in the run do nothing."""

from typing import Any

import pytest

from chimera_runtime.lane import Lane
from chimera_runtime.lane.lane import LaneComponents
from chimera_runtime.lane.stream_lane import Driver, StreamLane, StreamLink, StreamStage, UpdateRange
from chimera_runtime.program.rank_facts import Route, Turns

UPDATES, PER_UPDATE = 3, 2
INSIDE = (0, 1, 5, (4, 5), (0, 1))
OUTSIDE = (-1, -7, 6, 100, (-2, -1), (6, 7))


class Noting:
    """A stage or a link that notes every call, and returns its name."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            return self if name == "at" else name

        return call


def run() -> UpdateRange:
    return UpdateRange(PER_UPDATE, UPDATES)


@pytest.fixture
def noting() -> Noting:
    return Noting()


def stage(noting: Noting, stashed: int = 0, dropped: int = 0) -> StreamStage:
    return StreamStage(noting, run(), stashed, dropped)


def test_a_run_has_the_micro_batches_of_its_updates_and_makes_their_versions() -> None:
    assert [m for m in range(-3, 9) if run().has(m)] == [0, 1, 2, 3, 4, 5]
    assert [v for v in range(-3, 9) if run().makes(v)] == [1, 2, 3]
    assert all(run().has(micros) for micros in INSIDE)
    assert not any(run().has(micros) for micros in OUTSIDE)
    assert not any(UpdateRange(PER_UPDATE).has(micros) for micros in (*INSIDE, *OUTSIDE))


@pytest.mark.parametrize("micros", INSIDE)
def test_passes_of_the_run_go_to_the_stage_on_their_version(noting: Noting, micros: Any) -> None:
    streamed = stage(noting)
    streamed.at(2).forward(micros, "inputs", "targets")
    streamed.at(1).backward(micros, "gradients")
    assert noting.calls == [
        ("at", 2),
        ("forward", micros, "inputs", "targets"),
        ("at", 1),
        ("backward", micros, "gradients"),
    ]
    assert streamed.outputs(micros) == "outputs"
    assert streamed.input_gradients(micros) == "input_gradients"


@pytest.mark.parametrize("micros", INSIDE)
def test_moves_of_the_run_go_to_the_stage_whatever_its_version(noting: Noting, micros: Any) -> None:
    calls = ["offload", "wait_offload", "reload", "wait_reload"]
    for call in calls:
        getattr(stage(noting).at(2), call)(micros)
    assert noting.calls == [(call, micros) for call in calls]


@pytest.mark.parametrize("micros", OUTSIDE)
def test_calls_about_other_micro_batches_do_nothing(noting: Noting, micros: Any) -> None:
    streamed = stage(noting)
    streamed.at(1).forward(micros, ())
    streamed.at(1).backward(micros)
    streamed.offload(micros)
    streamed.wait_offload(micros)
    assert streamed.outputs(micros) == streamed.input_gradients(micros) == ()
    outgoing, incoming = StreamLink(noting, run().has), StreamLink(noting, run().has)
    outgoing.isend(micros, ())
    outgoing.wait(micros)
    incoming.irecv(micros, into=0)
    incoming.wait(micros)
    assert incoming.take(micros) == ()
    assert noting.calls == []


@pytest.mark.parametrize("micros", INSIDE)
def test_messages_of_the_run_go_over_the_link(noting: Noting, micros: Any) -> None:
    outgoing, incoming = StreamLink(noting, run().has), StreamLink(noting, run().has)
    outgoing.isend(micros, ("tensor",))  # type: ignore[arg-type]
    outgoing.wait(micros)
    incoming.irecv(micros, 1)
    incoming.wait(micros)
    assert incoming.take(micros) == "take"
    assert noting.calls == [
        ("isend", micros, ("tensor",)),
        ("wait", micros),
        ("irecv", micros, 1),
        ("wait", micros),
        ("take", micros),
    ]


def test_versions_before_the_first_are_the_first(noting: Noting) -> None:
    stage(noting).at(-3).forward(0, ())
    assert noting.calls[0] == ("at", 0)


def test_sums_and_steps_are_those_of_versions_that_the_run_makes(noting: Noting) -> None:
    streamed = stage(noting)
    for version in range(-2, UPDATES + 3):
        streamed.all_reduce(version)
        streamed.wait_all_reduce(version)
        streamed.step(version)
    assert noting.calls == [("all_reduce",), ("wait_all_reduce",), ("step",)] * UPDATES


@pytest.mark.parametrize(("stashed", "dropped"), [(0, 0), (-2, -2), (-3, -1), (0, -1)])
def test_the_initial_weights_are_stashed_and_dropped_once_at_the_places_that_stand_for_them(
    noting: Noting, stashed: int, dropped: int
) -> None:
    """The last version of the run stays what it is, as nothing is made from it."""
    streamed = stage(noting, stashed, dropped)
    for version in range(-5, UPDATES + 3):
        streamed.stash(version)
        streamed.drop(version)
    for name in ("stash", "drop"):
        assert [version for called, version in noting.calls if called == name] == [0, 1, 2]


def test_a_stage_of_a_stream_begins_as_any(noting: Noting) -> None:
    stage(noting).begin(3)
    assert noting.calls == [("begin", 3)]


def test_a_lane_of_a_stream_gives_its_stages_and_links_the_run() -> None:
    """A lane loads only micro-batches of the run, which may be set after the lane was made."""
    inner, loaded = Noting(), []

    def load(update: int, micro: int) -> str:
        loaded.append((update, micro))
        return "batch"

    length = UpdateRange(PER_UPDATE)
    parts = LaneComponents({0: inner}, {Route(1, 0, 1): inner}, {Route(0, 1, 1): inner}, load, load)
    lane = StreamLane(parts, length, {(0,): (-1, 0)})
    assert isinstance(lane, Lane)
    lane.run.updates = 1
    for micro in (-1, 0, 1, 2):
        batch = lane.input(micro)
        assert batch == lane.target(micro) == ("batch" if micro in (0, 1) else None)
        lane.stage(0).forward(micro, batch)
        lane.outgoing(0, 1, 1).isend(micro, ())
        lane.incoming(1, 0, 1).wait(micro)
    assert lane.input((0, 1)) == ("batch", "batch")
    assert lane.input((2, 3)) == (None, None)
    assert [call[:2] for call in inner.calls] == [
        *(("at", 0), ("forward", 0), ("isend", 0), ("wait", 0)),
        *(("at", 0), ("forward", 1), ("isend", 1), ("wait", 1)),
    ]
    assert loaded == [(0, 0), (0, 0), (0, 1), (0, 1), (0, 0), (0, 1)]
    lane.stage(0).stash(-1)
    lane.stage(0).drop(0)
    assert inner.calls[-2:] == [("stash", 0), ("drop", 0)]


# Update by update.


class Inside:
    """A stage that is told of the beginning of runs."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def begin(self, update: int) -> None:
        self.begun.append(update)


def driven(first: int, behind: int, step: int, ahead: int) -> tuple[Driver, list[tuple[int, int]], Inside]:
    """A driver, the turns that it runs with the updates given by then, and its only stage."""
    inside, turns = Inside(), []
    parts = LaneComponents({0: inside}, {}, {}, lambda *_: None, lambda *_: None)
    lane = StreamLane(parts, UpdateRange(PER_UPDATE), {(0,): (0, 0)})

    def turn(of: Any, number: int) -> None:
        turns.append((of.run.updates, number))

    return Driver(turn, lane, Turns(first, behind, step, ahead)), turns, inside


@pytest.mark.parametrize("facts", [(-2, 3, 1, 0), (-2, 1, 1, 1), (0, 4, 2, 3), (-1, 0, 1, 2), (0, 2, 1, -1)])
@pytest.mark.parametrize("updates", [1, 2, 5])
def test_turns_run_in_order_each_as_soon_as_what_it_needs_is_given(
    facts: tuple[int, int, int, int], updates: int
) -> None:
    driver, turns, _ = driven(*facts)
    for given in range(1, updates + 1):
        driver.add_update()
        assert driver.updates == given
        assert all(number + facts[3] < by for by, number in turns)
    number_of_given = len(turns)
    driver.drain()
    assert [number for _, number in turns] == [*Turns(*facts).of(updates)]
    assert all(by == updates for by, _ in turns[number_of_given:])
    assert all(number + facts[3] >= updates for _, number in turns[number_of_given:]), "no turn waits without need"


def test_a_run_begins_again_where_the_one_before_ended() -> None:
    driver, turns, inside = driven(-1, 1, 1, 0)
    driver.drain()
    assert turns == [], "nothing was given"
    for _ in range(2):
        driver.add_update()
    driver.drain()
    first = [number for _, number in turns]
    driver.begin(2)
    assert driver.updates == 0
    assert inside.begun == [2]
    for _ in range(2):
        driver.add_update()
    driver.drain()
    assert [number for _, number in turns] == first * 2
