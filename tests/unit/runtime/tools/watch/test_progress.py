"""Reports of updates: losses of all ranks, when an overlapping update is over, and nothing that stops training."""

import gc
import json
import re
import time
import weakref
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from chimera_runtime.blame import ModelError
from chimera_runtime.errors import Misuse, NotFinite, Unwritable
from chimera_runtime.model.model import ModelFile
from chimera_runtime.program.job import Place
from chimera_runtime.ranks.world import World
from chimera_runtime.tools.watch import progress as telling
from chimera_runtime.tools.watch.progress import (
    Log,
    Metrics,
    PartialOutcomes,
    Progress,
    Sinks,
    UpdateEnds,
    Validation,
    in_hours,
)
from chimera_runtime.values.losses import Tally
from tests.unit.runtime.kept import WIDTH, B, N, loss, mini_batch, pipeline
from tests.unit.runtime.models import model
from tests.unit.runtime.thread_ranks import alone_job, job, together, worlds

STREAMING = job(workers=4, stages=4, placement=((0, 1, 2, 3),), micro_batches=1, period=1)


class Marks:
    """Stands in for the progress: how many updates are over."""

    def __init__(self) -> None:
        self.count = 0

    def mark(self) -> None:
        self.count += 1


class Stage:
    """Makes steps, and tells of each."""

    def __init__(self) -> None:
        self.updates = 0
        self.on_step: Any = None

    def step(self) -> None:
        self.updates += 1
        self.on_step(self)


def watched(*stages: Stage) -> Marks:
    marks = Marks()
    ends = UpdateEnds(marks, len(stages))  # type: ignore[arg-type]
    for stage in stages:
        stage.on_step = ends.stepped
    return marks


def test_an_update_is_over_when_every_stage_has_stepped() -> None:
    early, late = Stage(), Stage()
    marks = watched(early, late)
    counts = []
    for stage in (early, early, late, late, late, early):
        stage.step()
        counts.append(marks.count)
    assert counts == [0, 0, 1, 2, 2, 3]


@pytest.fixture
def no_collection() -> Any:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_stages_go_as_soon_as_nobody_holds_them() -> None:
    """Stages hold communicators, whose threads must not outlive the ranks' last meeting."""
    stage = Stage()
    watched(stage)
    stage.step()
    held = weakref.ref(stage)
    del stage
    assert held() is None


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Printed lines, without the seconds and what follows from them."""
    return [re.sub(r"  [\d.]+ s\b.*", "", line).split() for line in capsys.readouterr().out.splitlines()]


@contextmanager
def training(world: World, count: int, sinks: Sinks | None = None, rehearsal: bool = False) -> Iterator[Progress]:
    """The progress of a run of so many updates, which is finished and closed."""
    progress = Progress(world, count, rehearsal, sinks or Sinks())
    yield progress
    progress.finish()
    progress.close()


def updates(world: World, losses: list[float], sinks: Sinks | None = None, rehearsal: bool = False) -> None:
    """A run in which this rank computes some losses."""
    with training(world, len(losses), sinks, rehearsal) as progress:
        for loss in losses:
            progress.begin()
            progress.end(Tally(loss, 1.0))


def logged(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rank_0_tells_the_mean_over_all_ranks(alone: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Each says what it computed, of one micro-batch."""
    with worlds(alone, job()) as (first, second):
        together([lambda: updates(first, [1.0, 2.0]), lambda: updates(second, [3.0, 6.0])])
    assert lines(capsys) == [["step", "1/2", "loss", "2.000000"], ["step", "2/2", "loss", "4.000000"]]


def test_a_rehearsal_has_no_losses(alone: World, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.json")
    with worlds(alone, alone_job()) as (world,):
        updates(world, [1.0] * 10, rehearsal=True, sinks=Sinks([metrics]))
    assert lines(capsys) == [["step", *f"{number:>2}/10".split()] for number in range(1, 11)]
    assert json.loads((tmp_path / "m.json").read_text())["loss"] == [None] * 10


class Clock:
    """Stands in for the module `time`: every look at it is a second later, and CPU time passes twice as fast."""

    def __init__(self) -> None:
        self.now = self.cpu = 100.0

    def time(self) -> float:
        self.now += 1
        return self.now

    @staticmethod
    def monotonic() -> float:
        return 0.0

    def process_time(self) -> float:
        self.cpu += 2
        return self.cpu


@pytest.mark.parametrize(
    ("rehearsal", "period", "seconds"), [(False, 0, [1, 2, 2]), (True, 0, [1, 1, 1]), (True, 2, [1, 2, 2])]
)
def test_an_update_lasts_from_the_end_of_the_one_before_unless_all_began_it_together(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rehearsal: bool, period: int, seconds: list[float]
) -> None:
    """A rehearsal with a flush is different: the ranks meet before each."""
    monkeypatch.setattr(telling, "time", Clock())
    metrics = Metrics(tmp_path / "m.json")
    with worlds(alone, alone_job(period=period)) as (world,):
        updates(world, [0.0] * 3, rehearsal=rehearsal, sinks=Sinks([metrics]))
    kept = json.loads((tmp_path / "m.json").read_text())
    assert kept["step_seconds"] == seconds
    assert kept["cpu_seconds"] == [2] * 3


def test_an_update_that_is_told_later_has_lasted_until_its_mark(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three updates end a second apart, and are told together; one without a mark ends when it is told."""
    monkeypatch.setattr(telling, "time", Clock())
    metrics = Metrics(tmp_path / "m.json")
    with worlds(alone, alone_job(period=2)) as (world,), training(world, 4, Sinks([metrics])) as progress:
        progress.begin()
        for _ in range(3):
            progress.mark()
        telling.time.time()
        for loss in range(4):
            progress.end(Tally(float(loss), 1.0))
    kept = json.loads((tmp_path / "m.json").read_text())
    assert kept["loss"] == [0.0, 1.0, 2.0, 3.0]
    assert kept["step_seconds"] == [1, 1, 1, 2]
    assert kept["cpu_seconds"] == [2] * 4


def test_updates_that_overlap_are_gathered_together_and_told_one_by_one(
    alone: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four workers with an update for each micro-batch, four at a time, and the rest at the end."""
    with worlds(alone, STREAMING, timeout=20.0) as ranks:
        told: list[list[int]] = [[] for _ in ranks]

        def run(world: World) -> None:
            with training(world, 6) as progress:
                progress.begin()
                for update in range(6):
                    progress.end(Tally(float(update), 0.25))
                    told[world.place.rank].append(len(progress._facts))

        together([partial(run, world) for world in ranks])
    assert told == [[1, 2, 3, 0, 1, 0]] * 4
    assert [line[-1] for line in lines(capsys)] == [f"{4 * update:.6f}" for update in range(6)]


@pytest.mark.parametrize("broken", ["standard output", "log"])
def test_an_output_that_cannot_be_written_is_told_after_training(
    alone: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str
) -> None:
    """It is not tried again; the other one has all updates, and both are closed."""
    tried: Counter[str] = Counter()

    def put(output: str) -> None:
        tried[output] += 1
        if output == broken:
            raise Unwritable(f"{output}: No space left on device")

    log = Log(tmp_path / "log.jsonl")
    monkeypatch.setattr(telling, "write_line", lambda _line: put("standard output"))
    monkeypatch.setattr(log, "add", lambda *_: put("log"))
    with worlds(alone, alone_job()) as (world,), pytest.raises(Unwritable, match=f"{broken}: No space left on device"):
        updates(world, [1.0, 2.0, 3.0], sinks=Sinks([log]))
    assert tried == {"standard output": 3, "log": 3} | {broken: 1}
    with pytest.raises(OSError, match="Bad file descriptor"):
        log.close()


def test_every_update_is_a_line_of_the_log_with_what_the_loop_said_of_it(alone: World, tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    with worlds(alone, alone_job()) as (world,), training(world, 2, Sinks([log], items=6)) as progress:
        for norm in (None, 2.5):
            progress.begin()
            progress.end(Tally(3.0, 2.0), norm=norm, learning_rates={0: [0.1]})
    first, second = logged(tmp_path / "log.jsonl")
    assert first["items_per_second"] == pytest.approx(6 / first["seconds"])
    assert [*first] == ["update", "loss", "learning_rates", "seconds", "items_per_second"]
    assert [*second] == ["update", "loss", "norm", "learning_rates", "seconds", "items_per_second"]
    assert (second["update"], second["loss"], second["norm"]) == (2, 1.5, 2.5)


def test_what_all_ranks_have_said_is_told_when_a_run_fails(alone: World, tmp_path: Path) -> None:
    """The gather would be read at the end of the next update, which never comes; of that no rank has said anything."""
    log = Log(tmp_path / "log.jsonl")
    with worlds(alone, job()) as (first, second):
        progress, other = Progress(first, 5, False, Sinks([log])), Progress(second, 5, False)
        for each in (progress, other):
            each.begin()
            each.end(Tally(1.0, 1.0))
        deadline = time.monotonic() + 30
        while not progress._pending[0][0].is_completed() and time.monotonic() < deadline:
            time.sleep(0.01)
        progress.begin()
        assert (tmp_path / "log.jsonl").read_text() == ""
        for _ in range(2):
            progress.keep()
        (line,) = logged(tmp_path / "log.jsonl")
        other.finish()
    assert (line["update"], line["loss"]) == (1, 1.0)


class Seconds:
    """Stands in for the module `time`: an update takes 4 s, but a look at the screen comes 0.04 s after the last."""

    def __init__(self) -> None:
        self.now = 100.0
        self.looks = 0

    def time(self) -> float:
        self.now += 2
        return self.now

    def process_time(self) -> float:
        return 0.0

    def monotonic(self) -> float:
        self.looks += 1
        return 0.04 * self.looks


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Text that a terminal shows in passing, as ``~ text``, and what is said there for good."""
    put: list[str] = []
    monkeypatch.setattr(telling, "time", Seconds())
    monkeypatch.setattr(telling, "is_terminal", lambda _: True)
    monkeypatch.setattr(telling, "show_line", lambda text: put.append(f"~ {text}"))
    monkeypatch.setattr(telling, "write_line", put.append)
    return put


def test_a_terminal_has_one_line_for_all_updates_with_speed_and_remaining_time(
    alone: World, terminal: list[str]
) -> None:
    """Every third is shown, as the others would be replaced at once; the last one stays."""
    with worlds(alone, alone_job()) as (world,):
        updates(world, [1.0] * 5, sinks=Sinks(items=6, peak_seconds=1.0))
    end = "items/s"
    assert terminal == [
        f"~ step 1/5  loss 1.000000  2.000 s  3 {end}  50% of peak  0:08 left",
        f"~ step 4/5  loss 1.000000  4.000 s  1.5 {end}  25% of peak  0:03 left",
        f"step 5/5  loss 1.000000  4.000 s  1.5 {end}  25% of peak",
    ]


def test_a_held_out_loss_is_a_line_below_that_of_its_update_and_its_time_is_none_of_an_updates(
    alone: World, terminal: list[str], tmp_path: Path
) -> None:
    log = Log(tmp_path / "log.jsonl")
    with worlds(alone, alone_job()) as (world,), training(world, 2, Sinks([log], items=6)) as progress:
        for _ in range(2):
            progress.begin()
            progress.end(Tally(1.0, 1.0))
            telling.time.now += 1000  # type: ignore[attr-defined]
            progress.evaluated(0.5)
    first = "step 1/2  loss 1.000000  2.000 s  3 items/s  0:02 left"
    assert terminal[:3] == [f"~ {first}", first, "step 1/2  held out 0.500000"]
    assert terminal[-2].startswith("step 2/2  loss 1.000000  4.000 s")
    assert terminal[-1] == "step 2/2  held out 0.500000"
    kept = logged(tmp_path / "log.jsonl")
    assert kept[1] == {"update": 1, "held_out": 0.5}
    assert [line.get("seconds") for line in kept] == [2, None, 4, None]


def test_evaluations_of_overlapping_updates_find_all_of_them_told(
    alone: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four are gathered together; an evaluation after the second does not wait for the others, on any rank."""
    with worlds(alone, STREAMING, timeout=20.0) as ranks:

        def run(world: World) -> None:
            with training(world, 5) as progress:
                progress.begin()
                for update in range(5):
                    progress.end(Tally(1.0, 1.0))
                    if update == 1:
                        progress.evaluated(2.0)

        together([partial(run, world) for world in ranks])

    assert [line[-2:] for line in lines(capsys)] == [
        *([["loss", "1.000000"]] * 2),
        ["out", "2.000000"],
        *([["loss", "1.000000"]] * 3),
    ]


def test_a_board_has_the_numbers_of_the_log(alone: World) -> None:
    class TensorBoard:
        facts: ClassVar[list[Any]] = []

        def add(self, facts: Any, _cpu_seconds: float | None) -> None:
            self.facts.append(facts)

        def close(self) -> None:
            self.facts.append("closed")

    with worlds(alone, alone_job()) as (world,):
        updates(world, [1.5], sinks=Sinks([TensorBoard()], items=6, peak_seconds=0.01))  # type: ignore[list-item]
    facts, closed = TensorBoard.facts
    assert (facts["update"], facts["loss"], closed) == (1, 1.5, "closed")
    assert facts["share_of_peak"] == pytest.approx(0.01 / facts["seconds"])


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0:00"), (7, "0:07"), (59.6, "1:00"), (750, "12:30"), (11220, "3:07:00")]
)
def test_a_remaining_time_is_one_of_a_clock(seconds: float, words: str) -> None:
    assert in_hours(seconds) == words


@pytest.mark.parametrize("loss", [float("nan"), float("-inf")])
def test_a_loss_that_is_no_number_stops_where_that_was_asked_for(
    alone: World, loss: float, capsys: pytest.CaptureFixture[str]
) -> None:
    with worlds(alone, alone_job()) as (world,):
        updates(world, [1.0, loss, 1.0])
        assert len(lines(capsys)) == 3
        with pytest.raises(NotFinite, match=f"--stop-on-nan: the loss of update 2 is {loss}"):
            updates(world, [1.0, loss, 1.0], sinks=Sinks(stop_on_nan=True))


def test_what_a_rank_computed_of_a_loss_is_not_taken_for_the_loss(alone: World) -> None:
    """No other rank takes part: two would be needed for a sum, which there is of one update in 16."""
    with worlds(alone, job(micro_batches=1, period=1)) as (first, _):
        outcome = PartialOutcomes(first.control_group, first.job, first.read, counted=False).launch(2, Tally(1.5, 2.0))
        assert (outcome.update, outcome.computed_here) == (2, Tally(1.5, 2.0))
        with pytest.raises(Misuse, match=r"gathered on rank 0 by the progress of train\.py.* leave out hooks="):
            _ = outcome.loss


# Held-out items count once each, whatever their number, on whichever copy.


def items(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [*zip(*mini_batch(7, count), strict=True)]


def with_items(validation: Callable[[], Any] | None) -> ModelFile:
    return replace(model(), validation=validation)


def every(updates: int | None) -> Namespace:
    """Options of 5 updates with an evaluation every ``updates``."""
    return Namespace(eval_every=updates, steps=5, micro_batch_size=B, seed=0)


def held_out(count: int, copy: int = 0, copies: int = 1, updates: int | None = 2) -> Validation:
    place = Place(copy, 1, copies, "pipeline")
    return Validation(with_items(lambda: items(count)), every(updates), alone_job(evaluated=N), place)


@pytest.mark.parametrize("count", [1, B, B * N, 5 * B * N + 3])
def test_the_loss_is_the_mean_over_all_items(alone: World, one_worker: Path, count: int) -> None:
    """Against the modules, one item after another."""
    pipe = pipeline(one_worker)
    mean = held_out(count).loss(pipe)
    stages = [pipe.stages[stage].eval() for stage in (0, 1)]
    expected = [loss(stages[1](stages[0](x[None])), y[None]).item() for x, y in items(count)]
    assert mean == pytest.approx(sum(expected) / count, rel=1e-12)
    pipe.close()


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_every_item_goes_to_one_copy_whole_rounds_before_what_is_left(copies: int) -> None:
    count, seen = 2 * B * N * 3 + 2, []
    for copy in range(copies):
        for batch in held_out(count, copy, copies)._batches():
            loaded = [batch(micro) for micro in range(N)] if callable(batch) else [batch]
            assert [len(x) for x, _, _ in loaded] == [B] * N or not callable(batch)
            seen += [x for inputs, _, _ in loaded for x in inputs]
    assert len(seen) == count
    assert {*map(tuple, map(torch.Tensor.tolist, seen))} == {tuple(x.tolist()) for x, _ in items(count)}


def test_a_rank_loads_of_a_whole_round_what_it_is_asked_for() -> None:
    loaded: list[int] = []

    class Items:
        def __len__(self) -> int:
            return B * N

        def __getitem__(self, item: int) -> Any:
            loaded.append(item)
            return torch.ones(WIDTH), torch.zeros(WIDTH), {"scale": torch.ones(1)}

    files = with_items(Items)
    of_round = Validation(files, every(1), alone_job(evaluated=N), Place(0, 1, 1, "pipeline"))
    (load,) = of_round._batches()
    inputs, _, keywords = load(1)
    assert loaded == [B, B + 1]
    assert keywords["scale"].shape == (B, 1)
    (again,) = of_round._batches()
    assert torch.equal(again(1)[0], inputs), "what an item draws at random is the same every time"


def test_it_is_time_every_so_many_updates_and_after_the_last() -> None:
    assert [update for update in range(1, 6) if held_out(3).is_due(update)] == [2, 4, 5]
    assert not any(held_out(3, updates=None).is_due(update) for update in range(1, 6))


@pytest.mark.parametrize(
    ("validation", "words"),
    [
        (None, r"--eval-every: model\.py has no function validation\(\) -> torch"),
        (lambda: iter(items(2)), r"validation\(\) must return a map-style dataset"),
        (list, r"validation\(\) must return a map-style dataset, .*, with an item"),
    ],
)
def test_what_is_missing_is_said_before_training(validation: Any, words: str) -> None:
    with pytest.raises(Misuse, match=words):
        Validation(with_items(validation), every(1), alone_job(), Place(0, 1, 1, "pipeline"))


def test_an_item_that_fails_is_the_model_files(alone: World, one_worker: Path) -> None:
    class Broken(list[Any]):
        def __getitem__(self, item: Any) -> Any:
            raise KeyError(item)

    pipe = pipeline(one_worker)
    broken = Validation(
        with_items(lambda: Broken(items(9))), every(1), alone_job(evaluated=N), Place(0, 1, 1, "pipeline")
    )
    with pytest.raises(ModelError, match=r"item 0 of validation\(\): .*KeyError: 0"):
        broken.loss(pipe)
    pipe.close()
