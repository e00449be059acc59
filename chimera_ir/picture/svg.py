"""A timeline as SVG, in the manner of the paper's Figure 2: workers down, time right, a box per operation.

All places are computed here; ``templates/timeline.svg.j2`` only writes them down. Equal timelines give equal bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from itertools import chain
from math import ceil
from pathlib import Path
from typing import NamedTuple, assert_never

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from chimera_ir.cost.number_text import Unit
from chimera_ir.cost.simulate import Event, Launched, Stepped, Timed, Timeline
from chimera_ir.cost.window import Window, beginning, steady_window
from chimera_ir.escapes import visible_lines
from chimera_ir.ir.ops import Compute, Operation
from chimera_ir.ir.text.printer import group_name
from chimera_ir.picture.legend import kinds_of, least, legend, pairs_of
from chimera_ir.picture.looks import ColourGroup, Looks, Row, rows_of
from chimera_ir.picture.shapes import Box, Bracket, EventMark, Family, Label, Picture, Tick, WorkerRow
from chimera_ir.picture.words import INK, PAPER, STEP, bracket, distance, event_name, ink, label, mark, plain, summary
from chimera_ir.resources import templates

WIDTH = 2000
"""The width in pixels of a chart, unless its boxes would be too narrow or too wide."""

FAIR = (5, 30)
"""The smallest and the largest width in pixels of the shortest operation's box, unless labels need more."""

WIDEST = 6000
"""The largest width in pixels of a chart."""

MOST_BOXES = 4096
"""The most operations that are drawn as boxes with texts; more are drawn as one outline for each family."""

FONT = 13
"""The font size of the numbers in boxes, if the rows are high enough."""

LEGIBLE = 8
"""The smallest font size of a label."""

LEFT, TOP = 46, 62
"""The place of the first lane, in pixels."""

RISE = Fraction(36, 100)
"""Distance from the baseline of digits to their middle, as a share of the font size."""

_MARK = 5
_GLYPH = Fraction(62, 100)
"""The width of a character as a share of the font size: that of digits in a wide sans-serif font."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Pixels per unit of time (a tick or a second), and the heights in pixels that all lanes have in common.

    ``row`` is the height of a lane, ``strip`` of the strip below it, ``gap`` of the space before the next lane.
    """

    pixel: Fraction
    row: int
    gap: int
    font: int
    strip: int = 0

    def x(self, time: float) -> Fraction:
        """The horizontal place of a time."""
        return LEFT + self.pixel * Fraction(time)

    def y(self, worker: int) -> int:
        """The upper edge of a worker's lane."""
        return TOP + worker * (self.row + self.strip + self.gap)

    def worker_row(self, worker: int) -> WorkerRow:
        """The row of a worker, with its name."""
        y = self.y(worker)
        return WorkerRow(f"P{worker}", y, pixels(y + Fraction(self.row, 2) + self.font * RISE))

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
    """A compute operation with its worker and times; ``row`` is the part of the lane's height that it takes."""

    worker: int
    start: float
    end: float
    operation: Compute
    row: Row

    def area(self, scale: Scale) -> tuple[float, float, int, int]:
        """The start, the end, the upper edge and the height of its box."""
        return self.start, self.end, *self.row.within(scale.y(self.worker), scale.row)


def placed_operations(worker: int, start: float, end: float, operation: Operation) -> Iterator[PlacedOperation]:
    """Yields an operation with its place, or the two of a pair."""
    return (PlacedOperation(worker, start, end, part, row) for row, part in rows_of(operation))


def draw(timeline: Timeline) -> str:
    """The timeline as a self-contained SVG document, its events marked; names from the scheme are escaped."""
    return filled("timeline.svg.j2", picture=picture(timeline))


def filled(template: str, **values: object) -> str:
    """A template filled with values and common colours; texts are escaped, also characters that XML does not allow."""
    return _environment(templates()).get_template(template).render(values, ink=INK, paper=PAPER, step=STEP)


@cache
def _environment(folder: Path) -> Environment:
    """The templates of a folder, each compiled when it is first used and when its file has changed."""
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        finalize=lambda value: visible_lines(value) if isinstance(value, str) else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def picture(timeline: Timeline, unit: Fraction | None = None, hatch: str = "bubble") -> Picture:
    """The places and sizes of all that is in the drawing.

    ``unit`` is the length in pixels of a unit of time. Without it the unit is fair to the shortest operation, and the
    picture ends with the steady state if labels have no room otherwise. ``hatch`` is the name of the pattern for
    bubbles; two pictures in one document need different names.
    """
    # The scale decides the places of lanes; words and legend decide how wide and high the picture is around them.
    window = steady_window(timeline)
    if unit is None:
        timeline = _legible(timeline, window)
        unit = fair_unit(timeline)
    scale = _scale(timeline, unit)
    right = scale.x(timeline.span)
    bottom = scale.y(len(timeline.lanes)) - scale.gap
    title, note = plain(timeline.header.title), summary(timeline)
    margin = 14 + 4 * len(mark(timeline, timeline.shown))
    ends = (scale.x(lane[-1].end) for lane in timeline.lanes if lane)
    operations = [timed.operation for timed in chain(*timeline.lanes)]
    looks, kinds = Looks(timeline.header), kinds_of(operations)
    words = LEFT + max(10 * len(title), 7 * len(note), least(looks, kinds))
    width = max(int(max(ends, default=right)), words) + margin
    steady = tuple(_brackets(window, scale, width, bottom))
    signs = ["bubble", *([event_name(timeline)] if timeline.events else [])]
    names = [*pairs_of(operations), *signs]
    entries = [*legend(looks, kinds, names, LEFT, width, bottom + 44 + 22 * len(steady))]
    return Picture(
        width=width,
        height=entries[-1].y + 28,
        left=LEFT,
        right=pixels(right),
        bottom=bottom,
        chart=pixels(right - LEFT),
        row_height=scale.row,
        stroke="1" if scale.row > 16 else "0.5",
        heading=title,
        summary=note,
        rows=tuple(map(scale.worker_row, range(len(timeline.lanes)))),
        ticks=tuple(_ticks(timeline, scale)),
        families=tuple(_families(timeline, looks, scale)),
        legend=tuple(entries[: -len(signs)]),
        signs={entry.name: entry for entry in entries[-len(signs) :]},
        hatch=hatch,
        marks=tuple(_mark(event, timeline, scale) for event in timeline.events),
        steady=steady,
    )


def fair_unit(timeline: Timeline) -> Fraction:
    """Pixels for a unit of time: as many as `WIDTH` allows, within limits for the shortest operation's box.

    The upper limit is large enough for every label, so labels are missing only in pictures of the largest width.
    """
    operations = list(chain.from_iterable(timeline.lanes))
    looks = Looks(timeline.header)
    shortest = min((timed.end - timed.start for timed in operations), default=1)
    span = max(timeline.span, 1)
    least, most = FAIR
    longest = _longest_labels(operations, looks).items()
    labelled = max((room(text, FONT) / length for length, text in longest), default=Fraction(0)) * shortest
    box = Fraction(min(max(WIDTH * shortest // span, least), max(most, ceil(labelled))))
    return min(box / shortest, Fraction(WIDEST, span)) / timeline.tick


def _scale(timeline: Timeline, unit: Fraction) -> Scale:
    """The scale with ``unit`` pixels for a unit of time, and the largest font in which all labels fit, else font 9."""
    pixel = unit * timeline.tick
    many = len(timeline.lanes) > 16
    row, gap = (14, 2) if many else (26, 4)
    sizes = range(10 if many else FONT, 8, -1)
    longest = _longest_labels(chain.from_iterable(timeline.lanes), Looks(timeline.header)).items()
    fitting = (size for size in sizes if all(room(text, size) <= length * pixel for length, text in longest))
    return Scale(pixel, row, gap, next(fitting, 9))


def _legible(timeline: Timeline, window: Window | None) -> Timeline:
    """The timeline; if labels do not fit, only the part up to the end of the steady state in ``window``, if any."""
    scale, timed = _scale(timeline, fair_unit(timeline)), chain.from_iterable(timeline.lanes)
    longest = _longest_labels(timed, Looks(timeline.header))
    fits = all(room(text, scale.font) <= length * scale.pixel for length, text in longest.items())
    return timeline if fits or window is None else beginning(timeline, window)


def room(text: str, font: int) -> Fraction:
    """The width in pixels that a label needs in its box, in a font of this size."""
    return len(text) * font * _GLYPH + 3


def families(
    operations: Iterable[PlacedOperation],
    looks: Looks,
    scale: Scale,
    title: Callable[[PlacedOperation], str] | None,
    with_room: Callable[[Sequence[PlacedOperation], int], Iterable[PlacedOperation]],
) -> Iterator[Family]:
    """Yields families: the operations of one colour group and row together, so that a picture names each colour once.

    ``title`` writes the text of a box; without it, each family is drawn as one outline. ``with_room`` picks the
    operations of a family that have room for their labels in a font of some size.
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
            boxes=() if title is None else tuple(scale.box(*placed.area(scale), title(placed)) for placed in several),
            outline="" if title else "".join(scale.outline(*placed.area(scale)) for placed in several),
            labels=tuple(scale.label(*placed.area(scale), font, looks.label(placed.operation)) for placed in labelled),
        )


def _families(timeline: Timeline, looks: Looks, scale: Scale) -> Iterator[Family]:
    """Yields the families of a timeline; operations of equal length have labels if their longest label fits."""
    longest = _longest_labels(chain.from_iterable(timeline.lanes), looks)

    def with_room(operations: Sequence[PlacedOperation], font: int) -> Iterator[PlacedOperation]:
        lengths = [int(placed.end - placed.start) for placed in operations]
        fits = {length: room(longest[length], font) <= length * scale.pixel for length in set(lengths)}
        return (placed for placed, length in zip(operations, lengths, strict=True) if fits[length])

    operations = (
        operation
        for worker, lane in enumerate(timeline.lanes)
        for timed in lane
        for operation in placed_operations(worker, timed.start, timed.end, timed.operation)
    )
    title = partial(_title, timeline) if sum(map(len, timeline.lanes)) <= MOST_BOXES else None
    return families(operations, looks, scale, title, with_room)


def _longest_labels(operations: Iterable[Timed], looks: Looks) -> dict[int, str]:
    """Finds, for each length in ticks, the longest label of the operations that have it."""
    longest: dict[int, str] = {}
    for timed in operations:
        length = timed.end - timed.start
        longest[length] = max(longest.get(length, ""), *map(looks.label, timed.operation.parts), key=len)
    return longest


def _title(timeline: Timeline, placed: PlacedOperation) -> str:
    operation = placed.operation
    tick, show = timeline.tick, timeline.costs.unit.show
    pipe = timeline.header.pipe_of[operation.micros[0]].name
    micros = ("micro-batch " if len(operation.micros) == 1 else "micro-batches ") + label(operation)
    when = f"{show(Fraction(placed.start) * tick)} to {show(Fraction(placed.end) * tick)}"
    read = "" if operation.version is None else f", reads version {operation.version}"
    return plain(f"{operation.kind.noun} of {micros} on stage {operation.stage}, pipe {pipe}: {when}{read}")


def _ticks(timeline: Timeline, scale: Scale) -> Iterator[Tick]:
    """Yields marks at round times, far enough apart to be read, and at the end."""
    span, length = timeline.shown, max(len(mark(timeline, timeline.shown)) * 9, 28)
    if span == 0:
        return
    per_unit = scale.pixel / timeline.tick
    apart = distance(timeline, length / per_unit)
    time = Fraction(0)
    while time == 0 or (span - time) * per_unit >= length:
        yield Tick(pixels(LEFT + time * per_unit), mark(timeline, time))
        time += apart
        if time > span:
            break
    yield Tick(pixels(LEFT + span * per_unit), mark(timeline, span))


def _mark(event: Event, timeline: Timeline, scale: Scale) -> EventMark:
    x = pixels(LEFT + event.at / timeline.tick * scale.pixel)
    side = max(2, min(_MARK, scale.row // 4))
    title = _event_title(event, timeline.costs.unit)
    return EventMark(f"M{x} {scale.y(event.worker) + side}l{-side} {-2 * side}h{2 * side}z", title)


def _event_title(event: Event, unit: Unit) -> str:
    match event:
        case Launched():
            return (
                f"sum of the gradients of {group_name(event.group)}, launched at {unit.show(event.at)}; "
                f"{unit.show(event.free)} free before the last operation, {unit.show(event.flush)} after it"
            )
        case Stepped():
            return f"the weights of {group_name(event.group)} become version {event.version} at {unit.show(event.at)}"
        case _:
            assert_never(event)


def _brackets(window: Window | None, scale: Scale, width: int, bottom: int) -> Iterator[Bracket]:
    """Yields the bracket of the steady state, if any; its text is on the right or, if ``width`` has no room, left."""
    if window is None:
        return
    start, end, text = scale.x(window.start), scale.x(window.end), bracket(window)
    left, right, y = pixels(start), pixels(end), bottom + 30
    behind = end + 8 + 7 * len(text) <= width
    yield Bracket(
        path=f"M{left} {y}v6H{right}v-6",
        lines=f"M{left} {TOP - 6}V{bottom + 6}M{right} {TOP - 6}V{bottom + 6}",
        x=pixels(end + 8 if behind else start - 8),
        y=y + 8,
        anchor="start" if behind else "end",
        text=text,
    )


def pixels(value: Fraction | float) -> str:
    """A length to a hundredth of a pixel, without superfluous zeros."""
    return f"{float(round(Fraction(value), 2)):.2f}".rstrip("0").rstrip(".")
