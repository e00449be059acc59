"""The legend of a picture: the meaning of its colours, letters and signs.

Micro-batches of one hue are a strand: those of a pipe or, without a flush, of its even or odd updates.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from chimera_ir.ir.kinds import KINDS, Kind
from chimera_ir.ir.ops import Operation, singles
from chimera_ir.picture.looks import ColourGroup, Looks, Shade
from chimera_ir.picture.shapes import Entry, Swatch
from chimera_ir.picture.words import ink, plain, strands

SWATCHES = 4
"""The most chunks (stages of a pipe on one worker) that a legend shows: the first ones and the last one."""

_SWATCH, _SIGN, _GAP = 22, 48, 20
"""Pixels from a swatch to the next one, from a sign to its name, and from a name to the next entry."""


class _EntryText(NamedTuple):
    """The words of a legend entry, behind a space of ``indent`` pixels for a sign or for swatches (samples of colours).

    An entry with ``chunks`` has swatches: the colours that these chunks have in the strand with the number ``strand``.
    """

    words: str
    indent: int
    strand: int = 0
    chunks: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return self.indent + 8 * len(self.words) + _GAP


def legend(looks: Looks, kinds: Sequence[Kind], names: Iterable[str], left: int, width: int, y: int) -> Iterator[Entry]:
    """Yields the entries of a legend: strands with a swatch for each kind, the meaning of letters, and ``names``.

    The first row begins at ``left`` and ``y``, in pixels; an entry that would pass ``width`` begins the next row.
    Before each of ``names`` is space for a sign, which the template draws.
    """
    x = left
    for line in [*_lines(looks, kinds), *(_EntryText(plain(name), _SIGN) for name in names)]:
        if x > left and x + line.length > width:
            x, y = left, y + 24
        yield Entry(x, y, tuple(_swatches(looks, kinds, line, x)), x + line.indent, line.words)
        x += line.length


def kinds_of(operations: Iterable[Operation]) -> list[Kind]:
    """The kinds of operations that a legend has swatches for, in the order of the table."""
    present = {operation.kind.letter for operation in singles(operations)}
    return [kind for letter, kind in KINDS.items() if letter in present]


def signs(looks: Looks, kinds: Sequence[Kind]) -> list[str]:
    """Explains the letters of chunks, if there are any, and those of kinds, if there are more than two kinds."""
    names = ", ".join(f"{kind.letter[0]} {kind.noun}" for kind in kinds) if len(kinds) > 2 else ""
    return [sign for sign in (looks.sign, names) if sign]


def least(looks: Looks, kinds: Sequence[Kind]) -> int:
    """The least width of a legend in pixels: that of its widest entry; 0 if no worker has several stages of a pipe."""
    return max((line.length for line in _lines(looks, kinds)), default=0) if looks.chunks > 1 else 0


def chunks_shown(looks: Looks) -> tuple[int, ...]:
    """The chunks of a strand that a legend shows."""
    return tuple(range(looks.chunks)) if looks.chunks <= SWATCHES else (*range(SWATCHES - 1), looks.chunks - 1)


def _lines(looks: Looks, kinds: Sequence[Kind]) -> Iterator[_EntryText]:
    chunks = chunks_shown(looks)
    indent = _SWATCH * len(kinds) * len(chunks) + 4
    for number, strand in enumerate(strands(looks.header)):
        if strand.micros:
            yield _EntryText(plain(strand.name), indent, number, chunks)
    yield from (_EntryText(sign, 0) for sign in signs(looks, kinds))


def _swatches(looks: Looks, kinds: Sequence[Kind], line: _EntryText, x: int) -> Iterator[Swatch]:
    for place, (chunk, kind) in enumerate(product(line.chunks, kinds)):
        fill = looks.fill(ColourGroup(line.strand, chunk, Shade.of(kind)))
        yield Swatch(x + _SWATCH * place, fill, ink(kind), kind.letter[0] + looks.letter(chunk))
