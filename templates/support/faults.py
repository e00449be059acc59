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

from torch.distributed.distributed_c10d import Store

from support.streams import let_go, tell

FAILED = 1
MISUSED = 2
OUR_FAULT = 70
INTERRUPTED = 130
TERMINATED = 143

_PATIENCE = 5.0
_GRACE = 10.0
_POLL = 0.02
_MOMENT = 0.5


class Misuse(Exception):
    """Something is wrong with the command line, the model file or the data; the message says what and what to do."""


class Faults:
    """Ends this rank of a program with one message for the whole job."""

    def __init__(self, store: Store, rank: int, program: str = "train.py") -> None:
        self._store = store
        self._rank = rank
        self._program = program
        self._lock = threading.Lock()
        self.at_end: list[Callable[[str], None]] = []

    def end(self, message: str, status: int) -> NoReturn:
        """Says the message, unless another rank has spoken, and ends the process.

        Meanwhile what is in ``at_end`` is called with the first line of the message, to save what there is. Neither the
        store nor a file system that does not answer holds the process up.
        """
        self._lock.acquire()
        deadline, headline = time.monotonic() + _PATIENCE, message.split("\n", 1)[0]
        threads = [threading.Thread(target=save, args=(headline,), daemon=True) for save in self.at_end]
        threads.append(threading.Thread(target=self._speak, args=(message,), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        leave(status)

    def _speak(self, message: str) -> None:
        """Says the message or waits until another rank has said its own; in a thread, since the store may be busy."""
        try:
            first = self._store.add("faults/speakers", 1) == 1
        except (RuntimeError, ValueError):
            first = True
        if first:
            tell(message)
        with suppress(RuntimeError, ValueError):
            if first:
                self._store.set("faults/said", "1")
            else:
                self._store.wait(["faults/said"], timedelta(seconds=_PATIENCE))

    def root_of(self, message: str, peers: Sequence[int]) -> str:
        """The message of the rank that failed first, as far as the ranks can tell.

        A rank that gives up closes its connections, and its neighbours fail in turn; and where one rank is stuck, all
        others time out together. So every rank says in the store whom it waited for, gives the others a moment to do
        the same, and follows the waits to the last rank that said anything.
        """
        try:
            self._store.set(f"faults/lost/{self._rank}", json.dumps([message, list(peers)]))
            time.sleep(_MOMENT)
            seen = {self._rank}
            while len(peers) == 1 and peers[0] not in seen and self._store.check([f"faults/lost/{peers[0]}"]):
                seen.add(peers[0])
                message, peers = json.loads(self._store.get(f"faults/lost/{peers[0]}"))
        except (RuntimeError, ValueError):
            pass
        return message

    def watch_signals(self) -> None:
        """From now on SIGINT ends the job quietly, and SIGTERM after a chance to name the rank that died.

        A thread listens, so that a signal is heard also while the main thread waits for a message.
        """
        heard, tell = socket.socketpair()
        tell.setblocking(False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
        self._sockets = (heard, tell)
        threading.Thread(target=self._listen, args=(heard,), daemon=True, name="signals").start()

    def _listen(self, heard: socket.socket) -> None:
        while True:
            number = heard.recv(1)[0]
            if number == signal.SIGINT:
                self.end(f"{self._program}: interrupted", INTERRUPTED)
            if number == signal.SIGTERM:
                self._let_others_speak()
                ended = f"rank {self._rank}: ended by torchrun: another rank has died (its summary follows)"
                self.end(f"{self._program}: {ended}", TERMINATED)

    def _let_others_speak(self) -> None:
        """Gives whoever waits for the rank that died, this one included, the time to notice and to name it."""
        deadline = time.monotonic() + _GRACE
        with suppress(RuntimeError, ValueError):
            while time.monotonic() < deadline and not self._store.check(["faults/said"]):
                time.sleep(_POLL)


def leave(status: int) -> NoReturn:
    """Ends the process without waiting for messages that will never come."""
    let_go()
    os._exit(status)
