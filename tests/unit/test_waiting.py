"""What a user is told who waits, and that nobody else is told anything."""

import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from chimera_ir import library, progress
from chimera_ir.commands.common import INTERRUPTED
from chimera_ir.compilation import Compilation
from chimera_ir.request import Request
from tests.unit.command import Ended, Run, on_a_terminal

SLOW = """
import time
from chimera_ir import progress
from chimera_ir.commands import compile_command
from chimera_ir.lower import lower as lowering
lower = lowering.lower
def slowly(*arguments, **more):
    time.sleep(SECONDS)
    return lower(*arguments, **more)
lowering.lower = slowly
progress.AFTER = AFTER
compile_command.main()
"""
DOING = "adding messages and gradient sums, verifying the program"
TERMINAL = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
CLEAN = "\x1b[1A\x1b[2K"
SHOW_CURSOR = "\x1b[?25h"


def slow(
    folder: Path,
    seconds: float,
    *arguments: str,
    after: float = progress.AFTER,
    interrupt: str | None = None,
    **variables: str,
) -> Ended:
    """A compilation that takes so much longer, by a user who is told after a second, or after ``after``."""
    program = SLOW.replace("SECONDS", str(seconds)).replace("= AFTER", f"= {after}")
    return on_a_terminal(program, *arguments, cwd=folder, env=TERMINAL | variables, interrupt=interrupt)


def test_who_waits_for_more_than_a_second_is_told_why_until_it_is_over(tmp_path: Path) -> None:
    ended = slow(tmp_path, 1.5, "chimera", "--emit", "report")
    before, _, after = ended.out.rpartition(CLEAN)
    assert ended.status == 0
    assert DOING in before
    assert "0:00:01" in before
    assert SHOW_CURSOR in before
    assert after.startswith("{")
    assert DOING not in after
    assert "{" not in before


def test_who_waits_for_less_is_told_nothing(tmp_path: Path) -> None:
    ended = slow(tmp_path, 0.0, "chimera", "--emit", "report", after=60)
    assert ended.status == 0
    assert ended.out.startswith("{")


@pytest.mark.parametrize("terminal", ["dumb", "unknown"])
def test_a_terminal_that_cannot_take_back_a_line_gets_none(tmp_path: Path, terminal: str) -> None:
    ended = slow(tmp_path, 1.2, "chimera", "--emit", "report", TERM=terminal)
    assert ended.out.startswith("{")


def test_ctrl_c_leaves_a_clean_terminal(tmp_path: Path) -> None:
    ended = slow(tmp_path, 30, "chimera", "--out", "o", interrupt=DOING)
    assert ended.status == INTERRUPTED
    assert "Traceback" not in ended.out
    assert ended.out.rpartition(DOING)[2].strip().endswith(CLEAN)
    assert SHOW_CURSOR in ended.out.rpartition(DOING)[2]
    assert list(tmp_path.iterdir()) == []


def test_standard_error_that_is_no_terminal_gets_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run("chimera", "--emit", "report").err == ""


@pytest.mark.parametrize("after", [0.0, 100.0])
def test_no_thread_is_left_running(monkeypatch: pytest.MonkeyPatch, after: float) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "AFTER", after)
    for name, value in (("FORCE_COLOR", "1"), *TERMINAL.items()):
        monkeypatch.setenv(name, value)
    before = {*threading.enumerate()}
    with suppress(KeyboardInterrupt), progress.shown() as tell:
        tell("waiting")
        raise KeyboardInterrupt
    for thread in {*threading.enumerate()} - before:
        thread.join(5)
        assert not thread.is_alive()


def test_every_step_of_a_compilation_says_once_what_is_done() -> None:
    told: list[str] = []
    compilation = Compilation(Request(library.source("chimera")), tell=told.append)
    for _ in range(2):
        assert compilation.files
    assert told == [
        "placing and ordering the operations, verifying the schedule",
        DOING,
        "simulating",
        "comparing with the baseline",
        "ordering the forwards alone, verifying their program",
        "writing the scripts, comparing them with the program",
    ]
