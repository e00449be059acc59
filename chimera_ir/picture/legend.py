"""The legend of a picture: the meaning of its colours, letters and signs."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from chimera_ir.ir.ops import Operation, Pair, singles
from chimera_ir.picture.looks import Looks, Shade
from chimera_ir.picture.shapes import Entry, Swatch
from chimera_ir.picture.words import plain, strands

SWATCHES = 4
"""The most chunks of a strand that a legend shows: the first ones and the last one."""

_PAIR, _SIGN, _GAP = 44, 48, 20
"""Pixels from a pair of swatches to the next pair, from a sign to its name, and from a name to the next entry."""


class _Line(NamedTuple):
    """The words of an entry, and the pixels before them: room for a sign, or for the colours of chunks."""

    words: str
    indent: int
    strand: int = 0
    chunks: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return self.indent + 8 * len(self.words) + _GAP


def legend(looks: Looks, names: Iterable[str], left: int, width: int, y: int) -> Iterator[Entry]:
    """Entries for each strand in use, for the letters of chunks if there are any, and for each name.

    The entries continue in a new row where the width is used up; a name has room for a sign before it.
    """
    x = left
    for line in [*_lines(looks), *(_Line(plain(name), _SIGN) for name in names)]:
        if x > left and x + line.length > width:
            x, y = left, y + 24
        yield Entry(x, y, tuple(_swatches(looks, line, x)), x + line.indent, line.words)
        x += line.length


def between(operations: Iterable[Operation]) -> list[str]:
    """Names for a legend that explain the shade between light and dark, and pairs, if any operation has it."""
    listed = list(operations)
    kinds = dict.fromkeys(operation.kind for operation in singles(listed))
    shades = [f"shade between: {kind.noun}" for kind in kinds if Shade.of(kind) is Shade.MIDDLE]
    return [*shades, *(["one above the other: a pair"] if any(isinstance(o, Pair) for o in listed) else [])]


def least(looks: Looks) -> int:
    """The width in pixels of the widest entry about chunks; 0 if no worker has two stages of a pipe."""
    return max((line.length for line in _lines(looks)), default=0) if looks.chunks > 1 else 0


def chunks_shown(looks: Looks) -> tuple[int, ...]:
    """The chunks of a strand that a legend shows."""
    return tuple(range(looks.chunks)) if looks.chunks <= SWATCHES else (*range(SWATCHES - 1), looks.chunks - 1)


def _lines(looks: Looks) -> Iterator[_Line]:
    chunks = chunks_shown(looks)
    for number, strand in enumerate(strands(looks.header)):
        if strand.micros:
            yield _Line(plain(strand.name), _SIGN + _PAIR * (len(chunks) - 1), number, chunks)
    if looks.sign:
        yield _Line(looks.sign, 0)


def _swatches(looks: Looks, line: _Line, x: int) -> Iterator[Swatch]:
    for place, chunk in enumerate(line.chunks):
        hue = looks.hues[line.strand, chunk]
        yield Swatch(x + _PAIR * place, hue.light, hue.dark, looks.letter(chunk))
