"""Models of transformers train as they do in one process: in the example, and by --hf without a line of code."""

import math
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.ranks import Job, compiled, run_all
from tests.repeatable import also

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "hf_gpt2.py"
LOOPS = Path(__file__).resolve().parent / "loops"
DOUBLE, DIRECTORIES = LOOPS / "hf_double.py", LOOPS / "hf_directories.py"
SAME = also(("chimera", "halves"), ("dapple",))
"""Programs with which the example's model trains as in one process: `halves` has the places of dapple."""
STEPS = "10"
EXPERTS = also(("experts-exported",), ("experts",))
"""Jobs with the mixture of experts: under chimera, and without pairs of stages on a worker."""

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers: pip install -e '.[hf]'")
]


def lines(printed: str) -> list[list[float]]:
    """Step, loss, norm and loss on text that was not trained on, of each line."""
    read = re.findall(r"^step +(\d+)  loss (\S+)  norm (\S+)  held out (\S+)$", printed, re.M)
    return [[float(figure) for figure in figures] for figures in read]


LONG = """scheme long(D = 4, N = 2, k = 4)
pipe down {
  stages s in 0..D on s
  micros m in 0..N
  slices q in 0..k
  F(m, s, q) @ 2*(k*m + q) + s
  B(m, s, q) @ 2*(k*m + 2*(k-1) - q) + 2*D-1 - s }
"""


def experts(folder: Path, dapple: Path, chimera: Path) -> Iterator[Job]:
    """A small mixture of experts from a directory, by --hf: checked, and exported after a step of no length.

    After them it reads what was exported, by the example too.
    """
    yield Job("made", DIRECTORIES, ("made", str(folder)), model=None)
    (folder / "text.txt").write_bytes(EXAMPLE.read_bytes())
    of_model = f"--hf={folder}/experts", f"--text={folder}/text.txt", "--length=32", "--micro-batch-size=2"
    exporting = "--check", "--steps=1", "--learning-rate=1e-30", "--checkpoint-layers", f"--export={folder}/again"
    for name in EXPERTS:
        program, options = (chimera, exporting) if name == "experts-exported" else (dapple, ("--check-only",))
        yield Job(name, program / "train.py", (*of_model, *options), model=None)
    yield Job("read", DIRECTORIES, ("read", str(folder), str(EXAMPLE.parent)), model=None)


def test_tied_gpt2_of_the_library_trains_as_it_does_in_one_process(tmp_path: Path) -> None:
    """On workers that hold one end of the tie each, and on those that hold both; in float64, and smaller.

    In float32 the example runs as it is. Without the mask losses would differ by 5e-3, without the tie by 1e-2.
    """
    exported = tmp_path / "gpt2"
    schemes = {"dapple": "dapple", "chimera": "chimera", "halves": "zb_h1"}
    directories = {name: str(compiled(tmp_path, scheme, ("first,last",), D=4, N=2)) for name, scheme in schemes.items()}
    (tmp_path / "long.chim").write_text(LONG)
    long = compiled(tmp_path, str(tmp_path / "long.chim"))
    outcomes = run_all(
        tmp_path,
        4,
        [
            *(
                Job(name, DOUBLE, (str(EXAMPLE.parent), STEPS, *directory), model=None)
                for name, *directory in (*((name, directories[name]) for name in SAME), ("alone",))
            ),
            Job("example", EXAMPLE, (directories["dapple"], "--steps", STEPS, "--export", str(exported)), model=None),
            *experts(tmp_path, Path(directories["dapple"]), Path(directories["chimera"])),
            Job("long", long, ("--check-only",), str(EXAMPLE.parent / "hf_long_context.py")),
        ],
    )
    for outcome in outcomes.values():
        outcome.assert_passed()
    expected = lines(outcomes["alone"].said[0])
    assert [step for step, *_ in expected] == [10]
    for name in SAME:
        for mine, theirs in zip(lines(outcomes[name].said[0]), expected, strict=True):
            assert mine == pytest.approx(theirs, rel=0, abs=2e-6), name
    held_out = lines(outcomes["example"].said[0])[-1][-1]
    assert held_out < 0.75 * math.log(256), "it learns"
    for name in EXPERTS:
        assert re.search(r"^check: passed$", outcomes[name].said[0], re.M)
        assert re.search(r"^  reference\(\): 38 parameters; loss off by", outcomes[name].said[0], re.M)
    assert re.search(r"^  reference\(\): 57 parameters; loss off by", outcomes["long"].said[0], re.M)
    assert re.search(r"^  4 slices: loss off from that of whole sequences by", outcomes["long"].said[0], re.M)
    (loss,) = re.findall(r"^loss of what was exported (\S+)$", outcomes["read"].said[0], re.M)
    assert float(loss) == pytest.approx(held_out, rel=0, abs=5e-6), "what was exported is the same model there"
