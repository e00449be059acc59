"""Standard output and standard error of a rank, either of which may be closed, full, or without a reader.

All ranks write to the same terminal, so a line and its end are written at once. On a terminal a line replaces the text
that `show_line` has put there, on whatever rank.
"""

import errno
import os
import shutil
import signal
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from chimera_runtime.errors import TERMINATED, visible
from chimera_runtime.errors import tools as mistakes
from chimera_runtime.errors.tools import stdout_cannot_be_written
from chimera_runtime.ranks.parent_death import signal_when_parent_ends
from chimera_runtime.values import files

# Files that are complete at every moment, and files that one job at a time writes.

_JOB = "chimera/job"
"""Key in the store: a number of the job that no other has."""

_PATIENCE = 1.0
"""Seconds to wait for the number of a job that has just locked a file."""


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file by a complete new one, or leaves it as it is."""
    with files.replacing(path) as fresh:
        fresh.write_bytes(content)


@contextmanager
def unwritable_errors(
    option: str, path: Path, refused: Callable[..., Exception] = mistakes.file_cannot_be_written
) -> Iterator[None]:
    """Turns an `OSError` inside into an error that ``option`` cannot write its ``path``, by default `Unwritable`."""
    try:
        yield
    except OSError as error:
        raise refused(option=option, path=path, why=error.strerror) from error


def reserve(option: str, path: Path, store: Any) -> Path | None:
    """Reserves a file for this job, by a lock on ``.NAME.lock`` beside it, which is returned; None if no regular file
    can be written there, which whoever writes says. Raises `Misuse` if another job has reserved it.
    """
    target = Path(os.path.realpath(path))
    lock = target.with_name(f".{target.name}.lock")
    with suppress(OSError):
        if not target.exists() or target.is_file():
            if not locked(lock, store):
                raise mistakes.directory_cannot_be_written(
                    option=option, path=path, why=mistakes.FILE_IS_OF_ANOTHER_RUN
                )
            return lock
    return None


def release(locks: Iterable[Path | None]) -> None:
    """Removes the files by which this job has reserved others; those of a job that is killed stay, without a lock."""
    for lock in locks:
        if lock is not None:
            with suppress(OSError):
                lock.unlink(missing_ok=True)


def locked(path: Path, store: Any) -> bool:
    """Locks a file, made if there is none, until the process ends; False if another job has locked it. Several ranks of
    a job may: the file has the number of the job, which its ``store`` keeps.
    """
    job: bytes = store.compare_set(_JOB, "", uuid.uuid4().hex)
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not files.lock(handle):
                holder = _content(handle)
                os.close(handle)
                return holder == job
        except OSError:
            return True  # a file system without locks refuses nobody
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                os.ftruncate(handle, 0)
                os.pwrite(handle, job, 0)
                return True
        os.close(handle)  # its former holder has just removed it


def _content(handle: int) -> bytes:
    deadline = time.monotonic() + _PATIENCE
    while not (content := os.pread(handle, 64, 0)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return content


# torchrun as the parent of this process: if it is killed, its ranks end as well.

_PARENT = os.getppid()
"""Number of the parent when the package was imported, before torch."""
_IS_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ


def end_with_parent() -> None:
    """Asks the kernel to send this process a SIGTERM when torchrun ends; on Linux, if torchrun has started it."""
    if _IS_TORCHRUN and signal_when_parent_ends(signal.SIGTERM) and has_ended():
        os._exit(TERMINATED)


def has_ended() -> bool:
    """Whether the torchrun that started this process is gone, or is ending; False if it was started otherwise."""
    return _IS_TORCHRUN and (os.getppid() != _PARENT or _is_zombie(_PARENT))


def _is_zombie(process: int) -> bool:
    """Whether the main thread of a process has ended, by /proc; its other threads may run on for a moment."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


_CLEARED = "\r\x1b[K"
"""Moves to the beginning of the line and clears it, in codes of ECMA-48, which terminals of today understand."""

last_lines: deque[str] = deque(maxlen=100)
"""The last lines that this rank has written, for a bug report."""


def open_closed() -> None:
    """Opens closed standard streams to /dev/null: otherwise a connection would get their number, and their text."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def write_line(text: str) -> None:
    """Writes a line to standard output, where the reader of a pipe may have left. Raises `Unwritable` if it cannot be
    written.
    """
    text = visible(text)
    last_lines.append(text)
    _put(f"{text}\n")


def show_line(text: str) -> None:
    """Puts a text on the last line of the terminal, in place of the one before, as much as fits; errors as in
    `write_line`.
    """
    _put(visible(text)[: shutil.get_terminal_size().columns - 1])


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal that can clear a line."""
    return stream is not None and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def write_error(text: str) -> None:
    """Writes a line to standard error, if that is possible; if not, the exit status still reports the failure."""
    text = visible(text)
    last_lines.append(text)
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            _write(sys.stderr, f"{text}\n")


def _put(text: str) -> None:
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        _write(sys.stdout, text)
    except BrokenPipeError:
        drop_unwritable()
    except OSError as error:
        drop_unwritable()
        raise stdout_cannot_be_written(why=error.strerror) from error


def _write(stream: TextIO, text: str) -> None:
    """Writes a text at once; ``print`` would not if Python is unbuffered, as torchrun starts it."""
    stream.write(f"{_CLEARED}{text}" if is_terminal(stream) else text)
    stream.flush()


def drop_unwritable() -> None:
    """Drops buffered text that cannot be written, so that the interpreter does not fail over it at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
