"""Standard output and standard error may be closed, full, or without a reader: every command ends as documented."""

import subprocess
import sys
import tomllib
from itertools import cycle
from pathlib import Path

import pytest

from chimera_ir.commands import group
from chimera_ir.commands.common import WRONG_COMMAND
from tests.patience import PATIENCE
from tests.repeatable import also

ROOT = Path(__file__).resolve().parents[2]
COMMANDS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")

NAMES = ("chimera-compile",), ("chimera", "compile")


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


def script(name: str, *words: str) -> tuple[str, ...]:
    """A command of the package that the tests import, with its first words."""
    module, _, function = COMMANDS[name].partition(":")
    return sys.executable, "-c", f"from {module} import {function}; {function}()", *words


EACH = """\
import os, sys
from chimera_ir import start
from chimera_ir.commands import compile_command, plan_command
file, word, *names = sys.argv[1:]
for name in names:
    child = os.fork()
    if not child:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(file, "a") as statuses:
        statuses.write(f"{name}: {status}\\n")
else:
    os._exit(0)
program, *words = name.split()
sys.argv = [program, *words, word]
getattr(start, {functions}[program])()
"""
"""Calls commands one after the other, each in a process forked from one that has imported what most of them need."""

ALL = [*sorted(COMMANDS), *(f"chimera {name}" for name in group.COMMANDS)]


def statuses(redirected: str, word: str, folder: Path) -> tuple[dict[str, int], str]:
    """How each command ends, called with one word, and what all of them print that goes nowhere else."""
    functions = {name: entry.partition(":")[2] for name, entry in COMMANDS.items()}
    program = EACH.replace("{functions}", repr(functions))
    done = called(redirected, sys.executable, "-c", program, str(folder / "statuses"), word, *ALL, cwd=folder)
    lines = (folder / "statuses").read_text(encoding="utf-8").splitlines()
    return {
        name: int(status) for name, _, status in (line.partition(": ") for line in lines)
    }, done.stdout + done.stderr


def test_a_mistake_has_its_status_where_nothing_can_be_said(tmp_path: Path) -> None:
    assert statuses("2>&-", "--no-such-option", tmp_path) == (dict.fromkeys(ALL, WRONG_COMMAND), "")


def test_help_that_cannot_be_printed_is_an_error(tmp_path: Path) -> None:
    ended, errors = statuses(">/dev/full", "--help", tmp_path)
    assert ended == dict.fromkeys(ALL, WRONG_COMMAND)
    assert errors == "Error: standard output: No space left on device\n" * len(ALL)


@redirections(*UNSAID)
def test_a_compilation_is_the_same_without_a_standard_error(
    tmp_path: Path, redirected: str, compiling: tuple[str, ...]
) -> None:
    """It has a warning to say."""
    late = str(ROOT / "docs" / "examples" / "late.chim")
    done = called(redirected, *script(*compiling), late, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("late ")


@redirections(*UNSAID, *UNPRINTED)
def test_a_rejected_scheme_has_its_status_whatever_can_be_said(
    tmp_path: Path, redirected: str, compiling: tuple[str, ...]
) -> None:
    clash = str(ROOT / "docs" / "examples" / "clash.chim")
    assert called(redirected, *script(*compiling), clash, cwd=tmp_path).returncode == 1


@redirections(*UNPRINTED)
def test_what_cannot_be_printed_is_an_error_and_files_are_written(
    tmp_path: Path, redirected: str, compiling: tuple[str, ...]
) -> None:
    done = called(redirected, *script(*compiling), "chimera", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (WRONG_COMMAND, "")
    assert ("standard output: " in done.stderr) == ("2>" not in redirected)
    assert (tmp_path / "chimera.out" / "train.py").is_file()
