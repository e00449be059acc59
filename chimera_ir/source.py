"""The text that is compiled, and places in it."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


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
