"""Updates that overlap, on one rank: all in one call, told one by one."""

import json
from pathlib import Path

import pytest
import torch

import chimera_ir
from chimera_runtime.program import Place, load
from chimera_runtime.tools.faults import Faults
from chimera_runtime.tools.options import parse
from chimera_runtime.tools.overlapping import train_overlapping
from chimera_runtime.tools.run import Run
from chimera_runtime.world import World
from tests.unit.runtime.models import model


@pytest.mark.parametrize("only", [False, True])
def test_a_stream_is_checked_and_trained(
    alone: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], only: bool
) -> None:
    directory = tmp_path / "stream.out"
    chimera_ir.compile("pipedream", D=1).write(directory)
    options = ["--model=model.py", "--check-only" if only else "--check", "--steps=4", f"--metrics={tmp_path}/m.json"]
    used = model(lambda _stage, _stages: torch.nn.Linear(2, 1).double())
    parsed, place = parse(options), Place(0, 1, 1, "pipeline")
    run = Run(parsed, load(directory), alone.store, place, torch.device("cpu"), used, Faults(alone.store, 0))
    train_overlapping(run)
    run.close()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "check: passed"
    assert len([line for line in said if line.startswith("step ")]) == (0 if only else 4)
    assert len(json.loads((tmp_path / "m.json").read_text())["loss"]) == (0 if only else 4)
