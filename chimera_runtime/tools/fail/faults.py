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
from pathlib import Path
from typing import NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from chimera_runtime.errors import FAILED, INTERRUPTED, TERMINATED, PeerLost
from chimera_runtime.tools.fail.error_file import claim_to_speak, record
from chimera_runtime.tools.open.parent import has_ended
from chimera_runtime.tools.open.stdio import drop_unwritable, last_lines, write_error

_PATIENCE = 5.0
_GRACE = 10.0
_POLL = 0.02
_MOMENT = 0.5
_SAME_CTRL_C = 2.0

_SPEAKERS = "faults/speakers"
_SAID = "faults/said"
_LOST = "faults/lost"
_FIRST = "faults/first"


Answer = TypeVar("Answer")


class _NoStoreError(Exception):
    """torchrun's store does not answer, or has ended; the text says which."""


class Faults:
    """Ends this rank of a program with one message for the whole job.

    Attributes
    ----------
    at_end
        Called before the end, with the message.
    hint
        What is said below the message, on a line of its own.
    at_sigterm
        Called in place of the end when a SIGINT, SIGTERM or SIGHUP comes from outside and all ranks are well: at the
        first one, with its name. A job may get several, one from outside and one that torchrun passes on.
    """

    def __init__(self, store: Store, rank: int, program: str = "train.py") -> None:
        self._store = store
        self._rank = rank
        self._program = program
        self._lock = threading.Lock()
        self.at_end: list[Callable[[str], None]] = []
        self.at_sigterm: Callable[[str], None] | None = None
        self._interrupted: float | None = None
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
        deadline = time.monotonic() + 2 * _PATIENCE
        threads += [threading.Thread(target=save, args=(message,), daemon=True) for save in self.at_end]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        leave(status)

    def _speak(self, message: str, is_cause: bool) -> None:
        """Says the message or waits until another rank has said its own; in a thread, since the store may be busy."""
        try:
            is_first = _ask(lambda: self._store.add(_SPEAKERS, 1) == 1)
        except _NoStoreError:
            self._speak_alone(message, is_cause)
            return
        if is_first:
            claim_to_speak()  # else the others of this torchrun would, once the store has ended
            self._tell(message)
            record(message, is_cause)
        with suppress(RuntimeError, ValueError):
            if is_first:
                self._store.set(_SAID, message.split("\n", 1)[0])
                return
            self._store.wait([_SAID], timedelta(seconds=_PATIENCE))
            cause = self._store.get(_SAID).decode().removeprefix(f"{self._program}: ")
            record(f"rank {self._rank} ended after another one had failed: {cause}", is_cause=False)

    def _speak_alone(self, message: str, is_cause: bool) -> None:
        """Where no store tells who speaks, one rank of each torchrun does, and each that has failed itself."""
        record(message, is_cause)
        if is_cause or claim_to_speak():
            self._tell(message)

    def _tell(self, message: str) -> None:
        write_error(message if self.hint is None else f"{message}\n{self.hint}")

    def lose(self, message: str, peers: Sequence[int] = ()) -> NoReturn:
        """Ends this rank, which could not go on without others, with the message of whoever failed first.

        That is torchrun, if it has died. Else: a rank that gives up closes its connections, and its neighbours fail in
        turn; and where one rank is stuck, all others time out together. So every rank says in the store whom it waited
        for, gives the others a moment to do the same, and follows the waits to the last rank that said anything. Who
        waited for many ranks, in a sum, and cannot tell which of them it was, follows the wait of the first rank that
        waited for one alone. What this one saw is kept for a bug report.
        """
        last_lines.append(message)
        try:
            _ask(lambda: self._leave_word(message, peers))
            if _torchrun_has_died():
                self._end_as_orphan()
            cause = _ask(self._cause)
        except _NoStoreError as error:
            if _torchrun_has_died():
                self._end_as_orphan()
            self.end_alone(f"{message}; {error}", FAILED)
        self.end(f"{self._program}: {cause}", FAILED, is_cause=False)

    def lost(self, error: PeerLost) -> NoReturn:
        """Ends this rank, which has lost others."""
        self.lose(str(error), error.peers)

    def _leave_word(self, message: str, peers: Sequence[int]) -> None:
        """Says in the store whom this rank waited for."""
        self._store.set(f"{_LOST}/{self._rank}", json.dumps([message, list(peers)]))
        if len(peers) == 1:
            self._store.compare_set(_FIRST, "", str(self._rank))

    def _cause(self) -> str:
        """The message of the rank that the waits lead to, from this rank or from the first that waited for one."""
        message, is_silent = self._followed(self._rank)
        if not is_silent and self._store.check([_FIRST]):
            other, is_silent = self._followed(int(self._store.get(_FIRST)))
            message = other if is_silent else message
        return message

    def fail(self, error: Exception) -> NoReturn:
        """Ends this rank for an error of torch's: one of the store is what is seen of the death of torchrun."""
        headline = f"rank {self._rank}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        message = "\n".join([headline, *getattr(error, "__notes__", ())])
        if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
            self.lose(message)
        self.end(f"{self._program}: {message}", FAILED)

    def _end_as_orphan(self) -> NoReturn:
        self.end_alone("torchrun has died, and its ranks end", TERMINATED)

    def end_alone(self, message: str, status: int) -> NoReturn:
        """As `end`, where there is no store to ask, with a message about what this rank saw."""
        message = f"{self._program}: {message}"
        speaking = threading.Thread(target=self._speak_alone, args=(message, False), daemon=True)
        self._save_and_leave(message, status, [speaking])

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
        """From now on SIGINT, SIGTERM and SIGHUP end one of ``size`` ranks promptly, or call ``at_sigterm``.

        A thread listens, so that a signal is heard also while the main thread waits for a message. A SIGHUP that is
        ignored, as under ``nohup``, stays so.
        """
        heard, woken = socket.socketpair()
        woken.setblocking(False)
        is_hung_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if is_hung_up else [])):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        self._sockets = (heard, woken)
        self._store.set(f"faults/process/{self._rank}", json.dumps([_machine(), os.getpid()]))
        threading.Thread(target=self._listen, args=(heard, size), daemon=True, name="signals").start()

    def _listen(self, heard: socket.socket, size: int) -> None:
        while True:
            number = heard.recv(1)[0]
            if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._end_if_interrupted(number)
                self._terminated(size, signal.Signals(number).name)

    def _end_if_interrupted(self, number: int) -> None:
        """Ends at once for a Ctrl-C where none saves, and for the second one.

        At the second one torchrun sends its ranks a SIGTERM. A signal soon after a SIGINT may be the same Ctrl-C: the
        terminal's own and the one that torchrun passes on.
        """
        now = time.monotonic()
        is_again = self._interrupted is not None and now - self._interrupted > _SAME_CTRL_C
        if is_again or (number == signal.SIGINT and self.at_sigterm is None):
            self.end(f"{self._program}: interrupted", INTERRUPTED)
        if number == signal.SIGINT and self._interrupted is None:
            self._interrupted = now

    def _terminated(self, size: int, name: str) -> None:
        """A signal came: because torchrun is gone, because it ends all ranks after one has died, or from outside."""
        try:
            has_spoken, dead = _ask(lambda: (self._store.check([_SPEAKERS]), self._dead(size)))
        except _NoStoreError as error:
            if _torchrun_has_died():
                self._end_as_orphan()
            self.end_alone(f"rank {self._rank}: {name}; {error}", TERMINATED)
        if dead and not has_spoken and not has_ended():
            self._let_others_speak()
            died = f"rank {dead[0]} has died (torchrun's summary follows)"
            self.end(f"{self._program}: rank {self._rank}: ended by torchrun: {died}", TERMINATED, is_cause=False)
        if _torchrun_has_died():
            self._end_as_orphan()
        if has_spoken:
            ended = f"rank {self._rank}: ended by torchrun after another rank had failed"
            self.end(f"{self._program}: {ended}", TERMINATED, is_cause=False)
        if self.at_sigterm is not None:
            asking, self.at_sigterm = self.at_sigterm, lambda _name: None
            self._ask_to_stop(asking, name)
            return
        outside = f"{name} came to torchrun or to rank {self._rank}, and no rank had failed"
        self.end(f"{self._program}: terminated: {outside}", TERMINATED)

    def _ask_to_stop(self, ask: Callable[[str], None], name: str) -> None:
        try:
            ask(name)
        except (RuntimeError, ValueError) as error:
            self.end(f"{self._program}: rank {self._rank}: {name}: {str(error).partition(chr(10))[0]}", TERMINATED)

    def _dead(self, size: int) -> list[int]:
        """The ranks of this machine whose process is no more."""
        dead = []
        for rank in range(size):
            key = f"faults/process/{rank}"
            machine, process = json.loads(self._store.get(key)) if self._store.check([key]) else ("", 0)
            if machine == _machine() and not _is_alive(process):
                dead.append(rank)
        return dead

    def _let_others_speak(self) -> None:
        """Gives whoever waits for the rank that died, this one included, the time to notice and to name it."""
        deadline = time.monotonic() + _GRACE
        with suppress(RuntimeError, ValueError):
            while time.monotonic() < deadline and not self._store.check([_SAID]):
                time.sleep(_POLL)


def _ask(question: Callable[[], Answer]) -> Answer:
    """What torchrun's store says, asked by a thread: the call may never return.

    Raises
    ------
    _NoStoreError
        If it says nothing in time, or has ended.
    """
    answers: list[Answer] = []
    errors: list[Exception] = []

    def ask() -> None:
        try:
            answers.append(question())
        except (RuntimeError, ValueError) as error:
            errors.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_PATIENCE)
    if answers:
        return answers[0]
    if errors:
        raise _NoStoreError("torchrun's store has ended: the output of the node that had it says why")
    raise _NoStoreError("torchrun's store does not answer")


def _machine() -> str:
    """Tells machines apart, and containers of one machine that number their processes by themselves."""
    numbering = []
    with suppress(OSError):
        numbering = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join([socket.gethostname(), *numbering])


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
    drop_unwritable()
    os._exit(status)
