"""The example with the transformers library trains as that library's own model does in one process."""

import math
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.ranks import PATIENCE, Job, compiled, environment, run_all

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "hf_gpt2.py"
DOUBLE = Path(__file__).resolve().parent / "loops" / "hf_double.py"
STEPS = "20"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers: pip install -e '.[examples]'"),
]


def lines(printed: str) -> list[list[float]]:
    """Step, loss, norm and loss on text that was not trained on, of each line."""
    read = re.findall(r"^step +(\d+)  loss (\S+)  norm (\S+)  held out (\S+)$", printed, re.M)
    return [[float(figure) for figure in figures] for figures in read]


def test_tied_gpt2_of_the_library_trains_as_it_does_in_one_process(tmp_path: Path) -> None:
    """On workers that hold one end of the tie each, and on those that hold both; in float64.

    In float32 the example runs as it is: other weights are drawn then. Without the mask losses would
    differ by 2e-3, without the tie by 1e-2.
    """
    exported = tmp_path / "gpt2.safetensors"
    dapple, chimera, halves = (
        str(compiled(tmp_path, name, ("first,last",), D=4, N=4)) for name in ("dapple", "chimera", "zb_h1")
    )
    outcomes = run_all(
        tmp_path,
        4,
        [
            Job("dapple", DOUBLE, (str(EXAMPLE.parent), STEPS, dapple), model=None),
            Job("chimera", DOUBLE, (str(EXAMPLE.parent), STEPS, chimera), model=None),
            Job("halves", DOUBLE, (str(EXAMPLE.parent), STEPS, halves), model=None),
            Job(
                "example",
                EXAMPLE,
                (dapple, "--steps", STEPS, "--export", str(tmp_path / "gpt2.safetensors")),
                model=None,
            ),
        ],
    )
    alone = subprocess.run(
        [sys.executable, str(DOUBLE), str(EXAMPLE.parent), STEPS],
        env=environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    expected = lines(alone.stdout)
    assert [step for step, *_ in expected] == [10, 20]
    for name, outcome in outcomes.items():
        outcome.assert_passed()
        printed = lines(outcome.said[0])
        assert printed[-1][-1] < 0.7 * math.log(256), "it learns"
        if name != "example":
            for mine, theirs in zip(printed, expected, strict=True):
                assert mine == pytest.approx(theirs, rel=0, abs=2e-6)
    judged = subprocess.run(
        [sys.executable, str(DOUBLE), str(EXAMPLE.parent), str(exported)],
        env=environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    last = lines(outcomes["example"].said[0])[-1][-1]
    assert float(judged.stdout) == pytest.approx(last, rel=0, abs=5e-6), "what was exported is the same model there"
