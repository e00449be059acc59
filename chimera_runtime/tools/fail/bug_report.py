"""``--bundle FILE``: a zip file for a bug report, written when a run fails.

Every rank adds its messages, the places of its threads, and where it was in its lane; the first rank also adds the
program and the versions.
"""

import fcntl
import json
import os
import platform
import socket
import sys
import threading
import time
import traceback
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from chimera_runtime.blame import place_of_error, place_of_thread
from chimera_runtime.errors import PeerLost, PlacedError, ScriptPlace, visible
from chimera_runtime.errors import tools as mistakes
from chimera_runtime.errors.ranks import NO_ANSWER
from chimera_runtime.program.job import Place
from chimera_runtime.tools.open.stdio import last_lines, write_error

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


class RaisedError(NamedTuple):
    """An error that ends a rank: the place in its script, the ranks that it waited for, and the message.

    ``seconds`` says how long it waited; it is None if that is not known.
    """

    place: ScriptPlace | None
    peers: Sequence[int]
    seconds: float | None
    message: str


class BugReport:
    """Writes this rank's part of the zip file.

    Raises `Misuse` if there is another file of that name, which ``--bundle`` has not written. Raises `Unwritable` if
    the file cannot be written.
    """

    def __init__(self, options: Namespace, directory: Path, rank: int) -> None:
        self._path: Path = options.bundle.resolve()
        self._directory = directory
        self._rank = rank
        self._place: Place | None = None
        self._raised: RaisedError | None = None
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
        try:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                _clear(self._path)
        except OSError as error:
            raise mistakes.file_cannot_be_written("--bundle", options.bundle, error.strerror) from error

    @contextmanager
    def noting(self, place: Place, timeout: float) -> Iterator[None]:
        """Context of a run on the rank at ``place``: notes where an error inside was raised.

        ``timeout`` is that of waits, in seconds.
        """
        self._place = place
        try:
            yield
        except BaseException as error:
            self._raised = _account_of(error, timeout)
            raise

    def add(self, message: str) -> None:
        """Adds the last message of this rank, the lines before it, and the places of its threads.

        Call it in a thread: it waits for other ranks of the machine that write. A failure is printed and stops nothing.
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
        """Returns this rank's entry in the report: the line of its script where it stopped, and its wait.

        Outside of an update there is no line.
        """
        raised = self._raised or RaisedError(_place_of_main_thread(), (), None, message)
        script = raised.place
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
            "waits_for": [*raised.peers],
            "seconds": raised.seconds,
            "message": raised.message.split("\n", 1)[0][:_MESSAGE],
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


def _account_of(error: BaseException, timeout: float) -> RaisedError:
    """Reads what an error says. If it says that a wait timed out, the wait took ``timeout`` seconds."""
    place = error.place if isinstance(error, PlacedError) else None
    is_late = isinstance(error, PeerLost) and NO_ANSWER in str(error)
    return RaisedError(
        place or place_of_error(error.__traceback__),
        error.peers if isinstance(error, PeerLost) else (),
        timeout if is_late else None,
        str(error) or type(error).__name__,
    )


def _place_of_main_thread() -> ScriptPlace | None:
    """Returns the place in the script of the main thread, which runs on meanwhile; None if reading it fails."""
    try:
        return place_of_thread(sys._current_frames().get(threading.main_thread().ident or 0))
    except Exception:
        return None


def _stack(frame: FrameType) -> str:
    """Returns the stack of a thread. The thread runs on, and may change what is read here, so this can fail."""
    try:
        return "".join(traceback.format_stack(frame)).rstrip()
    except Exception as error:
        return f"(cannot be told: {error!r})"


def _clear(path: Path) -> None:
    """Removes the file of an earlier run, and checks that a new one can be written."""
    if path.exists() and not _is_bundle(path):
        raise mistakes.path_is_yours("--bundle", path, "name")
    path.touch()
    path.unlink()


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
    """Describes the GPU of this rank or, if none is used, the processor."""
    count = torch.cuda.device_count()
    if count and (options.device == "cuda" or (options.device is None and options.backend != "gloo")):
        local = int(os.environ.get("LOCAL_RANK", "0")) % count
        return f"{count} GPUs, {torch.cuda.get_device_name(local)}"
    return f"{os.cpu_count()} processors, {platform.machine()}"
