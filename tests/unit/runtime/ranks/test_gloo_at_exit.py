"""A process with sums of gloo ends with the status that it has earned."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from chimera_runtime.ranks import world

ROOT = Path(__file__).resolve().parents[4]

PROCESS = """
import sys, torch, torch.distributed as dist
from chimera_runtime.ranks.world import wait_for_gloo_at_exit
sys.setswitchinterval(1000)  # no thread gets the interpreter before this one sleeps
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if sys.argv[1] == "waits":
    wait_for_gloo_at_exit()
dist.all_reduce(torch.ones(1), async_op=True)
sum(range(10_000_000))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone shows what threads do")
def test_a_sum_that_is_over_when_the_process_ends_does_not_end_it_with_an_abort() -> None:
    done = subprocess.run([sys.executable, "-c", PROCESS, "waits"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_thread_that_goes_on_waiting_or_works_holds_the_end_up_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(world, "_EXIT_LIMIT", 0.3)
    states = iter([{}, {"7": (True, "1")}, {"7": (True, "2")}, {"7": (False, "2")}, {"7": (False, "2")}])
    monkeypatch.setattr(world, "_switches", lambda: next(states, {"7": (True, "3")}))
    world.wait_for_gloo()
    assert next(states, None) is None, "it has looked until the thread slept twice in a row"
    monkeypatch.setattr(world, "_switches", lambda: {"7": (True, str(time.monotonic()))})
    start = time.monotonic()
    world.wait_for_gloo()
    assert 0.3 <= time.monotonic() - start < 5


def test_threads_of_others_are_not_waited_for() -> None:
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    assert str(thread.native_id) not in world._switches()
    is_over.set()
