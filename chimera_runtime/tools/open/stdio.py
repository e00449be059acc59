"""Standard output and standard error of a rank, either of which may be closed, full, or without a reader.

All ranks write to the same terminal, so a line and its end are written at once. On a terminal a line replaces the text
that `show_line` has put there, on whatever rank.
"""

import errno
import os
import shutil
import sys
from collections import deque
from contextlib import suppress
from typing import TextIO

from chimera_runtime.errors import visible
from chimera_runtime.errors.tools import stdout_cannot_be_written

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
    """Writes a line to standard output. It is no error if the reader of a pipe has left.

    Raises `Unwritable` if standard output is closed, or cannot be written for another reason.
    """
    text = visible(text)
    last_lines.append(text)
    _put(f"{text}\n")


def show_line(text: str) -> None:
    """Puts a text on the last line of the terminal, as much as fits, in place of the one before.

    For texts that are soon out of date, if standard output `is_terminal`. Errors as in `write_line`.
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
        raise stdout_cannot_be_written(error.strerror) from error


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
