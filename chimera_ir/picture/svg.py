"""A timeline as SVG, in the manner of the paper's Figure 2: workers down, time right, a box per operation.

Everything is computed here; ``templates/timeline.svg.j2`` only writes it down. Same timeline, same bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from chimera_ir.cost.launches import Launched
from chimera_ir.cost.numbers import decimal
from chimera_ir.cost.simulate import Timed, Timeline
from chimera_ir.ir.ops import Forward
from chimera_ir.picture.words import INK, PAPER, colour, heading, hue, ink, label, pipe_numbers, step, summary
from chimera_ir.resources import templates

WIDTH = 2000
"""The width in pixels that a chart is drawn to, if its boxes then have a fair size."""

FAIR = (5, 30)
"""The smallest and the largest width of the shortest operation's box."""

WIDEST = 6000
"""The width in pixels that no chart exceeds."""

TOLD = 4096
"""Up to how many operations each box tells, when pointed at, what it is; more are drawn as one outline per family."""

_LEFT, _TOP = 46, 62
_MARK = 5
_GLYPH = Fraction(62, 100)
"""The width of a character as a share of the font size: that of digits in a wide sans-serif font."""


@dataclass(frozen=True, slots=True)
class Box:
    """The rectangle of an operation, and a text for whoever points at it."""

    x: str
    y: int
    width: str
    title: str


@dataclass(frozen=True, slots=True)
class Label:
    """The micro-batches of an operation, written in the middle of its box."""

    x: str
    y: str
    text: str


@dataclass(frozen=True, slots=True)
class Family:
    """The operations of one pipe in one direction, which share their colours: as boxes, or as a single outline."""

    fill: str
    ink: str
    boxes: tuple[Box, ...]
    outline: str
    labels: tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A worker: its name, and the stripe of bubbles on which its boxes lie."""

    name: str
    y: int
    baseline: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on the time axis."""

    x: str
    text: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A pipe's line in the legend: its two colours and its name."""

    x: int
    y: int
    light: str
    dark: str
    name: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A triangle on the upper edge of a lane: a sum of gradients is launched."""

    path: str
    title: str


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that the template writes, in pixels."""

    width: int
    height: int
    left: int
    right: str
    top: int
    bottom: int
    chart: str
    row_height: int
    font: int
    stroke: str
    ink: str
    paper: str
    heading: str
    summary: str
    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]
    families: tuple[Family, ...]
    legend: tuple[Entry, ...]
    bubble: Entry
    marks: tuple[Mark, ...]
    launch: Entry


@dataclass(frozen=True, slots=True)
class _Scale:
    """Pixels per tick, and the vertical measures that follow from the number of workers."""

    pixel: Fraction
    row: int
    gap: int
    font: int

    def x(self, ticks: int) -> Fraction:
        return _LEFT + self.pixel * ticks

    def y(self, worker: int) -> int:
        return _TOP + worker * (self.row + self.gap)


_Placed = tuple[int, Timed]
"""An operation with its worker."""


def draw(timeline: Timeline, launches: Sequence[Launched] = ()) -> str:
    """The timeline as a self-contained SVG document, launches of sums marked; names from the scheme are escaped."""
    environment = Environment(
        loader=FileSystemLoader(templates()),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("timeline.svg.j2").render(picture=picture(timeline, launches))


def picture(timeline: Timeline, launches: Sequence[Launched] = ()) -> Picture:
    """The places and sizes of everything in the drawing."""
    scale = _scale(timeline)
    right = scale.x(timeline.span)
    bottom = scale.y(len(timeline.lanes)) - scale.gap
    title, note = _text(heading(timeline)), summary(timeline)
    margin = 14 + 4 * len(decimal(timeline.makespan))
    width = max(int(right), _LEFT + 10 * len(title), _LEFT + 7 * len(note)) + margin
    *pipes, bubble, launch = _legend(timeline, width, bottom + 44)
    return Picture(
        width=width,
        height=launch.y + 28,
        left=_LEFT,
        right=_pixels(right),
        top=_TOP,
        bottom=bottom,
        chart=_pixels(right - _LEFT),
        row_height=scale.row,
        font=scale.font,
        stroke="1" if scale.row > 16 else "0.5",
        ink=INK,
        paper=PAPER,
        heading=title,
        summary=note,
        rows=tuple(_row(worker, scale) for worker in range(len(timeline.lanes))),
        ticks=tuple(_ticks(timeline, scale)),
        families=tuple(_families(timeline, scale)),
        legend=tuple(pipes),
        bubble=bubble,
        marks=tuple(_mark(launched, timeline, scale) for launched in launches),
        launch=launch,
    )


def _scale(timeline: Timeline) -> _Scale:
    """As large as the width allows, within what is fair to the shortest operation."""
    timed = list(chain.from_iterable(timeline.lanes))
    shortest = min((each.end - each.start for each in timed), default=1)
    span = max(timeline.span, 1)
    least, most = FAIR
    unit = Fraction(min(max(WIDTH * shortest // span, least), most))
    pixel = min(unit / shortest, Fraction(WIDEST, span))
    many = len(timeline.lanes) > 16
    row, gap = (14, 2) if many else (26, 4)
    sizes = range(10 if many else 13, 8, -1)
    fitting = (size for size in sizes if all(_fits(label(each.operation), size, each, pixel) for each in timed))
    return _Scale(pixel, row, gap, next(fitting, 9))


def _fits(text: str, font: int, timed: Timed, pixel: Fraction) -> bool:
    return len(text) * font * _GLYPH + 3 <= (timed.end - timed.start) * pixel


def _row(worker: int, scale: _Scale) -> Row:
    return Row(f"P{worker}", scale.y(worker), _baseline(scale.y(worker), scale))


def _baseline(y: int, scale: _Scale) -> str:
    return _pixels(y + Fraction(scale.row, 2) + scale.font * Fraction(36, 100))


def _families(timeline: Timeline, scale: _Scale) -> Iterator[Family]:
    """The operations, pipe by pipe, forwards before backwards, with the labels that fit all boxes of their size."""
    numbers = pipe_numbers(timeline.header)
    told = sum(map(len, timeline.lanes)) <= TOLD
    members: dict[tuple[int, bool], list[_Placed]] = {}
    for worker, lane in enumerate(timeline.lanes):
        for timed in lane:
            key = numbers[timed.operation.micros[0]], not isinstance(timed.operation, Forward)
            members.setdefault(key, []).append((worker, timed))
    longest = _longest_labels(chain.from_iterable(timeline.lanes))

    def fits(timed: Timed) -> bool:
        return _fits(longest[timed.end - timed.start], scale.font, timed, scale.pixel)

    for (pipe, _), placed in sorted(members.items(), key=lambda member: member[0]):
        name = timeline.header.pipes[pipe].name
        sample = placed[0][1].operation
        yield Family(
            fill=colour(sample, pipe),
            ink=ink(sample),
            boxes=tuple(_box(each, name, timeline.tick, scale) for each in placed) if told else (),
            outline="" if told else "".join(_outline(each, scale) for each in placed),
            labels=tuple(_label(each, scale) for each in placed if fits(each[1])),
        )


def _longest_labels(timed: Iterable[Timed]) -> dict[int, str]:
    """For each length of box, the longest label that one of them has."""
    longest: dict[int, str] = {}
    for each in timed:
        length = each.end - each.start
        longest[length] = max(longest.get(length, ""), label(each.operation), key=len)
    return longest


def _box(placed: _Placed, pipe: str, tick: Fraction, scale: _Scale) -> Box:
    worker, timed = placed
    left, right = scale.x(timed.start), scale.x(timed.end)
    return Box(_pixels(left), scale.y(worker), _pixels(right - left), _title(timed, pipe, tick))


def _outline(placed: _Placed, scale: _Scale) -> str:
    """The rectangle of an operation as a part of a path."""
    worker, timed = placed
    left, right = _pixels(scale.x(timed.start)), _pixels(scale.x(timed.end))
    return f"M{left} {scale.y(worker)}H{right}v{scale.row}H{left}z"


def _label(placed: _Placed, scale: _Scale) -> Label:
    worker, timed = placed
    middle = (scale.x(timed.start) + scale.x(timed.end)) / 2
    return Label(_pixels(middle), _baseline(scale.y(worker), scale), label(timed.operation))


def _title(timed: Timed, pipe: str, tick: Fraction) -> str:
    operation = timed.operation
    kind = "forward" if isinstance(operation, Forward) else "backward"
    micros = ("micro-batch " if len(operation.micros) == 1 else "micro-batches ") + label(operation)
    when = f"{decimal(timed.start * tick)} to {decimal(timed.end * tick)}"
    return _text(f"{kind} of {micros} on stage {operation.stage}, pipe {pipe}: {when}")


def _ticks(timeline: Timeline, scale: _Scale) -> Iterator[Tick]:
    """Round times at a readable distance, and the makespan itself."""
    span, length = timeline.makespan, max(len(decimal(timeline.makespan)) * 9, 28)
    if span == 0:
        return
    per_unit = scale.pixel / timeline.tick
    distance = step(length / per_unit)
    time = Fraction(0)
    while time == 0 or (span - time) * per_unit >= length:
        yield Tick(_pixels(_LEFT + time * per_unit), decimal(time))
        time += distance
        if time > span:
            break
    yield Tick(_pixels(_LEFT + span * per_unit), decimal(span))


def _mark(launched: Launched, timeline: Timeline, scale: _Scale) -> Mark:
    x = _pixels(_LEFT + launched.at / timeline.tick * scale.pixel)
    side = max(2, min(_MARK, scale.row // 4))
    return Mark(
        f"M{x} {scale.y(launched.worker) + side}l{-side} {-2 * side}h{2 * side}z",
        f"sum of the gradients of stage {launched.stage}, launched at {decimal(launched.at)}; "
        f"{decimal(launched.free)} free before the last operation, {decimal(launched.flush)} after it",
    )


def _legend(timeline: Timeline, width: int, y: int) -> Iterator[Entry]:
    """One entry for each pipe, one for bubbles and one for launches, in as many lines as the width asks for."""
    x = _LEFT
    pipes = [(hue(number).light, hue(number).dark, pipe.name) for number, pipe in enumerate(timeline.header.pipes)]
    for light, dark, name in [*pipes, (PAPER, PAPER, "bubble"), (PAPER, PAPER, "gradient sum launched")]:
        text = _text(name)
        length = 68 + 8 * len(text)
        if x > _LEFT and x + length > width:
            x, y = _LEFT, y + 24
        yield Entry(x, y, light, dark, text)
        x += length


def _pixels(value: Fraction) -> str:
    """A length to a hundredth of a pixel, without superfluous zeros."""
    return f"{float(round(value, 2)):.2f}".rstrip("0").rstrip(".")


def _text(words: str) -> str:
    """Words without the characters that XML has no way to write."""
    return "".join(each if each >= " " and not "\ud800" <= each <= "\udfff" else "\ufffd" for each in words)
