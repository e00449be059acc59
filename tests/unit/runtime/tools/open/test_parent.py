"""A process ends with the one that started it, and with no other."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chimera_runtime.tools.open import stdio

ROOT = Path(__file__).resolve().parents[5]

CHILD = """
import os, sys, time
from chimera_runtime.tools.open.stdio import end_with_parent
end_with_parent()
print(os.getpid(), flush=True)
time.sleep(60)
"""

PARENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(60)
"""


def is_there(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone tells a process of the end of its parent")
@pytest.mark.parametrize("run", ["1", None])
def test_a_rank_ends_when_torchrun_is_killed_and_a_process_without_torchrun_does_not(run: str | None) -> None:
    given = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    started = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=given | ({} if run is None else {"TORCHELASTIC_RUN_ID": run}),
    )
    assert started.stdout is not None
    child = int(started.stdout.readline())
    started.kill()
    started.wait()
    deadline = time.monotonic() + (20 if run else 0.5)
    while is_there(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert is_there(child) == (run is None)
    if run is None:
        os.kill(child, signal.SIGKILL)
    started.stdout.close()


def test_the_parent_is_noted_before_torch_is_imported() -> None:
    module = "chimera_runtime.tools.open.stdio"
    program = f"import sys, chimera_runtime.tools; print('{module}' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.parametrize("is_torchrun", [True, False])
def test_a_torchrun_that_is_gone_is_another_parent(monkeypatch: pytest.MonkeyPatch, is_torchrun: bool) -> None:
    """A shell that has started a rank by hand may go."""
    monkeypatch.setattr(stdio, "_IS_TORCHRUN", is_torchrun)
    assert not stdio.has_ended()
    monkeypatch.setattr(os, "getppid", lambda: 1 + stdio._PARENT)
    assert stdio.has_ended() == is_torchrun


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone has /proc/PID/stat")
def test_a_torchrun_that_nobody_has_waited_for_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for a parent whose other threads have not ended yet."""
    monkeypatch.setattr(stdio, "_IS_TORCHRUN", True)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr(stdio, "_PARENT", dead.pid)
    monkeypatch.setattr(os, "getppid", lambda: dead.pid)
    assert stdio.has_ended()
    dead.wait()
    assert not stdio.has_ended(), "there is no such process, and a fresh one may have its number"
