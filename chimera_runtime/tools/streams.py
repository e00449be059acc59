"""Standard output and standard error of a rank, either of which may be closed, full, or without a reader.

A line is one write, its end included, since all ranks write to the same terminal.
"""

import errno
import os
import sys
from contextlib import suppress
from typing import TextIO


class Unwritable(Exception):
    """Something that was asked for cannot be written; the message says what and why."""


def open_closed() -> None:
    """Opens standard streams that are closed, to nowhere: or a connection would get their number, and their text."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def say(text: str) -> None:
    """Writes a line to standard output. A reader who has left has seen enough.

    Raises
    ------
    Unwritable
        If it is closed, or cannot be written for another reason.
    """
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        _write(sys.stdout, text)
    except BrokenPipeError:
        let_go()
    except OSError as error:
        let_go()
        raise Unwritable(f"standard output: {error.strerror}") from error


def tell(text: str) -> None:
    """Writes a line to standard error, if that is possible: an exit status is left in any case."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            _write(sys.stderr, text)


def _write(stream: TextIO, line: str) -> None:
    """In one write, which ``print`` does not do where Python is unbuffered, as torchrun starts it."""
    stream.write(f"{line}\n")
    stream.flush()


def let_go() -> None:
    """Drops what cannot be written, so that the interpreter does not fail over it when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
