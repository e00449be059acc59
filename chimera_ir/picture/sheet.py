"""Several timelines on one sheet and on one scale, so that their lengths can be compared."""

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, chain, count
from typing import NamedTuple

from chimera_ir.cost.simulate import Timeline
from chimera_ir.picture import svg
from chimera_ir.picture.chart import LEFT, Picture, filled
from chimera_ir.picture.svg import Inlined

WIDTH = 1240
"""The width in pixels of the charts of a row, side by side."""

_GAP = 24
_HEAD = 30


class Panel(NamedTuple):
    """A timeline and its caption."""

    caption: str
    timeline: Timeline


def draw(title: str, rows: Sequence[Sequence[Panel]]) -> str:
    """The panels, row by row, as one self-contained SVG document; the panels of a column share their left edge."""
    unit = _common_unit(rows)
    numbers = count(1)
    pictures = [[svg.picture(panel.timeline, unit, f"bubble-{next(numbers)}") for panel in row] for row in rows]
    lefts = _offsets(_columns(pictures))
    tops = _offsets(_HEAD + max(picture.chart.height for picture in row) for row in pictures)
    placed = tuple(
        (x, y, panel.caption, Inlined(svg.filled(picture)))
        for row, shown, y in zip(rows, pictures, tops, strict=False)
        for panel, picture, x in zip(row, shown, lefts, strict=False)
    )
    width = max(x + picture.chart.width for row in pictures for picture, x in zip(row, lefts, strict=False))
    height = tops[-1] - _GAP
    return filled("sheet.svg.j2", title=title, width=width, height=height, left=LEFT, head=_HEAD, panels=placed)


def of_order(timeline: Timeline, before: Timeline | None) -> str:
    """Draws the timeline of an order, above that of the order that its search began with, if any, on one scale."""
    if before is None:
        return svg.draw(timeline)
    title, other = timeline.header.title, before.header.title
    return draw(title, [[Panel("found", timeline)], [Panel("before" if other == title else other, before)]])


def _common_unit(rows: Sequence[Sequence[Panel]]) -> Fraction:
    """Pixels for a unit of time: enough for the shortest operations, unless the longest row is then too wide."""
    fair = max(svg.fair_unit(panel.timeline) for panel in chain.from_iterable(rows))
    longest = max(sum((panel.timeline.shown for panel in row), Fraction(0)) for row in rows)
    return min(fair, WIDTH / longest)


def _columns(pictures: Sequence[Sequence[Picture]]) -> Iterator[int]:
    """The width of each column; the last picture of a row does not count, because nothing stands on its right."""
    for column in range(max(map(len, pictures))):
        yield max((row[column].chart.width for row in pictures if column + 1 < len(row)), default=0)


def _offsets(lengths: Iterable[int]) -> list[int]:
    return list(accumulate((length + _GAP for length in lengths), initial=0))
