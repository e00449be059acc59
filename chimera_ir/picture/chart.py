"""The chart that pictures of lanes have in common: its scale, the boxes of operations, the axis and the legend.

All places are computed here and in the modules of the pictures; ``templates/chart.svg.j2`` and the templates that
extend it only write them down.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from chimera_ir.escapes import visible_lines
from chimera_ir.ir.ops import Compute, Operation, Pair
from chimera_ir.picture.legend import kinds_of, least, legend
from chimera_ir.picture.looks import ColourGroup, Looks, Row
from chimera_ir.picture.patterns import LIGHT_GROUND, Pattern
from chimera_ir.picture.shapes import Box, Chart, Family, Label, LaneRow, Tick
from chimera_ir.picture.words import INK, PAPER, STEP, ink, step
from chimera_ir.resources import templates

LEGIBLE = 8
"""The smallest font size of a label."""

LEFT, TOP = 46, 62
"""The place of the first lane, in pixels."""

RISE = Fraction(36, 100)
"""Distance from the baseline of digits to their middle, as a share of the font size."""

_GLYPH = Fraction(62, 100)
"""The width of a character as a share of the font size: that of digits in a wide sans-serif font."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of a picture: pixels per unit of time, such as a tick or a second, and the heights that lanes share.

    ``row`` is the height in pixels of a worker's lane, ``strip`` of the strip below it, ``gap`` of the space before the
    next worker's lane; ``font`` is the size of labels. Lanes begin at ``left``.
    """

    pixel: Fraction
    row: int
    gap: int
    font: int
    strip: int = 0
    left: int = LEFT

    def x(self, time: float | Fraction) -> Fraction:
        """The horizontal place of a time."""
        numerator, denominator = time.as_integer_ratio()
        per_pixel = self.pixel.denominator * denominator
        return Fraction(self.left * per_pixel + self.pixel.numerator * numerator, per_pixel)

    def y(self, worker: int) -> int:
        """The upper edge of a worker's lane."""
        return TOP + worker * (self.row + self.strip + self.gap)

    def lane_row(self, name: str, y: int, start: float, end: float) -> LaneRow:
        """The row of a lane with its upper edge at ``y``, and behind it a stripe of idle time, ``start`` to ``end``."""
        left, right = self.x(start), self.x(end)
        baseline = pixels(y + Fraction(self.row, 2) + self.font * RISE)
        return LaneRow(name, baseline, pixels(left), y, pixels(right - left))

    def ticks(self, span: float, factor: Fraction | int, unit: str) -> Iterator[Tick]:
        """Yields marks at round times from 0 to ``span``, with labels in ``unit``.

        ``span`` is in the scale's unit of time, which is ``factor`` times as long as ``unit``.
        """
        distance = step(80 * factor / self.pixel)
        for number in range(int(Fraction(span) * factor / distance) + 1):
            time = number * distance
            text = f"{float(time):.10g}" + ("" if number or not unit else f" {unit}")
            yield Tick(pixels(self.x(time / factor)), text)

    def box(self, start: float, end: float, y: int, height: int, title: str) -> Box:
        """The box of the time from ``start`` to ``end``; ``title`` is shown when one points at it."""
        left, right = self.x(start), self.x(end)
        return Box(pixels(left), y, pixels(right - left), height, title)

    def outline(self, start: float, end: float, y: int, height: int) -> str:
        """The rectangle of the time from ``start`` to ``end``, as a part of an SVG path."""
        left, right = pixels(self.x(start)), pixels(self.x(end))
        return f"M{left} {y}H{right}v{height}H{left}z"

    def label(self, start: float, end: float, y: int, height: int, font: int, text: str) -> Label:
        """A text in the middle of the rectangle of the time from ``start`` to ``end``."""
        middle = (self.x(start) + self.x(end)) / 2
        return Label(pixels(middle), pixels(y + Fraction(height, 2) + font * RISE), text)


class PlacedOperation(NamedTuple):
    """A compute operation with the upper edge of its lane, and its times.

    ``row`` is the part of the lane's height that it takes, ``title`` the text that is shown when one points at it.
    """

    y: int
    start: float
    end: float
    operation: Compute
    row: Row
    title: str

    def area(self, scale: Scale) -> tuple[float, float, int, int]:
        """The start and the end of the operation's box as times, and its upper edge and its height in pixels."""
        return self.start, self.end, *self.row.within(self.y, scale.row)


def room(text: str, font: int) -> Fraction:
    """The width in pixels that a label needs in its box, in a font of this size."""
    return len(text) * font * _GLYPH + 3


def families(
    operations: Iterable[PlacedOperation],
    looks: Looks,
    scale: Scale,
    with_room: Callable[[Sequence[PlacedOperation], int], Iterable[PlacedOperation]],
) -> Iterator[Family]:
    """Groups operations into families, so that a picture names each colour once; yields the families.

    A family has the operations of one colour that take the same part of a lane's height. Operations with titles are
    drawn as boxes, operations without as one outline. ``with_room`` gets the operations of a family and a font size,
    and returns those that have room for their labels.
    """
    members: dict[tuple[ColourGroup, Row], list[PlacedOperation]] = {}
    for placed in operations:
        members.setdefault((looks.group(placed.operation), placed.row), []).append(placed)
    for (group, row), several in sorted(members.items(), key=lambda member: member[0]):
        font = row.font(scale.font, scale.row)
        labelled = with_room(several, font) if font >= LEGIBLE else ()
        yield Family(
            fill=looks.fill(group),
            ink=ink(several[0].operation.kind),
            font=font,
            boxes=tuple(scale.box(*placed.area(scale), placed.title) for placed in several if placed.title),
            outline="".join(scale.outline(*placed.area(scale)) for placed in several if not placed.title),
            labels=tuple(scale.label(*placed.area(scale), font, looks.label(placed.operation)) for placed in labelled),
        )


def chart(
    looks: Looks,
    operations: Sequence[Operation],
    scale: Scale,
    *,
    heading: str,
    summary: str,
    rows: Iterable[LaneRow],
    families: Iterable[Family],
    ticks: Iterable[Tick],
    signs: Mapping[str, str],
    patterns: Mapping[str, Pattern],
    span: float,
    end: Fraction | None = None,
    margin: int = 60,
    below: int = 0,
    stroke: str | None = None,
) -> Chart:
    """The chart of ``rows``, with a time axis and a legend for the colours of ``operations``.

    ``signs`` are the signs, apart from colours, that the picture uses: the name that the template has for each, and its
    meaning. ``patterns`` are the patterns by name, the one of bubbles first; two pictures in one document need
    different names. The time axis reaches from 0 to ``span``. ``end`` is the right edge of the last box in pixels, if
    boxes do not end with the axis. ``margin`` pixels are free on the right of lanes, heading and legend; ``below``
    pixels are free between axis and legend, for drawings of the picture's own. ``stroke`` is the width of the borders
    of boxes; by default it depends on the height of the lanes.
    """
    kinds, right, rows = kinds_of(operations), scale.x(span), tuple(rows)
    bottom = max(scale.y(looks.header.workers) - scale.gap, *(lane.y + scale.row for lane in rows))
    words = scale.left + max(10 * len(heading), 7 * len(summary), least(looks, kinds))
    width = max(int(right if end is None else end), words) + margin
    pairs = ["one above the other: a pair"] if any(isinstance(operation, Pair) for operation in operations) else []
    entries = [*legend(looks, kinds, [*pairs, *signs.values()], scale.left, width, bottom + 44 + below)]
    return Chart(
        width=width,
        height=entries[-1].y + 28,
        left=scale.left,
        right=pixels(right),
        bottom=bottom,
        row=scale.row,
        stroke=stroke or ("1" if scale.row > 16 else "0.5"),
        hatch=next(iter(patterns)),
        patterns=patterns,
        heading=heading,
        summary=summary,
        rows=rows,
        ticks=tuple(ticks),
        families=tuple(families),
        legend=tuple(entries[: -len(signs)]),
        signs=dict(zip(signs, entries[-len(signs) :], strict=True)),
    )


def filled(template: str, **values: object) -> str:
    """A template filled with values and common colours; texts are escaped, also characters that XML does not allow."""
    return (
        _environment(templates())
        .get_template(template)
        .render(values, ink=INK, paper=PAPER, step=STEP, light_ground=LIGHT_GROUND)
    )


@cache
def _environment(folder: Path) -> Environment:
    """The environment that renders the templates of a folder; a template is compiled again when its file changes."""
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        finalize=lambda value: visible_lines(value) if isinstance(value, str) else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def pixels(value: Fraction | float) -> str:
    """A length to a hundredth of a pixel, without superfluous zeros; half a hundredth goes to the even digit."""
    # In integers, as a large picture has ten thousands of lengths, and fractions are slow.
    numerator, denominator = value.as_integer_ratio()
    hundredths, rest = divmod(100 * numerator, denominator)
    hundredths += 2 * rest > denominator or (2 * rest == denominator and hundredths % 2)
    return f"{hundredths / 100:.2f}".rstrip("0").rstrip(".")
