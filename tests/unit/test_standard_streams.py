"""Standard output and standard error may be closed, full, or without a reader: every command ends as documented."""

import shlex
import subprocess
import sys
import tomllib
from itertools import cycle
from pathlib import Path

import pytest

from chimera_ir.commands import group
from chimera_ir.commands.common import WRONG_COMMAND, WRONG_TEXT
from tests.patience import PATIENCE
from tests.repeatable import also

ROOT = Path(__file__).resolve().parents[2]
COMMANDS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")

NAMES = "chimera-compile", "chimera compile"
LATE, CLASH = (shlex.quote(str(ROOT / "docs" / "examples" / f"{name}.chim")) for name in ("late", "clash"))


def redirections(*all_of_them: str) -> pytest.MarkDecorator:
    """Each with one of the names in turn, in a search with the other as well."""
    cases = also(zip(all_of_them, cycle(NAMES), strict=False), zip(all_of_them, cycle(NAMES[::-1]), strict=False))
    return pytest.mark.parametrize(("redirected", "compiling"), cases)


UNSAID = ("2>&-", "2>/dev/full")
"""Standard error takes nothing, standard output does."""

UNPRINTED = (">&-", ">/dev/full 2>&1", ">&- 2>&-")
"""Standard output takes nothing, nor does standard error in some."""


def called(redirected: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", f'"$@" {redirected}', "bash", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=cwd)


EACH = """\
import os, shlex, sys
from chimera_ir import start
from chimera_ir.commands import compile_command, plan_command
file, *lines = sys.argv[1:]
for line in lines:
    child = os.fork()
    if not child:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(file, "a") as statuses:
        statuses.write(f"{status}\\n")
else:
    os._exit(0)
sys.argv = shlex.split(line)
getattr(start, {functions}[sys.argv[0]])()
"""
"""Calls commands one after the other, each in a process forked from one that has imported what most of them need."""

ALL = [*sorted(COMMANDS), *(f"chimera {name}" for name in group.COMMANDS)]


def statuses(redirected: str, folder: Path, *lines: str) -> tuple[list[int], subprocess.CompletedProcess[str]]:
    """How each command line ends, and what all of them print that goes nowhere else."""
    functions = {name: entry.partition(":")[2] for name, entry in COMMANDS.items()}
    program = EACH.replace("{functions}", repr(functions))
    done = called(redirected, sys.executable, "-c", program, str(folder / "statuses"), *lines, cwd=folder)
    return [int(line) for line in (folder / "statuses").read_text(encoding="utf-8").splitlines()], done


def test_a_mistake_has_its_status_where_nothing_can_be_said(tmp_path: Path) -> None:
    ended, done = statuses("2>&-", tmp_path, *(f"{name} --no-such-option" for name in ALL))
    assert (ended, done.stdout, done.stderr) == ([WRONG_COMMAND] * len(ALL), "", "")


def test_help_that_cannot_be_printed_is_an_error(tmp_path: Path) -> None:
    ended, done = statuses(">/dev/full", tmp_path, *(f"{name} --help" for name in ALL))
    assert ended == [WRONG_COMMAND] * len(ALL)
    assert done.stderr == "Error: standard output: No space left on device\n" * len(ALL)


@redirections(*UNSAID)
def test_a_compilation_is_the_same_without_a_standard_error_and_a_rejected_scheme_has_its_status(
    tmp_path: Path, redirected: str, compiling: str
) -> None:
    """The one that compiles has a warning to say."""
    ended, done = statuses(redirected, tmp_path, f"{compiling} {LATE}", f"{compiling} {CLASH}")
    assert (ended, done.stderr) == ([0, WRONG_TEXT], "")
    assert done.stdout.startswith("late ")


@redirections(*UNPRINTED)
def test_what_cannot_be_printed_is_an_error_and_files_are_written(
    tmp_path: Path, redirected: str, compiling: str
) -> None:
    """A scheme that is rejected has its status all the same."""
    ended, done = statuses(redirected, tmp_path, f"{compiling} {CLASH}", f"{compiling} chimera")
    assert (ended, done.stdout) == ([WRONG_TEXT, WRONG_COMMAND], "")
    assert ("standard output: " in done.stderr) == ("2>" not in redirected)
    assert (tmp_path / "chimera.out" / "train.py").is_file()
