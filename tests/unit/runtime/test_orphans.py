"""A process gets a signal when the one that started it is gone; tools/test_parent.py has it end a rank."""

import signal
import subprocess
import sys
import time

import pytest

from chimera_runtime import orphans
from tests.unit.runtime.tools.test_parent import PARENT, ROOT, is_there

CHILD = """
import os, signal, time
from chimera_runtime.orphans import signal_when_parent_ends
assert signal_when_parent_ends(signal.SIGKILL)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone tells a process of the end of its parent")
def test_a_process_is_killed_when_the_one_that_started_it_is() -> None:
    started = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert started.stdout is not None
    child = int(started.stdout.readline())
    started.kill()
    started.wait()
    deadline = time.monotonic() + 20
    while is_there(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_there(child)
    started.stdout.close()


def test_elsewhere_it_says_that_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans.sys, "platform", "darwin")
    assert not orphans.signal_when_parent_ends(signal.SIGTERM)
