"""Time-outs for waits that do not block the host: a thread polls the operations that are waited for.

A wait on NCCL only tells the device to wait, and NCCL's own clock runs from when an operation was posted: it would end
operations that were posted ahead. So the clocks of its communicators are set to a day, and time is kept here.

After the time-out the communicators are aborted. The kernels that wait in them then end, with whatever data they have,
and calls that waited for the device return: the main thread raises the error at its next `Monitor.check`. Results that
the device has computed since the abort are invalid. If the main thread makes no check within `GRACE`, the process ends.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from chimera_runtime.errors import FAILED, PeerLost
from chimera_runtime.ranks.messages import Lost

GRACE = 10.0
"""Seconds that the main thread has to raise the error of a time-out, after the communicators are aborted."""

_POLL = 0.05
"""Seconds between two polls."""

Awaited = tuple[float, Callable[[], bool], Lost]
"""An awaited operation: its deadline in seconds of the monotonic clock, whether it is over, and the error if not."""


def end_process(error: PeerLost) -> None:
    """Ends the process with the message: its main thread is in a call that does not return."""
    sys.stderr.write(f"{error}\n")
    sys.stderr.flush()
    os._exit(FAILED)


@contextmanager
def limited(timeout: float, late: PeerLost, end: Callable[[PeerLost], None]) -> Iterator[None]:
    """Calls ``end`` with the error ``late``, in a thread, if the code inside takes longer than ``timeout`` seconds."""
    timer = threading.Timer(timeout, end, [late])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def abort(groups: Iterable[dist.ProcessGroup]) -> None:
    """Aborts communicators, each in a thread: an abort may wait for kernels that end when another one is aborted."""

    def abort_one(group: dist.ProcessGroup) -> None:
        with suppress(AttributeError, RuntimeError):
            group.abort()

    for group in groups:
        threading.Thread(target=abort_one, args=(group,), daemon=True, name="abort").start()


@dataclass(eq=False)
class Monitor:
    """A thread that notices operations that have been waited for longer than ``timeout`` seconds.

    The time includes the work of the device before the wait. After a time-out the communicators in ``groups`` are
    aborted. ``end`` is called in the thread with the error, if `check` has not raised it within ``grace`` seconds.
    """

    timeout: float
    end: Callable[[PeerLost], None] = end_process
    groups: Iterable[dist.ProcessGroup] = ()
    grace: float = GRACE

    def __post_init__(self) -> None:
        self._error: PeerLost | None = None
        self._is_raised = threading.Event()
        self._awaited: deque[Awaited] = deque()
        self._has_more = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._watch_loop, daemon=True, name="time-outs")
        self._thread.start()

    def settle(self, work: Any, lost: Lost) -> None:
        """Waits for a posted operation as its backend does; `check` raises ``lost(..)`` if it takes longer."""
        self.check()
        self._watch(work.is_completed, lost)
        try:
            work.wait()
        finally:
            self.check()  # the error of an aborted operation would hide the time-out

    @contextmanager
    def watching(self, lost: Lost) -> Iterator[None]:
        """Watches that the code inside ends within the time-out; ``lost`` and errors are as in `settle`."""
        is_left = threading.Event()
        self._watch(is_left.is_set, lost)
        try:
            yield
        finally:
            is_left.set()
            self.check()

    def check(self) -> None:
        """Raises `PeerLost` if an operation was late; then no result of the device is valid any more."""
        if self._error is not None:
            self._is_raised.set()
            raise self._error

    def break_off(self, error: PeerLost) -> None:
        """Ends all waits with an error, which the next `check` raises: another rank cannot go on."""
        self._is_closed, self._error = True, error
        self._has_more.set()
        abort(self.groups)

    def close(self) -> None:
        """Ends the thread, and drops the communicators."""
        self._is_closed, self.groups = True, ()
        self._has_more.set()
        self._thread.join(2 * _POLL)

    def _watch(self, is_over: Callable[[], bool], lost: Lost) -> None:
        self._awaited.append((time.monotonic() + self.timeout, is_over, lost))
        self._has_more.set()

    def _watch_loop(self) -> None:
        """Deadlines are in the order of the waits, so the loop looks at the first operation alone."""
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
                    self._give_up(lost(RuntimeError("timed out")))

    def _give_up(self, error: PeerLost) -> None:
        """Sets the error, and then aborts the communicators: so results are valid if a later `check` passes."""
        self._is_closed = True
        self._error = error
        abort(self.groups)
        # The main thread may be in a call that waits for the device: the abort lets it return, and it then checks.
        if not self._is_raised.wait(self.grace):
            self.end(error)
