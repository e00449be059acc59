"""Calling chimera-compile from a test, in this process or as one of its own."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.programs import COMPILE

TINY = """\
scheme tiny(D = 2)
workers D
pipe p {
  stages s in 0..D on s
  micros m in 0..1
  F(m, s) @ s
  B(m, s) @ 2*D-1 - s
}
"""


@dataclass(frozen=True)
class Ended:
    """How a call of chimera-compile ended, and what it said."""

    status: int
    out: str
    err: str

    def assert_refused(self, status: int, *words: str) -> None:
        assert self.status == status, self
        assert self.out == ""
        assert "Traceback" not in self.err
        for word in words:
            assert word in self.err


Run = Callable[..., Ended]


def shell(*arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    """Calls the program as a process of its own."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60, "check": False} | options
    return subprocess.run([*COMPILE, *arguments], **settings)  # type: ignore[call-overload, no-any-return]


def on_a_terminal(
    program: str, *arguments: str, cwd: Path, env: Mapping[str, str], interrupt: str | None = None
) -> Ended:
    """Runs Python text as a process on a terminal of its own; all that it shows is ``out``.

    With ``interrupt``, it gets a Ctrl-C as soon as it has shown that.
    """
    ours, theirs = pty.openpty()
    command, environment = [sys.executable, "-c", program, *arguments], os.environ | {"COLUMNS": "100"} | env
    shown = b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, env=environment) as process:
        os.close(theirs)
        with suppress(OSError):
            while part := os.read(ours, 65536):
                shown += part
                if interrupt is not None and interrupt.encode() in shown:
                    process.send_signal(signal.SIGINT)
                    interrupt = None
    os.close(ours)
    return Ended(process.returncode, shown.decode(), "")


def contents(folder: Path) -> Mapping[str, bytes]:
    """Every file below a folder, hidden ones included."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
