"""The example with the transformers library trains as that library's own model does in one process."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.ranks import PATIENCE, Job, compiled, environment, run_all

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "hf_gpt2.py"
ALONE = Path(__file__).resolve().parent / "loops" / "hf_alone.py"
STEPS = 20

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers: pip install -e '.[examples]'"),
]


def lines(printed: str) -> list[tuple[int, float, float]]:
    """Step, loss and norm of each line."""
    read = re.findall(r"^step +(\d+)  loss (\S+)  norm (\S+)$", printed, re.M)
    return [(int(step), float(loss), float(norm)) for step, loss, norm in read]


def held_out(printed: str) -> float:
    """The loss at the end, on text that was not trained on."""
    (loss,) = re.findall(r"^held out  loss (\S+)$", printed, re.M)
    return float(loss)


def test_gpt2_of_the_library_trains_as_it_does_in_one_process(tmp_path: Path) -> None:
    directory = compiled(tmp_path, "dapple", D=4, N=4)
    job = Job("gpt2", EXAMPLE, (str(directory), "--steps", str(STEPS)), model=None)
    outcome = run_all(tmp_path, 4, [job])["gpt2"]
    outcome.assert_passed()
    alone = subprocess.run(
        [sys.executable, str(ALONE), str(EXAMPLE.parent), str(STEPS)],
        env=environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    ranks, one = lines(outcome.said[0]), lines(alone.stdout)
    assert [step for step, *_ in one] == [1, 10, 20]
    for mine, theirs in zip(ranks, one, strict=True):
        assert mine == pytest.approx(theirs, rel=0.01, abs=0.002)
    assert one[-1][1] < 0.7 * one[0][1]
    assert held_out(outcome.said[0]) == pytest.approx(held_out(alone.stdout), abs=0.01)
