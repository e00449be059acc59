"""Refusals: a mistake that only one rank can see ends the calls of all ranks, with the words of that rank.

The rank leaves its error in the store. A thread of each other rank looks there once a second. If the error is about a
call for which its rank has sent messages, it breaks the rank's connections: waits end, and raise the error.
"""

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from chimera_runtime.errors import BadModel, Misuse, PeerLost, PlacedError, RanksDiffer
from chimera_runtime.ranks.rendezvous import FAILED, failure_in, leave_failure

_ANY = "refused"
"""Key that is there once any rank has left an error."""

_PERIOD = 1.0
"""Seconds between two looks at the store."""

_PAUSE = 0.02
"""Seconds between two looks of a rank that waits in a call."""

_PATIENCE = 3.0
"""Seconds that a rank whose wait has failed waits for a look at the store, which may have ended."""

_NEWEST = 16
"""Number of calls that another rank may still refuse: updates of a stream overlap."""

_TAG = 2**31 - 1
"""A tag that no message has."""


def break_connections(groups: Iterable[dist.ProcessGroup]) -> None:
    """Ends all waits in communicators of gloo: it closes the connections of one in which a wait has timed out."""
    for group in groups:
        with suppress(RuntimeError):
            work = group.recv([torch.zeros(1)], (group.rank() + 1) % group.size(), _TAG)
            work.wait(timedelta(milliseconds=1))


@dataclass(eq=False)
class Refusals:
    """The refusals of all ranks; without a ``store`` it does nothing.

    Every rank counts calls alike. An error in a call, before messages, is left under the number of the call: if all
    ``size`` ranks refuse the call, all go on. If one of them has sent messages for it, or an error comes after that,
    the pipeline ends. ``break_off`` ends the waits of this rank, and is called in a thread with the error of the other
    rank. Ranks wait ``timeout`` seconds for each other.
    """

    store: Store | None = None
    rank: int = 0
    size: int = 1
    break_off: Callable[[PeerLost], None] = lambda _error: None
    timeout: float = 60.0
    period: float = _PERIOD

    def __post_init__(self) -> None:
        self.error: PeerLost | None = None
        self._calls, self._is_inside, self._has_refused = 0, False, False
        self._sent: deque[int] = deque(maxlen=_NEWEST)
        self._is_lost = self._is_closed = False
        self._wakes, self._has_looked = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """Starts to look for the errors of other ranks."""
        if self.store is not None:
            self._thread = threading.Thread(target=self._watch_loop, daemon=True, name="refusals")
            self._thread.start()
            _watching.add(self)

    def close(self) -> None:
        """Stops looking: the thread has ended, or ends soon."""
        self._is_closed = True
        self._wakes.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE)
        self.break_off = lambda _error: None

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call that all ranks make; leaves its error for the ranks that make the call."""
        if self._is_inside or self.store is None:
            yield
            return
        self._is_inside = True
        try:
            if self._has_refused:
                self._wait_for_others()
            self._calls += 1
            yield
        except (Misuse, BadModel) as error:
            if not isinstance(error, PeerLost | RanksDiffer):
                self._leave(self._key, error)
                self._has_refused = True
                with suppress(RuntimeError):
                    self.store.add(f"{self._key}/ranks", 1)
            raise
        finally:
            self._is_inside = False

    @property
    def _key(self) -> str:
        return f"{_ANY}/{self._calls}"

    def _wait_for_others(self) -> None:
        """Waits until all ranks have refused the call that this one has refused, or one has not, and the ranks end."""
        assert self.store is not None
        deadline, self._has_refused = time.monotonic() + self.timeout, False
        with suppress(RuntimeError):
            while self.error is None and self.store.add(f"{self._key}/ranks", 0) < self.size:
                if time.monotonic() > deadline:
                    return
                time.sleep(_PAUSE)

    def note_sending(self) -> None:
        """Notes that this rank sends messages for the present call: from now on it cannot go on without the others."""
        self._sent.append(self._calls)

    def tell(self, error: PlacedError) -> None:
        """Leaves an error after which this rank can run nothing more."""
        self._leave(FAILED, error)

    def note_loading(self, error: PlacedError) -> None:
        """Leaves an error of a loader: it is the cause if other ranks lose this one in the next call."""
        self._leave(f"loading/{self._calls + 1}", error)

    def check(self) -> None:
        """Raises the error of another rank if the thread has found one."""
        if self.error is not None:
            raise self.error

    def cause(self) -> PeerLost | None:
        """The error for which another rank may have ended; call it when a wait has failed."""
        if self.error is None and self._thread is not None and self._thread.is_alive():
            self._is_lost = True
            self._has_looked.clear()
            self._wakes.set()
            self._has_looked.wait(_PATIENCE)
        return self.error

    def _leave(self, key: str, error: PlacedError) -> None:
        if self.store is not None and not isinstance(error, PeerLost | RanksDiffer):
            with suppress(RuntimeError):
                leave_failure(self.store, self.rank, error, key)
                self.store.set(_ANY, "")

    def _watch_loop(self) -> None:
        while self.error is None and not self._is_closed:
            self._wakes.wait(self.period)
            self._wakes.clear()
            is_lost = self._is_lost
            if self._is_closed:
                return
            try:
                self.error = self._found(is_lost)
            except RuntimeError:
                self._has_looked.set()
                return  # the store has ended
            if is_lost or self.error is not None:
                self._has_looked.set()
        if self.error is not None:
            self.break_off(self.error)

    def _found(self, is_lost: bool) -> PeerLost | None:
        assert self.store is not None
        if not self.store.check([_ANY]):
            return None
        refused = [*self._sent, *([self._calls] if is_lost else [])]
        keys = [FAILED, *(f"{_ANY}/{call}" for call in refused), *([f"loading/{self._calls}"] if is_lost else [])]
        for key in keys:
            if self.store.check([key]):
                text = self.store.get(key).decode()
                self.store.compare_set(FAILED, "", text)  # this rank ends for it, and others may wait for this one
                return failure_in(text)
        return None


_watching: WeakSet[Refusals] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends all threads: one that comes from the store while the interpreter ends would abort the process."""
    for refusals in [*_watching]:
        refusals.close()
