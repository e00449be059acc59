"""One message when something fails, whoever notices first, and a non-zero end of every rank.

The ranks agree through torchrun's store on who speaks. The store outlives any rank.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from chimera_runtime.errors import FAILED, INTERRUPTED, TERMINATED
from chimera_runtime.tools.error_file import record
from chimera_runtime.tools.parent import has_ended
from chimera_runtime.tools.streams import last_lines, let_go, tell

_PATIENCE = 5.0
_GRACE = 10.0
_POLL = 0.02
_MOMENT = 0.5

_SPEAKERS = "faults/speakers"
_SAID = "faults/said"
_LOST = "faults/lost"
_FIRST = "faults/first"


class Faults:
    """Ends this rank of a program with one message for the whole job.

    Attributes
    ----------
    at_end
        Called before the end, with the message.
    hint
        What is said below the message, on a line of its own.
    at_sigterm
        Called in place of the end when the first SIGTERM comes from outside and all ranks are well.
    """

    def __init__(self, store: Store, rank: int, program: str = "train.py") -> None:
        self._store = store
        self._rank = rank
        self._program = program
        self._lock = threading.Lock()
        self.at_end: list[Callable[[str], None]] = []
        self.at_sigterm: Callable[[], None] | None = None
        self.hint: str | None = None

    def end(self, message: str, status: int, is_cause: bool = True) -> NoReturn:
        """Says the message, unless another rank has spoken, and ends the process; torchrun gets it as well.

        Meanwhile what is in ``at_end`` is called with the message, to save what there is. Neither the store nor a file
        system that does not answer holds the process up. A message that ``is_cause`` is about this rank itself, and not
        about what it saw of another one.
        """
        speaking = threading.Thread(target=self._speak, args=(message, is_cause), daemon=True)
        self._save_and_leave(message, status, [speaking])

    def _save_and_leave(self, message: str, status: int, threads: list[threading.Thread]) -> NoReturn:
        self._lock.acquire()
        deadline = time.monotonic() + _PATIENCE
        threads += [threading.Thread(target=save, args=(message,), daemon=True) for save in self.at_end]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        leave(status)

    def _speak(self, message: str, is_cause: bool) -> None:
        """Says the message or waits until another rank has said its own; in a thread, since the store may be busy."""
        try:
            first = self._store.add(_SPEAKERS, 1) == 1
        except (RuntimeError, ValueError):
            first = True
        if first:
            tell(message if self.hint is None else f"{message}\n{self.hint}")
            record(message, is_cause)
        with suppress(RuntimeError, ValueError):
            if first:
                self._store.set(_SAID, message.split("\n", 1)[0])
                return
            self._store.wait([_SAID], timedelta(seconds=_PATIENCE))
            cause = self._store.get(_SAID).decode().removeprefix(f"{self._program}: ")
            record(f"rank {self._rank} ended after another one had failed: {cause}", is_cause=False)

    def lose(self, message: str, peers: Sequence[int] = ()) -> NoReturn:
        """Ends this rank, which could not go on without others, with the message of whoever failed first.

        That is torchrun, if it has died. Else: a rank that gives up closes its connections, and its neighbours fail in
        turn; and where one rank is stuck, all others time out together. So every rank says in the store whom it waited
        for, gives the others a moment to do the same, and follows the waits to the last rank that said anything. Who
        waited for many ranks, in a sum, and cannot tell which of them it was, follows the wait of the first rank that
        waited for one alone. What this one saw is kept for a bug report.
        """
        last_lines.append(message)
        with suppress(RuntimeError, ValueError):
            self._store.set(f"{_LOST}/{self._rank}", json.dumps([message, list(peers)]))
            if len(peers) == 1:
                self._store.compare_set(_FIRST, "", str(self._rank))
        if _torchrun_has_died():
            self._end_as_orphan()
        with suppress(RuntimeError, ValueError):
            message, is_silent = self._followed(self._rank)
            if not is_silent and self._store.check([_FIRST]):
                other, is_silent = self._followed(int(self._store.get(_FIRST)))
                message = other if is_silent else message
        self.end(f"{self._program}: {message}", FAILED, is_cause=False)

    def fail(self, error: Exception) -> NoReturn:
        """Ends this rank for an error of torch's: one of the store is what is seen of the death of torchrun."""
        headline = f"rank {self._rank}: {type(error).__name__}: {str(error).splitlines()[0]}"
        message = "\n".join([headline, *getattr(error, "__notes__", ())])
        if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
            self.lose(message)
        self.end(f"{self._program}: {message}", FAILED)

    def _end_as_orphan(self) -> NoReturn:
        """Of the ranks of one torchrun the first says so, for the store may be gone with it."""
        message = f"{self._program}: torchrun has died, and its ranks end"
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        telling = [threading.Thread(target=tell, args=(message,), daemon=True)] if is_first else []
        self._save_and_leave(message, TERMINATED, telling)

    def _followed(self, rank: int) -> tuple[str, bool]:
        """The last message along the waits from a rank, and whether the rank that it is about has said nothing."""
        message, seen = "", set[int]()
        while self._store.check([f"{_LOST}/{rank}"]):
            seen.add(rank)
            message, peers = json.loads(self._store.get(f"{_LOST}/{rank}"))
            if len(peers) != 1 or peers[0] in seen:
                return message, False
            (rank,) = peers
        return message, True

    def watch_signals(self, size: int) -> None:
        """From now on SIGINT and SIGTERM end one of ``size`` ranks promptly, with a message that says why.

        A thread listens, so that a signal is heard also while the main thread waits for a message.
        """
        heard, woken = socket.socketpair()
        woken.setblocking(False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        self._sockets = (heard, woken)
        self._store.set(f"faults/process/{self._rank}", json.dumps([socket.gethostname(), os.getpid()]))
        threading.Thread(target=self._listen, args=(heard, size), daemon=True, name="signals").start()

    def _listen(self, heard: socket.socket, size: int) -> None:
        while True:
            number = heard.recv(1)[0]
            if number == signal.SIGINT:
                self.end(f"{self._program}: interrupted", INTERRUPTED)
            if number == signal.SIGTERM:
                self._terminated(size)

    def _terminated(self, size: int) -> None:
        """A SIGTERM came: because torchrun is gone, because it ends all ranks after one has died, or from outside."""
        dead: list[int] = []
        has_spoken = threading.Event()
        looking = threading.Thread(target=self._look_for_dead, args=(size, dead, has_spoken), daemon=True)
        looking.start()
        looking.join(_PATIENCE)
        if dead and not has_ended():
            self._let_others_speak()
            died = f"rank {dead[0]} has died (torchrun's summary follows)"
            self.end(f"{self._program}: rank {self._rank}: ended by torchrun: {died}", TERMINATED, is_cause=False)
        if _torchrun_has_died():
            self._end_as_orphan()
        if self.at_sigterm is not None and not has_spoken.is_set():
            asking, self.at_sigterm = self.at_sigterm, None
            asking()
            return
        outside = f"SIGTERM came to torchrun or to rank {self._rank}, and no rank had failed"
        self.end(f"{self._program}: terminated: {outside}", TERMINATED)

    def _look_for_dead(self, size: int, dead: list[int], has_spoken: threading.Event) -> None:
        """Adds ranks of this machine whose process is no more; in a thread, since the store may be busy."""
        with suppress(RuntimeError, ValueError):
            if self._store.check([_SPEAKERS]):
                has_spoken.set()
                return
            for rank in range(size):
                key = f"faults/process/{rank}"
                host, process = json.loads(self._store.get(key)) if self._store.check([key]) else ("", 0)
                if host == socket.gethostname() and not _is_alive(process):
                    dead.append(rank)

    def _let_others_speak(self) -> None:
        """Gives whoever waits for the rank that died, this one included, the time to notice and to name it."""
        deadline = time.monotonic() + _GRACE
        with suppress(RuntimeError, ValueError):
            while time.monotonic() < deadline and not self._store.check([_SAID]):
                time.sleep(_POLL)


def _torchrun_has_died() -> bool:
    """Whether the parent is gone, or goes within a moment: one with several threads is there until the last has ended.

    If it is not, the moment has passed, and the other ranks have had it too.
    """
    deadline = time.monotonic() + _MOMENT
    while not has_ended() and time.monotonic() < deadline:
        time.sleep(_POLL)
    return has_ended()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def leave(status: int) -> NoReturn:
    """Ends the process without waiting for messages that will never come."""
    let_go()
    os._exit(status)
