"""A loop that train.py could have, with all that can be asked for: `Run` as the hooks of a pipeline on one rank."""

import json
import multiprocessing
import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chimera_ir
from chimera_runtime.data.item_order import ItemOrder
from chimera_runtime.errors import Misuse
from chimera_runtime.model.model import ModelFile
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.program.compiled_program import load
from chimera_runtime.program.job import Place
from chimera_runtime.ranks.world import World
from chimera_runtime.tools.command.options import parse
from chimera_runtime.tools.fail.faults import Faults
from chimera_runtime.tools.run import Run
from chimera_runtime.update.updates import Outcome
from tests.unit.runtime.models import Layer, item, model

B, STEPS = 2, 5
Looped = tuple[list[float], list[torch.Tensor]]


@pytest.fixture
def run(alone: World, interleaved: Path) -> Callable[..., Run]:
    def made(*options: str, used: ModelFile | None = None, directory: Path = interleaved, steps: int = 3) -> Run:
        parsed = parse(["--model", "model.py", f"--micro-batch-size={B}", f"--steps={steps}", *options])
        store, place = alone.control_group.store, Place(0, 1, 1, "pipeline")
        return Run(parsed, load(directory), store, place, torch.device("cpu"), used or model(), Faults(store, 0))

    return made


def looped(run: Run, directory: Path) -> Looped:
    """The loop of train.py: losses, and weights after it."""
    losses = []
    with Pipeline(directory, run.model.build_stage, run.model.loss, example=run.batches, hooks=run) as pipe:
        optimizer = run.optimizers(pipe)
        mini_batches = run.mini_batches(run.loader(pipe))
        with run.progress(0) as progress:
            for _ in range(run.updates):
                progress.begin()
                outcome = pipe.step(next(mini_batches))
                if run.options.clip_norm is not None:
                    pipe.clip_grad_norm_(run.options.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
                progress.end(outcome.computed_here)
                losses.append(outcome.loss)
        weights = [p.detach().clone() for p in pipe.parameters()]
    run.close()
    return losses, weights


def test_a_trace_a_check_and_a_limit_change_nothing_of_the_training(
    run: Callable[..., Run], interleaved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, weights = looped(run(), interleaved)
    capsys.readouterr()
    options = ("--check", "--memory-limit=1GiB", f"--trace={tmp_path / 'trace'}", f"--metrics={tmp_path / 'm.json'}")
    again, same = looped(run(*options, f"--log-file={tmp_path / 'log.jsonl'}"), interleaved)
    assert again == losses
    assert all(map(torch.equal, weights, same))
    assert json.loads((tmp_path / "m.json").read_text())["loss"] == losses
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("memory: of 1 GiB")
    assert said[1:3] == ["checking 3 updates against training in one process ..", "check: passed"]
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3
    recorded = (tmp_path / "trace" / "rank_0.jsonl").read_text()
    assert '"step s0"' in recorded


def test_a_norm_clips(run: Callable[..., Run], interleaved: Path) -> None:
    _, free = looped(run(), interleaved)
    _, clipped = looped(run("--clip-norm=1e-6"), interleaved)
    start = [p for stage in range(2) for p in model().build_stage(stage, 2).parameters()]
    moved = [
        sum(float((a - b.detach()).abs().sum()) for a, b in zip(end, start, strict=True)) for end in (free, clipped)
    ]
    assert moved[1] < 1e-4 < moved[0]


def test_a_rehearsal_leaves_the_weights_alone_and_a_check_alone_trains_nothing(
    run: Callable[..., Run], interleaved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = [p for stage in range(2) for p in model().build_stage(stage, 2).parameters()]
    _, weights = looped(run("--rehearse", "F=0.0001,B=0.0001"), interleaved)
    assert all(map(torch.equal, weights, start))
    losses, weights = looped(run("--check-only"), interleaved)
    assert losses == []
    assert all(map(torch.equal, weights, start))
    assert "check: passed" in capsys.readouterr().out


def trained(run: Run, directory: Path) -> None:
    runpy.run_path(str(directory / "train.py"))["train"](run)
    run.close()


def held_out() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """No whole number of micro-batches."""
    return [item(number) for number in (1, 3, 5, 7, 11)]


def test_every_update_is_told_to_the_model_file_and_held_out_items_are_evaluated_between_them(
    run: Callable[..., Run], interleaved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loop of one's own sees the same."""
    seen: list[tuple[int, float, float]] = []

    def on_step(pipe: Pipeline, outcome: Outcome) -> None:
        seen.append(
            (outcome.update, outcome.loss, pipe.evaluate([tuple(map(torch.stack, zip(*held_out(), strict=True)))]))
        )

    used = replace(model(), validation=held_out, on_step=on_step)
    log = tmp_path / "log.jsonl"
    trained(run("--eval-every=2", f"--log-file={log}", "--device-peak=1e-6", "--peak-memory", used=used), interleaved)
    losses, _ = looped(run(), interleaved)
    assert [(update, loss) for update, loss, _ in seen] == [*enumerate(losses)]
    facts = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["update"], line["held_out"]) for line in facts if "held_out" in line] == [
        (2, pytest.approx(seen[1][2], rel=1e-12)),
        (3, pytest.approx(seen[2][2], rel=1e-12)),
    ]
    assert all(line["share_of_peak"] > 0 for line in facts if "loss" in line)
    said = capsys.readouterr().out
    assert f"step 2/3  held out {seen[1][2]:.6f}" in said
    assert "% of peak" in said
    assert "peak memory (" in said


def test_a_model_file_may_end_the_training(
    run: Callable[..., Run], interleaved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model asks after the second update; the third tells all ranks, and the fourth is on its way by then."""

    def on_step(pipe: Pipeline, outcome: Outcome) -> None:
        if outcome.update == 1:
            pipe.ask_to_stop()

    used = replace(model(), on_step=on_step)
    trained(run("--steps=100", f"--export={tmp_path / 'model.pt'}", used=used), interleaved)
    assert (tmp_path / "model.pt").exists()
    assert sum(line.startswith("step ") for line in capsys.readouterr().out.splitlines()) == 4


def test_under_autocast_the_run_is_checked_and_trained(
    run: Callable[..., Run], interleaved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Single(Layer):
        def __init__(self, stage: int, stages: int) -> None:
            super().__init__(stage, stages)
            self.float()

    def singles() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(x.float(), y.float()) for x, y in map(item, range(24))]

    used = model(Single, items=singles)
    exact, _ = looped(run(used=used), interleaved)
    capsys.readouterr()
    rounded, _ = looped(run("--autocast=bf16", "--check", used=used), interleaved)
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=2e-2)
    assert "check: passed" in (said := capsys.readouterr().out)
    assert "in bfloat16" in said


def test_what_needs_a_function_of_the_model_file_says_so(run: Callable[..., Run]) -> None:
    with pytest.raises(Misuse, match=r"--eval-every: model.py has no function validation\(\)"):
        run("--eval-every=2")


def test_a_dataset_or_a_size_that_does_not_fit_is_refused_before_anything_is_built(run: Callable[..., Run]) -> None:
    def never(stage: int, stages: int) -> nn.Module:
        raise AssertionError

    with pytest.raises(Misuse, match="the dataset has 3 items and one update takes"):
        run(used=model(never, items=lambda: [(torch.ones(2), torch.ones(1))] * 3))


def flowing(items: int = 24) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The items of the model, in the order in which train.py shuffles them, in float32 before they are collated."""
    dataset = model().dataset()
    return [dataset[key] for key in ItemOrder(dataset, 0).keys(0, 0, items)]


def test_data_workers_a_stream_and_a_collate_of_ones_own_train_the_same(
    run: Callable[..., Run], interleaved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Includes a check, which sees the same items; the sampler has what the seed would draw."""

    class Flow:
        def __iter__(self) -> Iterator[Any]:
            return iter(flowing())

    def collate(items: list[Any]) -> Any:
        return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])

    losses, _ = looped(run(), interleaved)
    files = [
        replace(model(), collate=collate),
        replace(model(), dataset=Flow, collate=collate),
        replace(model(), sampler=lambda data: ItemOrder(data, 0).keys(0, 0, 24)),
    ]
    for used in files:
        for options in ((), ("--data-workers=1", "--check")):
            assert looped(run(*options, used=used), interleaved)[0] == losses
    assert capsys.readouterr().out.count("check: passed") == 3


def test_a_rank_that_ends_leaves_no_data_workers(run: Callable[..., Run], interleaved: Path) -> None:
    others = multiprocessing.active_children()  # of tests before it in the same process
    looped(run("--data-workers=1"), interleaved)
    assert [child for child in multiprocessing.active_children() if child not in others] == []


# Updates that overlap.


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages on one worker; a micro-batch has its backwards after the forwards of the next."""
    folder = tmp_path_factory.mktemp("stream")
    (folder / "both.chim").write_text(
        "scheme both\nworkers 1\nupdate every 2\npipe down {\n  stages s in 0..2 on 0\n  micros m in 0..\n"
        "  reads version max(0, m/2 - 1)\n  F(m, s) @ 4*m + s\n  B(m, s) @ 4*m + 7 - s\n}\n"
    )
    chimera_ir.compile(folder / "both.chim").write(folder / "out")
    return folder / "out"


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


@pytest.fixture
def streamed(run: Callable[..., Run], stream: Path) -> Callable[..., Run]:
    """Runs the train.py that was written for the stream."""

    def ran(*options: str, **functions: Any) -> Run:
        used = replace(model(), optimizer=adam, **functions)
        of_stream = run(*options, used=used, directory=stream, steps=STEPS)
        trained(of_stream, stream)
        return of_stream

    return ran


def by_hand(run: Run, directory: Path, drains: tuple[int, ...] = ()) -> tuple[list[float], list[float]]:
    """The losses of a loop of one's own on the same items, and those of held-out items after some updates."""
    batch, batches, evaluated = tuple(map(torch.stack, zip(*held_out(), strict=True))), run.batches, []

    def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return adam([parameter for _, parameter in named])

    functions, example = (run.model.build_stage, run.model.loss), (batches.input(0, 0), batches.target(0, 0))
    outcomes: list[Outcome | None] = []
    with Pipeline(directory, *functions, example, optimizer=optimizer) as pipe:
        for update in range(STEPS):
            outcomes.append(pipe.step(lambda m, u=update: (batches.input(u, m), batches.target(u, m))))
            if update in drains:
                outcomes += pipe.drain()
                evaluated.append(pipe.evaluate([batch]))
        outcomes += pipe.drain()
    return [outcome.loss for outcome in outcomes if outcome is not None], evaluated


def test_train_py_of_a_stream_tells_every_update_once_as_a_loop_of_ones_own_sees_them(
    streamed: Callable[..., Run], stream: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = f"--metrics={tmp_path / 'm.json'}", f"--log-file={tmp_path / 'log.jsonl'}"
    run = streamed("--check", "--memory-limit=1GiB", f"--trace={tmp_path / 'trace'}", *files)
    losses, _ = by_hand(run, stream)
    assert len(set(losses)) == STEPS
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("memory: of 1 GiB")
    assert said[1].startswith("checking ")
    assert said[2] == "check: passed"
    lines = [line.split()[:4] for line in said if line.startswith("step ")]
    assert lines == [["step", f"{n}/{STEPS}", "loss", f"{loss:.6f}"] for n, loss in enumerate(losses, start=1)]
    metrics = json.loads((tmp_path / "m.json").read_text())
    assert metrics["loss"] == losses
    assert min(metrics["step_seconds"]) > 0, "also those of the updates that are told at the end"
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(line["update"], line["loss"]) for line in log] == [*enumerate(losses, start=1)]
    assert (tmp_path / "trace" / "rank_0.jsonl").read_text().count('"step s0"') == STEPS


def test_a_stream_is_rehearsed_or_only_checked(
    streamed: Callable[..., Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    streamed("--rehearse", "F=0.0001,B=0.0001", f"--metrics={tmp_path / 'm.json'}")
    assert json.loads((tmp_path / "m.json").read_text())["loss"] == [None] * STEPS
    assert len(capsys.readouterr().out.splitlines()) == STEPS
    streamed("--check-only")
    assert capsys.readouterr().out.splitlines()[1] == "check: passed"


def test_a_stream_is_drained_for_an_evaluation_and_each_of_its_updates_is_told_once(
    streamed: Callable[..., Run], stream: Path, tmp_path: Path
) -> None:
    """Results of a loop that drains after the third update."""
    told: list[tuple[int, float]] = []

    def on_step(_pipe: Pipeline, outcome: Outcome) -> None:
        told.append((outcome.update, outcome.loss))

    log = tmp_path / "log.jsonl"
    run = streamed("--eval-every=3", f"--log-file={log}", validation=held_out, on_step=on_step)
    losses, evaluated = by_hand(run, stream, drains=(2, 4))
    assert told == [*enumerate(losses)]
    facts = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["update"], "held_out" in line) for line in facts] == [
        *((1, False), (2, False), (3, False), (3, True), (4, False), (5, False), (5, True))
    ]
    assert [line["held_out"] for line in facts if "held_out" in line] == pytest.approx(evaluated, rel=1e-12)
