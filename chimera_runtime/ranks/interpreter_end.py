"""A wait at the end of the interpreter, until the threads of gloo have released the tensors of their last sums.

A thread of gloo releases the tensors of a sum after it has woken those that wait for the sum. For that it needs the
interpreter. If the interpreter begins to end at that moment, CPython before 3.14 ends the thread, and C++ answers with
SIGABRT: a job that is over ends as one that has failed. This happens on a machine that is busy enough to keep the
thread from running, or to a sum that nobody has waited for.
"""

import atexit
import sys
import time
from functools import cache
from pathlib import Path

_NAME = "pt_gloo_runloop"
_LIMIT = 5.0
"""Seconds. A thread that waits for a dead rank may wait longer; it does not need the interpreter."""


@cache
def wait_for_gloo_at_exit() -> None:
    """Makes the end of this process wait until the threads of gloo sleep."""
    atexit.register(wait_for_gloo)


def wait_for_gloo() -> None:
    """Returns when no thread of gloo has run since a moment at which it could have taken the interpreter."""
    deadline, before = time.monotonic() + _LIMIT, None
    while time.monotonic() < deadline:
        now = _switches()
        if now == before and all(is_asleep for is_asleep, _ in now.values()):
            return
        before = now
        time.sleep(
            max(0.01, 2 * min(sys.getswitchinterval(), 0.1))
        )  # a thread that waits for the interpreter looks as often


def _switches() -> dict[str, tuple[bool, str]]:
    """State of each thread of gloo: whether it sleeps, and how often it has gone to sleep. Empty without /proc."""
    switches = {}
    for file in Path("/proc/self/task").glob("*/status"):
        try:
            facts = dict(line.split(":", 1) for line in file.read_text().splitlines())
        except OSError:
            continue  # the thread has ended
        if facts["Name"].strip() == _NAME:
            switches[file.parent.name] = facts["State"].strip()[0] == "S", facts["voluntary_ctxt_switches"].strip()
    return switches
