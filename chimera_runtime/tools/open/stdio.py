"""Standard output and standard error of a rank, either of which may be closed, full, or without a reader.

A line is one write, its end included, since all ranks write to the same terminal. There a line takes the place of what
`show_line` has put on it, by whatever rank.
"""

import errno
import os
import shutil
import sys
from collections import deque
from contextlib import suppress
from typing import TextIO

from chimera_runtime.errors import Unwritable

_CLEARED = "\r\x1b[K"
"""To the begin of the line, and to its end all gone: ECMA-48, which every terminal of today knows."""

last_lines: deque[str] = deque(maxlen=100)
"""What this rank has said and told, for a bug report."""


def open_closed() -> None:
    """Opens standard streams that are closed, to nowhere: or a connection would get their number, and their text."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def write_line(text: str) -> None:
    """Writes a line to standard output. A reader who has left has seen enough.

    Raises
    ------
    Unwritable
        If it is closed, or cannot be written for another reason.
    """
    last_lines.append(text)
    _put(f"{text}\n")


def show_line(text: str) -> None:
    """Puts a text on the last line of the terminal, as much as fits, in place of the one before.

    It is for what is out of date soon: standard output is a terminal, see `is_terminal`.
    """
    _put(text[: shutil.get_terminal_size().columns - 1])


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal that can clear a line."""
    return stream is not None and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def write_error(text: str) -> None:
    """Writes a line to standard error, if that is possible: an exit status is left in any case."""
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
        raise Unwritable(f"standard output: {error.strerror}") from error


def _write(stream: TextIO, text: str) -> None:
    """In one write, which ``print`` does not do where Python is unbuffered, as torchrun starts it."""
    stream.write(f"{_CLEARED}{text}" if is_terminal(stream) else text)
    stream.flush()


def drop_unwritable() -> None:
    """Drops what cannot be written, so that the interpreter does not fail over it when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
