"""One message for a failure, whichever rank notices it first, and a non-zero status of every rank.

The ranks agree through torchrun's store on the rank that prints. The store outlives any rank.
"""

import fcntl
import json
import math
import os
import platform
import signal
import socket
import sys
import threading
import time
import traceback
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from importlib import metadata
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from chimera_runtime.blame import place_of_error, place_of_thread
from chimera_runtime.errors import FAILED, INTERRUPTED, TERMINATED, PeerLost, PlacedError, ScriptPlace, visible
from chimera_runtime.errors import tools as mistakes
from chimera_runtime.errors.start import NO_ANSWER, error_of_a_rank
from chimera_runtime.program.job import Place
from chimera_runtime.tools.open.stdio import drop_unwritable, has_ended, last_lines, unwritable_errors, write_error

# ``--bundle FILE``: a zip file for a bug report, written when a run fails.
#
# Every rank adds its messages, the places of its threads, and where it was in its lane; the first rank also adds the
# program and the versions.

_PROGRAM = ("schedule.sir", "program.json", "report.json")
_ABOUT = "about.json"

FORMAT = "chimera stop"
VERSION = 1

_MESSAGE = 10_000
"""Characters of a message that a record has; readers refuse a record that is far larger."""

_PACKAGES = ("torch", "numpy", "chimera_ir")

_PREFIXES = ("CUDA_", "GLOO_", "NCCL_", "PYTORCH_", "TORCH_", "TORCHELASTIC_", "TORCHINDUCTOR_", "MALLOC_")
_NAMES = {
    *("GLIBC_TUNABLES", "KMP_AFFINITY", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OMP_PROC_BIND"),
    *("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE"),
}


class BugReport:
    """Writes this rank's part of the zip file.

    Raises `Misuse` if a file of that name was not written by ``--bundle``, `Unwritable` if it cannot be written.
    """

    def __init__(self, options: Namespace, directory: Path, rank: int) -> None:
        self._path: Path = options.bundle.resolve()
        self._directory = directory
        self._rank = rank
        self._timeout: float = options.timeout
        self._place: Place | None = None
        self._error: BaseException | None = None
        self._about = {
            "command": _without_values_for_the_model(sys.argv),
            "python": sys.version,
            "platform": platform.platform(),
            "packages": dict(_packages()),
            "build": torch.__config__.show(),
            "device": _device(options),
            "environment": dict(
                sorted((k, v) for k, v in os.environ.items() if k in _NAMES or k.startswith(_PREFIXES))
            ),
        }
        if os.environ.get("LOCAL_RANK", "0") == "0":
            with unwritable_errors("--bundle", options.bundle):
                if self._path.exists() and not _is_bundle(self._path):
                    raise mistakes.path_is_yours(option="--bundle", path=self._path, other="name")
                self._path.touch()
                self._path.unlink()

    @contextmanager
    def noting(self, place: Place) -> Iterator[None]:
        """Context of the run on the rank at ``place``: notes an error inside, for the record of the rank's end."""
        self._place = place
        try:
            yield
        except BaseException as error:
            self._error = error
            raise

    def add(self, message: str) -> None:
        """Adds the last message of this rank, the lines before it, and the places of its threads. A failure is printed
        and stops nothing.
        """
        try:
            self._add(message)
        except (OSError, zipfile.BadZipFile) as error:
            write_error(f"train.py: rank {self._rank}: --bundle {self._path}: {error}")

    def _add(self, message: str) -> None:
        texts = {f"rank_{self._rank}.txt": visible("\n".join(self._account(message)))}
        if self._place is not None:
            texts[f"rank_{self._rank}.json"] = json.dumps(self._stop(self._place, message), indent=2)
        with os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
                if _ABOUT not in archive.namelist():
                    texts[_ABOUT] = json.dumps(self._about, indent=2)
                    for name in _PROGRAM:
                        if (self._directory / name).is_file():
                            archive.write(self._directory / name, name)
                for name, text in texts.items():
                    archive.writestr(name, text)

    def _stop(self, place: Place, message: str) -> dict[str, Any]:
        """The record of this rank's end, for the page of a bug report: the line of its script, and its wait if any."""
        error = self._error
        if error is None:
            script = _place_of_main_thread()
        else:
            script = (error.place if isinstance(error, PlacedError) else None) or place_of_error(error.__traceback__)
            message = str(error) or type(error).__name__
        peers, is_late = (error.peers, NO_ANSWER in str(error)) if isinstance(error, PeerLost) else ((), False)
        file = str(self._directory / f"rank_{place.worker}.py")
        return {
            "format": FORMAT,
            "version": VERSION,
            "rank": place.rank,
            "worker": place.worker,
            "copies": place.copies,
            "layout": place.layout,
            "update": None if script is None else script.update,
            "line": None if script is None else script.line,
            "counters": {} if script is None else script.counters,
            "text": "" if script is None else getline(file, script.line).strip(),
            "waits_for": [*peers],
            "seconds": self._timeout if is_late else None,
            "message": message.split("\n", 1)[0][:_MESSAGE],
        }

    def _account(self, message: str) -> Iterator[str]:
        yield f"rank {self._rank} on {socket.gethostname()}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
        yield f"\nat its end:\n{message}"
        yield "\nthe last lines that it wrote:"
        yield from tuple(last_lines)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for thread, frame in sys._current_frames().items():
            if thread != threading.get_ident():
                yield f"\nthread {names.get(thread, thread)}:\n{_stack(frame)}"


def _place_of_main_thread() -> ScriptPlace | None:
    """Place in the script of the main thread; None if reading it fails, as the thread runs on meanwhile."""
    try:
        return place_of_thread(sys._current_frames().get(threading.main_thread().ident or 0))
    except Exception:
        return None


def _stack(frame: FrameType) -> str:
    try:
        return "".join(traceback.format_stack(frame)).rstrip()
    except Exception as error:
        return f"(cannot be told: {error!r})"


def _is_bundle(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return _ABOUT in archive.namelist()


def _without_values_for_the_model(words: list[str]) -> list[str]:
    """Returns the command line without the words after ``--``: they are the model file's, and may be secret."""
    if "--" not in words:
        return words
    end = words.index("--")
    return [*words[: end + 1], f"({len(words) - end - 1} left out)"]


def _packages() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _device(options: Namespace) -> str:
    count = torch.cuda.device_count()
    if count and (options.device == "cuda" or (options.device is None and options.backend != "gloo")):
        local = int(os.environ.get("LOCAL_RANK", "0")) % count
        return f"{count} GPUs, {torch.cuda.get_device_name(local)}"
    return f"{os.cpu_count()} processors, {platform.machine()}"


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
    """The message says whether torchrun's store has ended, or does not answer."""


class Faults:
    """Ends this rank of a ``program`` with one message for the whole job, which begins with the program's name.

    ``at_end`` are called with the message before the process ends; ``hint`` is a line below it. If ``at_sigterm`` is
    set, the first SIGINT, SIGTERM or SIGHUP while all ranks are well calls it with the name of the signal instead of
    ending the process; later ones, which torchrun passes on, are ignored.
    """

    def __init__(self, store: Store, rank: int, program: str = "train.py") -> None:
        self._store = store
        self._rank = rank
        self._name = f"{program}: "
        self._lock = threading.Lock()
        self.at_end: list[Callable[[str], None]] = []
        self.at_sigterm: Callable[[str], None] | None = None
        self._interrupted: float | None = None
        self.hint: str | None = None

    def end(self, message: str, status: int, is_cause: bool = True) -> NoReturn:
        """Prints the message, unless another rank has printed one, gives it to torchrun, and ends the process.

        Meanwhile ``at_end`` saves what it can, in threads with a time limit, as the store or a file system may not
        answer. ``is_cause`` says that the message is about this rank itself, not about one that it waited for.
        """
        self._save_and_leave(message, status, partial(self._speak, is_cause=is_cause))

    def end_alone(self, message: str, status: int) -> NoReturn:
        """Ends this rank like `end`, but without the store: with its own message about the peers that it waited for."""
        self._save_and_leave(message, status, partial(self._speak_alone, is_cause=False))

    def _save_and_leave(self, message: str, status: int, speak: Callable[[str], None]) -> NoReturn:
        self._lock.acquire()
        message = f"{self._name}{message}"
        deadline = time.monotonic() + 2 * _PATIENCE
        threads = [threading.Thread(target=call, args=(message,), daemon=True) for call in (speak, *self.at_end)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        leave(status)

    def _speak(self, message: str, is_cause: bool) -> None:
        """Prints the message on the first rank that calls it; the others wait until it is printed."""
        try:
            is_first = _ask(lambda: self._store.add(_SPEAKERS, 1) == 1)
        except _NoStoreError:
            self._speak_alone(message, is_cause)
            return
        if is_first:
            claim_to_speak()  # otherwise other ranks of this torchrun would print, once the store has ended
            self._tell(message)
            record(message, is_cause)
        with suppress(RuntimeError, ValueError):
            if is_first:
                self._store.set(_SAID, message.split("\n", 1)[0].removeprefix(self._name))
                return
            self._store.wait([_SAID], timedelta(seconds=_PATIENCE))
            cause = self._store.get(_SAID).decode()
            record(f"rank {self._rank} ended after another one had failed: {cause}", is_cause=False)

    def _speak_alone(self, message: str, is_cause: bool) -> None:
        """Prints the message without the store: on the first rank of each torchrun, and on each that is a cause."""
        record(message, is_cause)
        if is_cause or claim_to_speak():
            self._tell(message)

    def _tell(self, message: str) -> None:
        write_error(message if self.hint is None else f"{message}\n{self.hint}")

    def lost(self, error: PeerLost) -> NoReturn:
        """Ends this rank, which has lost its peers, with the message of the rank that failed first.

        A rank that fails closes its connections, and its neighbours fail in turn; if a rank is stuck, all others time
        out together. So every rank writes its message and the peers that it waited for into the store, gives others a
        moment to do the same, and follows the waits to the last rank that wrote anything. A rank that waited for many
        follows the wait of the first rank that waited for a single one. If torchrun has died, that is the cause.
        """
        message = str(error)
        last_lines.append(message)
        try:
            _ask(partial(self._leave_word, message, error.peers))
            self._end_if_orphaned()
            cause = _ask(self._cause)
        except _NoStoreError as without_store:
            self._end_if_orphaned()
            self.end_alone(f"{message}; {without_store}", FAILED)
        self.end(cause, FAILED, is_cause=False)

    def _leave_word(self, message: str, peers: Sequence[int]) -> None:
        self._store.set(f"{_LOST}/{self._rank}", json.dumps([message, list(peers)]))
        if len(peers) == 1:
            self._store.compare_set(_FIRST, "", str(self._rank))

    def _cause(self) -> str:
        message, is_silent = self._followed(self._rank)
        if not is_silent and self._store.check([_FIRST]):
            other, is_silent = self._followed(int(self._store.get(_FIRST)))
            message = other if is_silent else message
        return message

    def fail(self, error: Exception) -> NoReturn:
        """Ends this rank with the message of an error; like `lost` if it is an error of the store."""
        headline = error_of_a_rank(rank=self._rank, error=error).partition("\n")[0]
        message = "\n".join([headline, *getattr(error, "__notes__", ())])
        if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
            self.lost(PeerLost(message))
        self.end(message, FAILED)

    def _end_if_orphaned(self) -> None:
        if _torchrun_has_died():
            self.end_alone("torchrun has died, and its ranks end", TERMINATED)

    def _followed(self, rank: int) -> tuple[str, bool]:
        """Follows the waits; returns the message of the last rank, and whether it waited for a silent one."""
        message, visited = "", set[int]()
        while self._store.check([f"{_LOST}/{rank}"]):
            visited.add(rank)
            message, peers = json.loads(self._store.get(f"{_LOST}/{rank}"))
            if len(peers) != 1 or peers[0] in visited:
                return message, False
            (rank,) = peers
        return message, True

    def watch_signals(self, size: int) -> None:
        """Starts a thread, as the main one may wait for a message, that at a SIGINT, SIGTERM or SIGHUP ends this rank
        of ``size``, or calls ``at_sigterm``. A SIGHUP that is ignored, as under ``nohup``, stays ignored.
        """
        signals, woken = socket.socketpair()
        woken.setblocking(False)
        is_hung_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if is_hung_up else [])):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        self._sockets = (signals, woken)
        self._store.set(f"faults/process/{self._rank}", json.dumps([_machine(), os.getpid()]))
        threading.Thread(target=self._listen, args=(signals, size), daemon=True, name="signals").start()

    def _listen(self, signals: socket.socket, size: int) -> None:
        while True:
            number = signals.recv(1)[0]
            if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._end_if_interrupted(number)
                self._terminated(size, signal.Signals(number).name)

    def _end_if_interrupted(self, number: int) -> None:
        """Ends this rank at a Ctrl-C; if ``at_sigterm`` is set, at the second one, of which torchrun makes a SIGTERM. A
        signal soon after a SIGINT may belong to the same Ctrl-C: the terminal sends one, and torchrun passes one on.
        """
        now = time.monotonic()
        is_again = self._interrupted is not None and now - self._interrupted > _SAME_CTRL_C
        if is_again or (number == signal.SIGINT and self.at_sigterm is None):
            self.end("interrupted", INTERRUPTED)
        if number == signal.SIGINT and self._interrupted is None:
            self._interrupted = now

    def _terminated(self, size: int, name: str) -> None:
        # torchrun sent it, because a rank died or failed or because it ends itself; or it came from outside.
        try:
            has_spoken, dead = _ask(lambda: (self._store.check([_SPEAKERS]), self._dead(size)))
        except _NoStoreError as error:
            self._end_if_orphaned()
            self.end_alone(f"rank {self._rank}: {name}; {error}", TERMINATED)

        # A rank has died without a message: the ranks that wait for it can say more than this one.
        if dead and not has_spoken and not has_ended():
            self._let_others_speak()
            died = f"rank {dead[0]} has died (torchrun's summary follows)"
            self.end(f"rank {self._rank}: ended by torchrun: {died}", TERMINATED, is_cause=False)
        self._end_if_orphaned()
        if has_spoken:
            ended = f"rank {self._rank}: ended by torchrun after another rank had failed"
            self.end(ended, TERMINATED, is_cause=False)

        # All ranks are well.
        if self.at_sigterm is not None:
            ask_to_stop, self.at_sigterm = self.at_sigterm, lambda _name: None
            try:
                ask_to_stop(name)
            except (RuntimeError, ValueError) as error:
                self.end(f"rank {self._rank}: {name}: {str(error).partition(chr(10))[0]}", TERMINATED)
            return
        outside = f"{name} came to torchrun or to rank {self._rank}, and no rank had failed"
        self.end(f"terminated: {outside}", TERMINATED)

    def _dead(self, size: int) -> list[int]:
        dead = []
        for rank in range(size):
            key = f"faults/process/{rank}"
            machine, process = json.loads(self._store.get(key)) if self._store.check([key]) else ("", 0)
            if machine == _machine() and not _is_alive(process):
                dead.append(rank)
        return dead

    def _let_others_speak(self) -> None:
        deadline = time.monotonic() + _GRACE
        with suppress(RuntimeError, ValueError):
            while time.monotonic() < deadline and not self._store.check([_SAID]):
                time.sleep(_POLL)


def _ask(question: Callable[[], Answer]) -> Answer:
    """Calls torchrun's store in a thread, as the call may never return. Raises `_NoStoreError` if it does not answer in
    time, or has ended.
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
    """Name of this machine, or of the container on it if the container has process numbers of its own."""
    numbering = []
    with suppress(OSError):
        numbering = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join([socket.gethostname(), *numbering])


def _torchrun_has_died() -> bool:
    """Waits a moment for torchrun to end, and for other ranks to write into the store; returns whether it has ended."""
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
        pass  # it is a process of another user
    return True


def leave(status: int) -> NoReturn:
    """Ends the process without waiting for messages that will never come."""
    drop_unwritable()
    os._exit(status)


def claim_to_speak() -> bool:
    """Returns True on the first rank of a torchrun that calls this, by a file next to the directories of the ranks; on
    local rank 0 if that cannot be made.
    """
    rank = os.environ.get("LOCAL_RANK", "0")
    place = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent
    if place.name == rank:
        try:
            os.close(os.open(place.with_name("spoken"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        except OSError:
            return rank == "0"
        return True
    return rank == "0"


def record(message: str, is_cause: bool) -> None:
    """Writes a message as ``torch.distributed.elastic.multiprocessing.errors.record`` writes an exception, if possible.

    torchrun calls the oldest failure the cause, in whole seconds: the time of one that is no cause is rounded up.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    now = time.time()
    details = {"py_callstack": message, "timestamp": str(math.floor(now) if is_cause else math.ceil(now))}
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": message.split("\n", 1)[0], "extraInfo": details}}, file)
