"""Another job, as a process."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

_PROGRAM = """
import os, pathlib, sys
from chimera_runtime.tools.open.stdio import locked
class Store:
    def compare_set(self, key, expected, number):
        return (sys.argv[2] or number).encode()
assert locked(pathlib.Path(sys.argv[1]), Store())
if os.fork():
    print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_job() -> Callable[..., AbstractContextManager[None]]:
    """Returns a context in which another job has locked a file; then it is killed, and a child of it lives on."""

    @contextmanager
    def of(lock: Path, number: str = "") -> Iterator[None]:
        command = [sys.executable, "-c", _PROGRAM, str(lock), number]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "locked\n"
            try:
                yield
            finally:
                other.kill()
                other.wait()

    return of
