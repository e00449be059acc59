"""``--timeout`` where a wait does not block the host: what is waited for is looked at again and again.

A wait on NCCL only tells the device to wait, and NCCL's own clock runs from when an operation was posted: it would end
those that were posted ahead. So the clocks of its communicators are set to a day, and time is kept here.

After the time-out communicators are aborted. The kernels that wait in them then end, with whatever has come by then,
and calls that waited for the device return: the main thread raises the error where it comes to `Monitor.check`. What
the device has computed since is worth nothing. Where the main thread does not come within `GRACE`, the process ends.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from chimera_runtime.errors import FAILED, PeerLost
from chimera_runtime.ranks.messages import Lost

GRACE = 10.0
"""Seconds that the main thread has to raise the error of a time-out, when what it may wait for has been aborted."""

_POLL = 0.05
"""Seconds between two looks."""


class Awaited(NamedTuple):
    """An operation that has to be over by the ``deadline``, in seconds of the monotonic clock."""

    deadline: float
    is_over: Callable[[], bool]
    lost: Lost


def end_process(error: PeerLost) -> None:
    """Ends the process with the message: its main thread is in a call that does not return."""
    sys.stderr.write(f"{error}\n")
    sys.stderr.flush()
    os._exit(FAILED)


@contextmanager
def limited(timeout: float, late: PeerLost, end: Callable[[PeerLost], None]) -> Iterator[None]:
    """Calls ``end`` in a thread if what is done meanwhile takes longer: for a call that keeps no time of its own."""
    timer = threading.Timer(timeout, end, [late])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def abort(groups: Iterable[dist.ProcessGroup]) -> None:
    """Aborts communicators, each in a thread: one may wait for kernels that end when another is aborted.

    One that cannot be aborted stays as it is.
    """

    def abort_one(group: dist.ProcessGroup) -> None:
        with suppress(AttributeError, RuntimeError):
            group.abort()

    for group in groups:
        threading.Thread(target=abort_one, args=(group,), daemon=True, name="abort").start()


class Monitor:
    """A thread that notes it when something has been waited for longer than the time-out.

    Parameters
    ----------
    timeout
        In seconds. What the device has to do before it comes to a wait counts.
    end
        Called in the thread, with what was waited for and for whom, if `check` has not raised that within the grace.
    groups
        The communicators that are aborted after a time-out.
    grace
        In seconds.
    """

    def __init__(
        self,
        timeout: float,
        end: Callable[[PeerLost], None] = end_process,
        groups: Iterable[dist.ProcessGroup] = (),
        grace: float = GRACE,
    ) -> None:
        self._timeout = timeout
        self._end = end
        self._groups = tuple(groups)
        self._grace = grace
        self._error: PeerLost | None = None
        self._is_raised = threading.Event()
        self._awaited: deque[Awaited] = deque()
        self._has_more = threading.Event()
        self._is_closed = False
        threading.Thread(target=self._look, daemon=True, name="time-outs").start()

    def settle(self, work: Any, lost: Lost) -> None:
        """Waits for an operation as its backend does; from now on it has the time-out to be over. Errors of `check`."""
        self.check()
        self._watch(work.is_completed, lost)
        try:
            work.wait()
        finally:
            self.check()  # an operation that is aborted may say so, and in other words

    @contextmanager
    def watching(self, lost: Lost) -> Iterator[None]:
        """What is inside has to end within the time-out; errors of `check`."""
        is_left = threading.Event()
        self._watch(is_left.is_set, lost)
        try:
            yield
        finally:
            is_left.set()
            self.check()

    def check(self) -> None:
        """Passes as long as nothing has taken longer than the time-out; called by the thread that computes.

        Raises
        ------
        PeerLost
            If something has: then nothing that the device gives counts any more.
        """
        if self._error is not None:
            self._is_raised.set()
            raise self._error

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
                    self._give_up(lost(RuntimeError("timed out")))

    def _give_up(self, error: PeerLost) -> None:
        """The error is known before anything is aborted: what was computed until `check` has passed is whole."""
        self._is_closed = True
        self._error = error
        abort(self._groups)
        if not self._is_raised.wait(self._grace):
            self._end(error)
