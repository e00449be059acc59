"""Several timelines on one sheet, all on the same scale, so that lengths can be compared between them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, count
from typing import NamedTuple

from chimera_ir.cost.simulate import Timeline
from chimera_ir.picture import svg
from chimera_ir.picture.shapes import Picture
from chimera_ir.picture.words import INK, PAPER

WIDTH = 1240
"""The width in pixels that the charts of a row are drawn to, side by side."""

_GAP = 24
_HEAD = 30


@dataclass(frozen=True, slots=True)
class Panel:
    """A timeline, what it shows, and up to which time it is shown, in the unit of the costs."""

    caption: str
    timeline: Timeline
    until: Fraction

    @property
    def shown(self) -> Fraction:
        """The time that is shown: all of it, or its beginning."""
        return min(self.timeline.shown, self.until)


@dataclass(frozen=True, slots=True)
class Drawing:
    """An SVG document within another one: the template writes it as it is."""

    document: str

    def __html__(self) -> str:
        return self.document


@dataclass(frozen=True, slots=True)
class Placed:
    """A panel's place in pixels, and its drawing, of which so much is seen from the left."""

    x: int
    y: int
    width: int
    height: int
    left: int
    baseline: int
    head: int
    caption: str
    drawing: Drawing


@dataclass(frozen=True, slots=True)
class Sheet:
    """Everything that the template writes, in pixels."""

    title: str
    width: int
    height: int
    ink: str
    paper: str
    panels: tuple[Placed, ...]


def draw(title: str, rows: Sequence[Sequence[Panel]]) -> str:
    """The panels, row by row, as one self-contained SVG document; the panels of a column share their left edge."""
    unit = _common_unit(rows)
    numbers = count(1)
    cells = [
        [_Cell(panel, svg.picture(panel.timeline, unit, f"bubble-{next(numbers)}")) for panel in row] for row in rows
    ]
    lefts = _offsets(_columns(cells))
    tops = _offsets(_HEAD + max(cell.picture.height for cell in row) for row in cells)
    placed = tuple(
        _placed(cell, x, y) for row, y in zip(cells, tops, strict=False) for cell, x in zip(row, lefts, strict=False)
    )
    width = max(each.x + each.width for each in placed)
    sheet = Sheet(title, width, tops[-1] - _GAP, INK, PAPER, placed)
    return svg.written("sheet.svg.j2", sheet=sheet)


class _Cell(NamedTuple):
    """A panel with its drawing."""

    panel: Panel
    picture: Picture

    @property
    def width(self) -> int:
        """What is seen of the drawing, in pixels: the time shown and, if that is all of it, the margin."""
        cut = self.panel.timeline.shown - self.panel.shown
        chart = Fraction(self.picture.chart) / self.panel.timeline.shown
        return int(self.picture.left + self.panel.shown * chart) if cut else self.picture.width


def _common_unit(rows: Sequence[Sequence[Panel]]) -> Fraction:
    """Pixels for a unit of time: what the panel with the shortest operations finds fair, and no row too long."""
    fair = max(svg.fair_unit(panel.timeline) for panel in chain.from_iterable(rows))
    longest = max(sum((panel.shown for panel in row), Fraction(0)) for row in rows)
    return min(fair, WIDTH / longest)


def _columns(cells: Sequence[Sequence[_Cell]]) -> Iterator[int]:
    """How wide each column is for the next one to clear it; the last in a row may be as wide as it likes."""
    for column in range(max(map(len, cells))):
        yield max((row[column].width for row in cells if column + 1 < len(row)), default=0)


def _offsets(lengths: Iterable[int]) -> list[int]:
    """Where things of these lengths begin that follow each other with a gap; at last, where a further one would."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length + _GAP)
    return offsets


def _placed(cell: _Cell, x: int, y: int) -> Placed:
    panel, picture = cell
    drawing = Drawing(svg.written("timeline.svg.j2", picture=picture))
    return Placed(x, y, cell.width, picture.height, picture.left, _HEAD - 10, _HEAD, panel.caption, drawing)
