"""Ranks run one program: its scripts belong together, on every machine."""

import sys
from pathlib import Path

import pytest
from torch.distributed import HashStore

from support.faults import Misuse
from support.job import Job
from support.launch import _script
from support.world import join


def job(program: str) -> Job:
    return Job("two", program, 2, 2, 1, 1, (), (), ((0, 1),), ((0, 1), (1, 0)), 0, ())


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of ranks' scripts; what is imported from there is forgotten again."""
    for name in ("rank_0", "rank_1", "rank_2"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "rank_0.py").write_text('PROGRAM = "ours"\n')
    (tmp_path / "rank_1.py").write_text('PROGRAM = "another"\n')
    return tmp_path


def test_a_ranks_script_is_of_the_program_that_is_started(scripts: Path) -> None:
    assert _script(scripts, 0, job("ours")).PROGRAM == "ours"
    with pytest.raises(Misuse, match=r"rank_1\.py is of another program than train\.py: compile again"):
        _script(scripts, 1, job("ours"))


def test_a_script_that_is_missing_is_no_fault_of_ours(scripts: Path) -> None:
    with pytest.raises(Misuse, match=r"has no rank_2\.py: compile again"):
        _script(scripts, 2, job("ours"))
    (scripts / "rank_2.py").write_text("import nowhere\n")
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        _script(scripts, 2, job("ours"))


def test_ranks_of_different_programs_do_not_start() -> None:
    """As where one machine has an older copy of the directory."""
    store = HashStore()
    store.set("here/1", "another")
    with pytest.raises(Misuse, match="the ranks run different programs: compile again"):
        join(job("ours"), store, 0, 2, "pipeline", "gloo", 1.0)
