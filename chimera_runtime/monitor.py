"""``--timeout`` where a wait does not block the host: what is waited for is looked at again and again.

A wait on NCCL only tells the device to wait, and NCCL's own clock runs from when an operation was posted: it would end
those that were posted ahead. So the clocks of its communicators are set to a day, and time is kept here.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from chimera_runtime.errors import FAILED, PeerLost
from chimera_runtime.messages import Lost

_POLL = 0.05
"""Seconds between two looks."""


class Awaited(NamedTuple):
    """An operation that has to be over by the ``deadline``, in seconds of the monotonic clock."""

    deadline: float
    is_over: Callable[[], bool]
    lost: Lost


def abort(error: PeerLost) -> None:
    """Ends the process with the message: its main thread may be in a call that never returns."""
    sys.stderr.write(f"{error}\n")
    sys.stderr.flush()
    os._exit(FAILED)


class Monitor:
    """A thread that ends the rank when something has been waited for longer than the time-out.

    Parameters
    ----------
    timeout
        In seconds. What the device has to do before it comes to a wait counts.
    end
        Called in the thread, with what was waited for and for whom.
    """

    def __init__(self, timeout: float, end: Callable[[PeerLost], None] = abort) -> None:
        self._timeout = timeout
        self._end = end
        self._awaited: deque[Awaited] = deque()
        self._has_more = threading.Event()
        self._is_closed = False
        threading.Thread(target=self._look, daemon=True, name="time-outs").start()

    def settle(self, work: Any, lost: Lost) -> None:
        """Waits for an operation as its backend does; from now on it has the time-out to be over."""
        self._watch(work.is_completed, lost)
        work.wait()

    @contextmanager
    def watching(self, lost: Lost) -> Iterator[None]:
        """What is inside has to end within the time-out."""
        is_left = threading.Event()
        self._watch(is_left.is_set, lost)
        try:
            yield
        finally:
            is_left.set()

    def close(self) -> None:
        """Nothing is waited for any more: the thread ends."""
        self._is_closed = True
        self._has_more.set()

    def _watch(self, is_over: Callable[[], bool], lost: Lost) -> None:
        self._awaited.append(Awaited(time.monotonic() + self._timeout, is_over, lost))
        self._has_more.set()

    def _look(self) -> None:
        """Deadlines are in the order in which operations were waited for: the first that is not over comes first."""
        while not self._is_closed:
            self._has_more.wait()
            self._has_more.clear()
            while self._awaited and not self._is_closed:
                deadline, is_over, lost = self._awaited[0]
                if is_over():
                    self._awaited.popleft()
                elif time.monotonic() < deadline:
                    time.sleep(_POLL)
                else:
                    self._end(lost(RuntimeError("timed out")))
                    self._is_closed = True
