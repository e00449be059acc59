"""A process gets a signal when the one that started it is gone; tools/test_parent.py has it end a rank."""

import signal
import subprocess
import sys
import time

import pytest

from chimera_runtime.errors import PeerLost
from chimera_runtime.ranks import parent_death
from chimera_runtime.ranks.messages import Names
from tests.unit.runtime.tools.open.test_parent import PARENT, ROOT, is_there

CHILD = """
import os, signal, time
from chimera_runtime.ranks.parent_death import signal_when_parent_ends
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
    monkeypatch.setattr(parent_death.sys, "platform", "darwin")
    assert not parent_death.signal_when_parent_ends(signal.SIGTERM)


@pytest.mark.parametrize("run", ["1", None])
def test_torchrun_is_gone_where_it_started_this_process_and_the_parent_is_another(
    monkeypatch: pytest.MonkeyPatch, run: str | None
) -> None:
    """A shell, srun or what else has started a rank may go."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if run is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
    launcher = parent_death.Launcher()
    assert not launcher.is_gone()
    monkeypatch.setattr(parent_death.os, "getppid", lambda: 1)
    assert launcher.is_gone() == (run is not None)
    names = Names(2, 1, 4, 20.0, launcher)
    if run is None:
        names.require_launcher()
        assert "rank 0: no answer" in str(names.lost("recv", [0], RuntimeError("timed out")))
        return
    said = "rank 2 (worker 1): torchrun has died, and its ranks end"
    assert str(names.lost("recv", [0], RuntimeError("connection closed"))) == said
    with pytest.raises(PeerLost) as lost:
        names.require_launcher()
    assert str(lost.value) == said
