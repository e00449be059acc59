"""Mini-batches of every form, against one process, on real ranks: `mini_batches.py` has the cases."""

from pathlib import Path

import pytest

from tests.e2e import mini_batches
from tests.e2e.ranks import HERE, ROOT, Job, compiled, run_all, torchrun_script
from tests.repeatable import also

SCHEMES = {1: also(("gpipe",), ("chimera",)), 2: also(("chimera",), ("gpipe",))}
"""With one copy and with two, which are eight ranks: each stage is there once, and four times."""


@pytest.mark.parametrize("copies", [1, 2])
def test_gradients_are_those_of_one_process(tmp_path: Path, copies: int) -> None:
    directories = [str(compiled(tmp_path, scheme, D=mini_batches.D, N=4)) for scheme in SCHEMES[copies]]
    script = HERE / "mini_batches.py"
    done = torchrun_script(script, mini_batches.D * copies, *directories, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        word for _ in directories for name in mini_batches.CASES for word in (f"{name}:", "passed")
    ]


def test_the_check_of_train_py_compares_sums_and_counts(tmp_path: Path) -> None:
    """With a flush and without, at once and again."""
    programs = [
        compiled(tmp_path, scheme, D=4, **parameters)
        for scheme, parameters in also(
            (("chimera_doubling", {"N": 8}), ("chimera_halving", {"N": 4}), ("pipedream_2bw", {"N": 4})),
            (("gpipe", {"N": 3}), ("chimera", {"N": 4}), ("pipedream", {})),
        )
    ]
    arguments = ("--check", "--steps", "2", "--micro-batch-size", "2")
    jobs = [Job(program.name, program, arguments, "forms.py") for program in programs]
    for name, outcome in run_all(tmp_path, 4, jobs).items():
        outcome.assert_passed()
        assert "check: passed" in outcome.said[0], name
        assert "step 2/2  loss" in outcome.said[0], name
