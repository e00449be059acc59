"""The chart that pictures of lanes have in common: its scale, the boxes of operations, the axis and the legend.

All places are computed here and in the modules of the pictures; ``templates/chart.svg.j2`` and the templates that
extend it only write them down.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from chimera_ir.ir.kinds import Kind
from chimera_ir.ir.ops import Compute, Operation, Pair
from chimera_ir.picture.looks import (
    INK,
    PAPER,
    Axis,
    ColourGroup,
    ColourSample,
    Looks,
    Row,
    ink,
    kinds_of,
    plain,
    strands,
)
from chimera_ir.source import templates
from chimera_ir.templates import markup

# Patterns that fill the time in which a worker waits, the same in every picture: lines on the picture's background.
#
# The colour of the lines differs from the colours of forwards, of the background and of the other patterns by at least
# 20 in Lab, also as seen with the three kinds of colour blindness (``tests/unit/test_patterns.py``).


class Pattern(NamedTuple):
    """A square tile of ``size`` pixels: an SVG path, its line ``width`` pixels wide, in colour ``mark`` or ``dark``."""

    size: int
    path: str
    width: float
    mark: str
    dark: str


LIGHT_GROUND, DARK_GROUND = "#f6f6f6", "#181a1f"
"""The colours between the lines, in light and in dark pictures."""

BUBBLE = Pattern(7, "M-1 1L1 -1M0 7L7 0M6 8L8 6", 0.7, "#555555", "#5a6969")
MESSAGE = Pattern(5, "M1.5 0V5", 2, "#4400bb", "#5a69f0")
SUM = Pattern(5, "M0 1.5H5", 2, "#994400", "#c31e1e")
SEND = Pattern(6, "M2 3H4M5 0H6M0 0H1M5 6H6M0 6H1", 2, "#883399", "#873ca5")
POST = Pattern(4, "M0 0L4 4M4 0L0 4", 1, "#442200", "#780fff")
"""The pattern of time in which messages or sums are posted, or data loaded: no wait, and nothing is computed."""

WAITS = {"bubble": BUBBLE, "message": MESSAGE, "sum": SUM, "send": SEND, "post": POST}
"""All patterns, keyed by a short name of what they stand for."""


# The shapes of a drawing, in pixels: the values that the templates of pictures write.


class Box(NamedTuple):
    """The rectangle of an operation, and the text that is shown when one points at it."""

    x: str
    y: int
    width: str
    height: int
    title: str


class Label(NamedTuple):
    """The micro-batches of an operation, written in the middle of its box."""

    x: str
    y: str
    text: str


class Family(NamedTuple):
    """Operations of one colour (a `looks.ColourGroup`), pairs apart from others, as boxes or as one outline."""

    fill: str
    ink: str
    font: int
    boxes: tuple[Box, ...]
    outline: str
    labels: tuple[Label, ...]


class LaneRow(NamedTuple):
    """The row of a lane: its name, written on ``baseline``, and the stripe of idle time behind its boxes."""

    name: str
    baseline: str
    x: str
    y: int
    width: str


class Tick(NamedTuple):
    """A mark on the time axis."""

    x: str
    text: str


class Swatch(NamedTuple):
    """A sample of the colour that a kind has in a strand and a chunk, with the letters of the kind and the chunk."""

    x: int
    fill: str
    ink: str
    text: str


class Entry(NamedTuple):
    """An entry of the legend: swatches or another sign, and the name, which begins at ``text``."""

    x: int
    y: int
    swatches: tuple[Swatch, ...]
    text: int
    name: str


class EventMark(NamedTuple):
    """A triangle on the upper edge of a lane: an event between two operations."""

    path: str
    title: str


class Bracket(NamedTuple):
    """A stretch of time below the time axis, with lines through the lanes; its name starts or ends at ``x``."""

    path: str
    lines: str
    x: str
    y: int
    anchor: str
    text: str


class Chart(NamedTuple):
    """The values for ``templates/chart.svg.j2``, in pixels, which all pictures of lanes have in common.

    ``patterns`` are by name, the one of bubbles first. ``legend`` has the entries with swatches or with words alone,
    ``signs`` all others, by the name of the sign, which the template of the picture draws.
    """

    scale: "Scale"
    width: int
    height: int
    right: str
    bottom: int
    stroke: str
    patterns: Mapping[str, Pattern]
    heading: str
    summary: str
    rows: tuple[LaneRow, ...]
    ticks: tuple[Tick, ...]
    families: tuple[Family, ...]
    legend: tuple[Entry, ...]
    signs: Mapping[str, Entry]


class Picture(NamedTuple):
    """The values for ``templates/timeline.svg.j2``: ``marks`` of events, the bracket of the steady state if any."""

    chart: Chart
    marks: tuple[EventMark, ...]
    steady: tuple[Bracket, ...]


_SWATCH, _SIGN, _GAP = 22, 48, 20
"""Pixels from a swatch to the next one, from a sign to its name, and from a name to the next entry."""


class _EntryText(NamedTuple):
    """The words of a legend entry, behind a space of ``indent`` pixels for a sign or for ``samples`` of colours."""

    words: str
    indent: int
    samples: Sequence[ColourSample] = ()

    @property
    def length(self) -> int:
        return self.indent + 8 * len(self.words) + _GAP


def _explained(looks: Looks, kinds: Sequence[Kind]) -> Iterator[_EntryText]:
    for number, strand in enumerate(strands(looks.header)):
        if strand.micros:
            samples = [*looks.samples(kinds, number)]
            yield _EntryText(plain(strand.name), _SWATCH * len(samples) + 4, samples)
    yield from (_EntryText(sign, 0) for sign in looks.signs(kinds))


def _placed(entries: Iterable[_EntryText], left: int, width: int, y: int) -> Iterator[Entry]:
    """Places the entries of a legend, the first at ``left`` and ``y``; one that would pass ``width`` begins a row."""
    x = left
    for entry in entries:
        if x > left and x + entry.length > width:
            x, y = left, y + 24
        swatches = (Swatch(x + _SWATCH * place, *sample[1:]) for place, sample in enumerate(entry.samples))
        yield Entry(x, y, tuple(swatches), x + entry.indent, entry.words)
        x += entry.length


LEGIBLE = 8

LEFT, TOP = 46, 62
"""The place of the first lane, in pixels."""

RISE = Fraction(36, 100)
"""Distance from the baseline of digits to their middle, as a share of the font size."""

_GLYPH = Fraction(62, 100)
"""The width of a character as a share of the font size: that of digits in a wide sans-serif font."""


class Scale(NamedTuple):
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
        return LaneRow(name, _baseline(y, self.row, self.font), pixels(left), y, pixels(right - left))

    def ticks(self, axis: Axis, length: int, unit: Fraction | int = 1, *, ends: bool = False) -> Iterator[Tick]:
        """Yields marks at round times, at least ``length`` pixels apart; if the axis ``ends``, also one at its end.

        The scale's unit of time is ``unit`` units of the axis.
        """
        if axis.span == 0:
            return
        pixel = self.pixel / unit
        apart = axis.distance(length / pixel)
        times = [number * apart for number in range(int(axis.span / apart) + 1)]
        if ends:
            times = [time for time in times if time == 0 or (axis.span - time) * pixel >= length]
            times.append(axis.span)
        yield from (Tick(pixels(self.left + time * pixel), axis.label(time)) for time in times)

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
        return Label(pixels(middle), _baseline(y, height, font), text)


@cache
def _baseline(y: int, height: int, font: int) -> str:
    """The place of the baseline of a text in the middle of a row."""
    return pixels(y + Fraction(height, 2) + font * RISE)


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
    explained = [*_explained(looks, kinds)]
    widest = max((entry.length for entry in explained), default=0) if looks.chunks > 1 else 0
    words = scale.left + max(10 * len(heading), 7 * len(summary), widest)
    width = max(int(right if end is None else end), words) + margin
    pairs = ["one above the other: a pair"] if any(isinstance(operation, Pair) for operation in operations) else []
    named = [_EntryText(plain(name), _SIGN) for name in (*pairs, *signs.values())]
    entries = [*_placed([*explained, *named], scale.left, width, bottom + 44 + below)]
    return Chart(
        scale=scale,
        width=width,
        height=entries[-1].y + 28,
        right=pixels(right),
        bottom=bottom,
        stroke=stroke or ("1" if scale.row > 16 else "0.5"),
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
    drawn = markup(templates()).get_template(template)
    return drawn.render(values, ink=INK, paper=PAPER, light_ground=LIGHT_GROUND)


def pixels(value: Fraction | float) -> str:
    """A length to a hundredth of a pixel, without superfluous zeros; half a hundredth goes to the even digit."""
    # In integers, as a large picture has ten thousands of lengths, and fractions are slow.
    numerator, denominator = value.as_integer_ratio()
    hundredths, rest = divmod(100 * numerator, denominator)
    hundredths += 2 * rest > denominator or (2 * rest == denominator and hundredths % 2)
    return f"{hundredths / 100:.2f}".rstrip("0").rstrip(".")
