"""Stages of every kind under split backwards: as one process trains, nothing run more often than a whole backward does.

What cannot be split runs a whole backward first, and is named.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.ranks import Job, Outcome, compiled, run_all

N = 5
KINDS = {
    "first": ("plain", "checkpoint", "function", "compiled"),
    "second": ("checkpoint", "compiled alone", "function alone", "reentrant"),
    "third": ("function", "reentrant", "compiled", "plain alone"),
}
"""The stages of each job."""
WHOLE = {
    "checkpoint": "torch.utils.checkpoint",
    "reentrant": "torch.utils.checkpoint",
    "compiled alone": "CompiledFunction",
    "function alone": "Product",
}
"""The kinds that are not split, and what the remark names; a first stage does all in its W, and is not named."""

AT_ONCE = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
"""Inductor compiles a few small kernels: without processes for that, each of which imports torch, and without headers
that are compiled before."""


def jobs(folder: Path) -> Iterator[Job]:
    directory = compiled(folder, "zb_h1", D=4, N=N)
    for name, kinds in KINDS.items():
        made = {"HALVED": ",".join(kinds)}
        (folder / name).mkdir()
        arguments = ("--check", "--micro-batch-size", "2", "--steps", "3")
        yield Job(name, directory, arguments, "halved.py", made | {"COUNTED": str(folder / name)})
    if shutil.which("gcc") or shutil.which("clang"):
        made = {"HALVED": "plain,compiled,plain alone,plain", "COMPILER": "inductor"} | AT_ONCE
        yield Job("inductor", directory, ("--check-only", "--micro-batch-size", "2"), "halved.py", made)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Outcome]]:
    folder = tmp_path_factory.mktemp("halved")
    return folder, run_all(folder, 4, [*jobs(folder)])


def test_stages_of_every_kind_train_as_in_one_process(ran: tuple[Path, dict[str, Outcome]]) -> None:
    for name, outcome in ran[1].items():
        outcome.assert_passed()
        assert "check: passed" in outcome.said[0], name


@pytest.mark.parametrize("job", KINDS)
def test_what_cannot_be_split_is_named(ran: tuple[Path, dict[str, Outcome]], job: str) -> None:
    said = ran[1][job].said[0]
    for stage, kind in enumerate(KINDS[job]):
        remark = f"stage {stage} has {WHOLE.get(kind)} in it: its I is a whole backward, and its W does nothing"
        assert (remark in said) == (stage > 0 and kind in WHOLE), f"{kind}\n{said}"


@pytest.mark.parametrize("job", KINDS)
def test_forwards_and_backwards_run_as_often_as_in_whole_backwards(
    ran: tuple[Path, dict[str, Outcome]], job: str
) -> None:
    """A forward and a backward of each micro-batch; a forward more where it is checkpointed."""
    for stage, kind in enumerate(KINDS[job]):
        before, after = json.loads((ran[0] / job / f"{stage}.json").read_text())[-2:]
        counts = {what: after[what] - before[what] for what in ("forward", "backward")}
        assert counts == {"forward": N * (2 if kind in ("checkpoint", "reentrant") else 1), "backward": N}, kind
