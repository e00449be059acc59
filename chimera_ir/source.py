"""The text that is compiled, places in it, and files that users name."""

import stat
from bisect import bisect_right
from dataclasses import dataclass
from errno import EISDIR
from functools import cached_property
from os import strerror
from pathlib import Path
from typing import NamedTuple

LARGEST = 2**30
"""Bytes of the largest file that is read."""


def contents(path: Path) -> bytes:
    """All of a regular file.

    Raises
    ------
    OSError
        If it cannot be read, has no end or none that is known (a device, a named pipe), or is larger than `LARGEST`;
        ``strerror`` tells.
    """
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(EISDIR, strerror(EISDIR))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(0, "it is no regular file")
    if found.st_size > LARGEST:
        raise OSError(0, f"it is larger than {LARGEST // 2**20:,} MiB")
    return path.read_bytes()


class Span(NamedTuple):
    """Characters ``start`` to ``end`` (exclusive) of the text that is compiled."""

    start: int
    end: int


class Position(NamedTuple):
    """A line and a column, both counted from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Source:
    """A scheme or IR text, and the name by which the user knows it."""

    name: str
    text: str

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for line in self.text.split("\n"):
            starts.append(starts[-1] + len(line) + 1)
        return starts[:-1]

    def position(self, offset: int) -> Position:
        """The line and column of a character; the end of the text for an offset beyond it."""
        offset = min(max(offset, 0), len(self.text))
        line = bisect_right(self._starts, offset)
        return Position(line, offset - self._starts[line - 1] + 1)

    def offset(self, line: int, column: int) -> int:
        """The character at a line and a column, both counted from 1, or the last one before."""
        start = self._starts[min(line, len(self._starts)) - 1]
        return min(start + column - 1, len(self.text))

    def line(self, number: int) -> str:
        """The text of a line, counted from 1, without its end."""
        start = self._starts[number - 1]
        end = self._starts[number] - 1 if number < len(self._starts) else len(self.text)
        return self.text[start:end].rstrip("\r")
