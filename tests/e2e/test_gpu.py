"""`make gpu` with the CPU in place of the devices: a sample of its steps, so that it can be run when there are some."""

from pathlib import Path

from tests import forkserver
from tests.e2e.ranks import environment
from tests.gpu.commands import ROOT
from tests.patience import PATIENCE


def test_a_scheme_and_a_killed_rank_pass_and_are_reported(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    sample = "^(dapple on 2 workers|a rank is killed)"
    words = ("--pretend", "2", "--backend", "gloo", "--only", sample, "--report", str(report), "--folder", "programs")
    arguments = ("-m", "tests.gpu", *words[:-1], str(tmp_path / words[-1]))
    done = forkserver.run(arguments, environment(), ROOT, PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed, 0 failed, 0 skipped" in done.stdout
    text = report.read_text()
    assert "**No GPU: the CPU stands in for 2 devices**, --backend gloo." in text
    assert "| dapple on 2 workers, W = 1 | passed |" in text
    assert "| a rank is killed | passed |" in text
