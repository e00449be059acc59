"""A loop that train.py could have, with all that can be asked for: `Run` as the hooks of a pipeline on one rank."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import chimera_ir
from chimera_runtime.errors import Misuse
from chimera_runtime.model import ModelFile
from chimera_runtime.pipeline import Pipeline
from chimera_runtime.program import Place, load
from chimera_runtime.tools.faults import Faults
from chimera_runtime.tools.options import parse
from chimera_runtime.tools.run import Run
from chimera_runtime.world import World
from tests.unit.runtime.models import model

N, B = 4, 2
Looped = tuple[list[float], list[torch.Tensor]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages on one worker."""
    directory = tmp_path_factory.mktemp("run") / "interleaved.out"
    chimera_ir.compile("interleaved", P=1, v=2, N=N).write(directory)
    return directory


@pytest.fixture
def run(alone: World, compiled: Path) -> Callable[..., Run]:
    def made(*options: str, used: ModelFile | None = None) -> Run:
        parsed = parse(["--model", "model.py", f"--micro-batch-size={B}", "--steps=3", *options])
        place = Place(0, 1, 1, "pipeline")
        return Run(
            parsed,
            load(compiled),
            alone.store,
            place,
            torch.device("cpu"),
            model() if used is None else used,
            Faults(alone.store, 0),
        )

    return made


def looped(run: Run, directory: Path) -> Looped:
    """The loop of train.py: losses, and weights after it."""
    losses = []
    with Pipeline(directory, run.model.build_stage, run.model.loss, example=run.batches, hooks=run) as pipe:
        optimizer = run.optimizers(pipe)
        with run.progress() as progress:
            for _ in range(run.updates):
                progress.begin()
                outcome = pipe.step(run.batches)
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
    run: Callable[..., Run], compiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, weights = looped(run(), compiled)
    capsys.readouterr()
    options = ("--check", "--memory-limit=1GiB", f"--trace={tmp_path / 'trace'}", f"--metrics={tmp_path / 'm.json'}")
    again, same = looped(run(*options, f"--log={tmp_path / 'log.jsonl'}"), compiled)
    assert again == losses
    assert all(map(torch.equal, weights, same))
    assert json.loads((tmp_path / "m.json").read_text())["loss"] == losses
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("memory: of 1 GiB")
    assert said[1] == "check: passed"
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3
    recorded = (tmp_path / "trace" / "rank_0.jsonl").read_text()
    assert '"step s0"' in recorded


def test_a_norm_clips(run: Callable[..., Run], compiled: Path) -> None:
    _, free = looped(run(), compiled)
    _, clipped = looped(run("--clip-norm=1e-6"), compiled)
    start = [p for stage in range(2) for p in model().build_stage(stage, 2).parameters()]
    moved = [
        sum(float((a - b.detach()).abs().sum()) for a, b in zip(end, start, strict=True)) for end in (free, clipped)
    ]
    assert moved[1] < 1e-4 < moved[0]


def test_a_rehearsal_leaves_the_weights_alone_and_a_check_alone_trains_nothing(
    run: Callable[..., Run], compiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = [p for stage in range(2) for p in model().build_stage(stage, 2).parameters()]
    _, weights = looped(run("--rehearse", "F=0.0001,B=0.0001"), compiled)
    assert all(map(torch.equal, weights, start))
    losses, weights = looped(run("--check-only"), compiled)
    assert losses == []
    assert all(map(torch.equal, weights, start))
    assert "check: passed" in capsys.readouterr().out


def test_a_dataset_or_a_size_that_does_not_fit_is_refused_before_anything_is_built(run: Callable[..., Run]) -> None:
    def never(stage: int, stages: int) -> nn.Module:
        raise AssertionError

    with pytest.raises(Misuse, match="the dataset has 3 items and one update takes"):
        run(used=model(never, items=lambda: [(torch.ones(2), torch.ones(1))] * 3))
