"""Commands under a limit: how they ended, what they said, and that no process of theirs is left."""

import os
import shlex
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GRACE = 10.0
"""Seconds that ranks have to end after what started them."""

_MARK = "CHIMERA_GPU_COMMAND"


@dataclass(frozen=True)
class CommandLine:
    """Words to start in the project's folder, with further environment variables."""

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """As a shell takes it."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*settings, shlex.join(self.words)])


@dataclass(frozen=True)
class CommandEnd:
    """The exit status, None if the limit ended it; what was said; how many processes had to be ended afterwards."""

    status: int | None
    said: str
    seconds: float
    left: int


def run(command: CommandLine, limit: float) -> CommandEnd:
    """Runs a command for at most ``limit`` seconds, and ends whatever it has started and left."""
    mark = uuid.uuid4().hex
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(command.variables) | {_MARK: mark}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        start = time.monotonic()
        process = subprocess.Popen(
            command.words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
        )
        status: int | None = None
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(limit)
        seconds = time.monotonic() - start
        left = _left(mark, 0.0 if status is None else GRACE)
        for number in left:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        process.wait()
        _left(mark, GRACE)
        output.seek(0)
        return CommandEnd(status, output.read(), seconds, len(left))


def _left(mark: str, patience: float) -> list[int]:
    """The processes with a mark in their environment that still run when they have had some time to end."""
    deadline = time.monotonic() + patience
    while (running := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return running


def _marked(mark: str) -> list[int]:
    wanted = f"{_MARK}={mark}".encode()
    running: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                running.append(int(entry.name))
    return running
