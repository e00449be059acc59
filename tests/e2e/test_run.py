"""``chimera run`` trains, and ends as the torchrun that it becomes."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from chimera_ir.commands.new_command import new_command
from tests.e2e.ranks import MODELS, PATIENCE, compiled, environment, left_in, running_in, torchrun

ROOT = Path(__file__).resolve().parents[2]
RUN = (
    *(sys.executable, "-c"),
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); from chimera_ir.start import chimera; chimera()",
    "run",
)


def test_one_command_compiles_and_trains_a_new_model_in_two_copies_as_torchrun_would(tmp_path: Path) -> None:
    assert CliRunner().invoke(new_command, [str(tmp_path / "model.py")]).exit_code == 0
    training = ("--model", str(tmp_path / "model.py"), "--steps", "4", "--micro-batch-size", "2", "--check")
    words = ("chimera", "D=2", "N=2", "--copies", "2", *training, "--metrics", "run.json")
    done = subprocess.run(
        [*RUN, *words], env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "torchrun --standalone --nproc-per-node=4 chimera.out/train.py" in done.stdout
    assert "check: passed" in done.stdout
    again = torchrun(tmp_path / "chimera.out", 4, *training, "--metrics", "again.json")
    assert again.returncode == 0, again.stderr
    run, by_hand = (json.loads((tmp_path / f"{name}.json").read_text())["loss"] for name in ("run", "again"))
    assert len(run) == 4
    assert run == pytest.approx(by_hand, rel=1e-12)


def test_a_new_loop_trains_the_new_model_beside_it(tmp_path: Path) -> None:
    for name in ("model.py", "loop.py"):
        assert CliRunner().invoke(new_command, [str(tmp_path / name)]).exit_code == 0
    compiled(tmp_path, "chimera", D=2, N=2).rename(tmp_path / "chimera.out")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "loop.py"],
        env=environment() | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+/20  loss ([\d.]+)$", done.stdout, re.M)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2


def test_a_rank_that_fails_gives_the_status_of_torchrun(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("chimera", "--set", "D=2", "--model", str(MODELS / "failing.py"), "--out", str(out))
    done = subprocess.run(
        [*RUN, *words],
        env=environment() | {"FAIL": "returns-set:0:0"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    assert "stage 0 returned a set" in done.stderr
    assert not left_in(tmp_path)


def test_a_signal_reaches_the_ranks_and_is_waited_for(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("chimera", "--set", "D=2", "--model", str(MODELS / "failing.py"), "--steps", "100000", "--out", str(out))
    process = subprocess.Popen(
        [*RUN, *words], env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said = ""
    for line in process.stdout:
        said += line
        if " 5/100000" in line:
            assert len(running_in(tmp_path)) == 3, "torchrun in place of the command, and two ranks"
            process.send_signal(signal.SIGTERM)
            break
    said += process.communicate(timeout=PATIENCE)[0]
    assert process.returncode != 0
    assert " 5/100000" in said
    assert not running_in(tmp_path)
