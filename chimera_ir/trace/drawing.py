"""Picture of one update: for each worker the predicted lane above the measured one, on one scale of time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain

from chimera_ir.ir.ops import Compute, Operation, Pair
from chimera_ir.picture.legend import chunks_shown, kinds_of, pairs_of
from chimera_ir.picture.looks import ColourGroup, Looks, Shade, rows_of
from chimera_ir.picture.shapes import Tick
from chimera_ir.picture.svg import LEGIBLE, filled, pixels, room
from chimera_ir.picture.words import INK, STEP, ink, label, step, strands
from chimera_ir.trace.compare import Side, TraceComparison
from chimera_ir.trace.spans import Activity, LaneSpan, UpdateWindow, activity, cause, shown_micro, words

WIDTH = 1500
"""The width of the chart in pixels."""

THIN = 0.15
"""Rectangles narrower than this, in pixels, are not drawn."""

FILLS = {
    Activity.RECV: ("#f3cfca", "waits for a message"),
    Activity.SUM: ("#f0e2a8", "waits for a sum"),
    Activity.SEND: ("#dcd0ea", "waits for a send"),
    Activity.STEP: (STEP, "step"),
    Activity.POST: ("#9c9c9c", "posts or loads"),
    Activity.LOAD: ("#9c9c9c", ""),
}
"""Colours of the activities that compute nothing, and their names in the legend."""

_LEFT, _TOP = 112, 58


@dataclass(frozen=True, slots=True)
class Rectangle:
    """The rectangle of an operation; the two of a pair have half the height of a lane."""

    x: str
    y: int
    width: str
    height: int
    baseline: int
    font: int
    fill: str
    ink: str
    middle: str
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class Strip:
    """A lane in the picture: its name, the rectangles of its operations, and where the update is (``x``, ``width``)."""

    name: str
    y: int
    baseline: int
    x: str
    width: str
    shapes: tuple[Rectangle, ...]


@dataclass(frozen=True, slots=True)
class WorkerLanes:
    """A worker's two lanes, predicted and measured."""

    name: str
    baseline: int
    strips: tuple[Strip, ...]


@dataclass(frozen=True, slots=True)
class Caption:
    """An entry of the legend."""

    x: int
    y: int
    fill: str
    text: str


def draw(comparison: TraceComparison) -> str:
    """The picture as a self-contained SVG document."""
    header, workers = comparison.header, comparison.header.workers
    row = 20 if workers <= 16 else 12
    span = max(window.end for side in (comparison.predicted, comparison.measured) for window in side.windows) or 1
    pixel = WIDTH / span
    pitch = 2 * row + 14
    tops = [_TOP + worker * pitch for worker in range(workers)]
    bottom = tops[-1] + pitch - 11
    # The predicted side has every kind of operation, so it decides what the legend explains.
    looks = Looks(header)
    spans = chain.from_iterable(comparison.predicted.lanes)
    operations = [span.operation for span in spans if isinstance(span.operation, Compute | Pair)]
    *entries, bubble = _legend(looks, operations, bottom + 44)
    sides = (("predicted", comparison.predicted), ("measured", comparison.measured))
    return filled(
        "compare.svg.j2",
        width=_LEFT + WIDTH + 40,
        height=bubble.y + 30,
        left=_LEFT,
        right=_LEFT + WIDTH,
        row=row,
        bottom=bottom,
        heading=comparison.about.scheme,
        summary=summary(comparison),
        groups=[
            WorkerLanes(
                f"P{worker}",
                top + row + 5,
                tuple(
                    _strip(looks, name, side, worker, top + i * (row + 2), row, pixel)
                    for i, (name, side) in enumerate(sides)
                ),
            )
            for worker, top in enumerate(tops)
        ],
        ticks=[*_ticks(span, pixel)],
        legend=entries,
        bubble=bubble,
    )


def summary(comparison: TraceComparison) -> str:
    """Update time and bubble ratio, predicted and measured, in one line."""
    predicted, measured = comparison.steps
    predicted_bubble, measured_bubble = comparison.bubbles
    return (
        f"an update takes {milliseconds(predicted)} ms predicted, {milliseconds(measured)} ms measured; "
        f"bubble ratio {100 * predicted_bubble:.1f}% predicted, {100 * measured_bubble:.1f}% measured"
    )


def milliseconds(seconds: float) -> str:
    """A time, given in seconds, as text in milliseconds with three decimals."""
    return f"{seconds * 1e3:.3f}"


def _strip(looks: Looks, name: str, side: Side, worker: int, y: int, row: int, pixel: float) -> Strip:
    window = side.windows[worker]
    shapes = [shape for span in side.lanes[worker] for shape in _shapes(looks, span, window, y, row, pixel)]
    return Strip(
        name=name,
        y=y,
        baseline=y + row // 2 + 4,
        x=pixels(_LEFT + window.start * pixel),
        width=pixels((window.end - window.start) * pixel),
        shapes=tuple(shape for shape in shapes if float(shape.width) >= THIN),
    )


def _shapes(looks: Looks, span: LaneSpan, window: UpdateWindow, y: int, row: int, pixel: float) -> Iterator[Rectangle]:
    """Yields the rectangle of an operation, or the two rectangles of a pair.

    ``y`` and ``row`` are the top and the height of the lane in pixels, ``pixel`` the pixels of a nanosecond.
    """
    operation, largest = span.operation, 12 if row > 16 else 9
    waited = cause(looks.header, operation)
    times = f"{span.start / 1e6:.3f} to {span.end / 1e6:.3f} ms ({(span.end - span.start) / 1e6:.3f} ms)"
    start, end = max(span.start, window.start), min(span.end, window.end)
    width = max(end - start, 0) * pixel
    # Top and height, colours, text and font size of each rectangle.
    if isinstance(operation, Compute | Pair):
        parts = [
            (part.within(y, row), *_colours(looks, single), part.font(largest, row))
            for part, single in rows_of(operation)
        ]
    else:
        parts = [((y, row), FILLS[activity(operation)][0], INK, "", largest)]
    for (top, height), fill, ink_colour, text, font in parts:
        fits = font >= LEGIBLE and room(text, font) <= width
        yield Rectangle(
            x=pixels(_LEFT + start * pixel),
            y=top,
            width=pixels(width),
            height=height,
            baseline=top + height // 2 + 4,
            font=font,
            fill=fill,
            ink=ink_colour,
            middle=pixels(_LEFT + (start + end) / 2 * pixel),
            label=text if fits else "",
            title=f"{words(operation)}: {times}{f', {waited}' if waited else ''}",
        )


def _colours(looks: Looks, operation: Compute) -> tuple[str, str, str]:
    """The colour of an operation, and the colour and text of its label."""
    group = looks.group(replace(operation, micros=(shown_micro(looks.header, operation.micros[0]),)))
    return looks.fill(group), ink(operation.kind), label(operation) + looks.letter(group.chunk)


def _ticks(span: int, pixel: float) -> Iterator[Tick]:
    """Yields ticks at round times in ``span`` nanoseconds; ``pixel`` is the number of pixels of a nanosecond."""
    distance = step(Fraction(round(span / WIDTH * 90)) / 1_000_000 or Fraction(1, 1000))
    time = Fraction(0)
    while time * 1_000_000 <= span:
        text = f"{float(time):g}" + (" ms" if time == 0 else "")
        yield Tick(pixels(_LEFT + float(time) * 1e6 * pixel), text)
        time += distance


def _legend(looks: Looks, operations: Sequence[Operation], y: int) -> Iterator[Caption]:
    """Yields entries from height ``y`` on: each colour of operations, pairs, other activities, and last idle time."""
    compute = [
        (
            looks.fill(ColourGroup(number, chunk, Shade.of(kind))),
            " ".join((kind.noun, looks.letter(chunk))).rstrip() + f", {strand.name}",
        )
        for number, strand in enumerate(strands(looks.header))
        if strand.micros
        for chunk in chunks_shown(looks)
        for kind in kinds_of(operations)
    ]
    # One entry after the other, in a new row where the width is used up.
    pairs = [("", name) for name in pairs_of(operations)]
    others = [(fill, name) for fill, name in FILLS.values() if name]
    x = _LEFT
    for fill, text in (*compute, *pairs, *others, ("", "idle, or between operations")):
        length = 34 + 7 * len(text)
        if x > _LEFT and x + length > _LEFT + WIDTH:
            x, y = _LEFT, y + 24
        yield Caption(x, y, fill, text)
        x += length
