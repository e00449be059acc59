"""A timeline as SVG, in the manner of the paper's Figure 2: workers down, time right, a box per operation.

All places are computed here; ``templates/timeline.svg.j2`` only writes them down. Equal timelines give equal bytes.
"""

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from hashlib import sha256
from itertools import chain, count
from math import ceil
from typing import NamedTuple, assert_never

from chimera_ir.cost.simulate import Event, Launched, Stepped, Timed, Timeline, Window, beginning, steady_window
from chimera_ir.ir.ops import Compute
from chimera_ir.ir.text.printer import group_name
from chimera_ir.picture import chart
from chimera_ir.picture.chart import (
    BUBBLE,
    LEFT,
    TOP,
    Bracket,
    Chart,
    EventMark,
    Family,
    Picture,
    PlacedOperation,
    Scale,
    families,
    pixels,
    room,
)
from chimera_ir.picture.looks import (
    Axis,
    Looks,
    bracket,
    event_name,
    label,
    plain,
    rows_of,
    summary,
    track_name,
)

# Texts inside a document: written without escapes, and named in its content security policy.


class Inlined(NamedTuple):
    """A text that a template writes without escapes: a file of this project, a picture, or base64."""

    text: str

    def __html__(self) -> str:
        return self.text


def policy_source(text: str) -> str:
    """The hash of an inline script or style sheet, as a content security policy names it."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


WIDTH, WIDEST = 2000, 6000
"""The width in pixels of a chart, unless its boxes would be too narrow or too wide, and the largest width."""

FAIR = (5, 30)
"""The smallest and the largest width in pixels of the shortest operation's box, unless labels need more."""

MOST_BOXES = 4096
"""The most operations that are drawn as boxes with texts; of more, those of one colour are drawn as one outline."""

FONT = 13
"""The font size of the numbers in boxes, if the rows are high enough."""

_MARK = 5


def draw(timeline: Timeline) -> str:
    """The timeline as a self-contained SVG document, its events marked; names from the scheme are escaped."""
    return filled(picture(timeline))


def filled(picture: Picture) -> str:
    """The picture as a self-contained SVG document."""
    return chart.filled("timeline.svg.j2", chart=picture.chart, marks=picture.marks, steady=picture.steady)


def picture(timeline: Timeline, unit: Fraction | None = None, hatch: str = "bubble") -> Picture:
    """The places and sizes of all that is in the drawing.

    ``unit`` is the length in pixels of a unit of time. Without it, the length is that of `fair_unit`, and if labels
    have no room then, the picture ends with the steady state. ``hatch`` is the name of the pattern for bubbles; two
    pictures in one document need different names.
    """
    timeline, window, looks = timeline.visible, steady_window(timeline), Looks(timeline.header)
    longest = _longest_labels(timeline, looks)
    if unit is None:
        unit = _fair_unit(timeline, longest)
        if window is not None and not _all_fit(longest, _scale(timeline, unit, longest)):
            timeline = beginning(timeline, window)
            longest = _longest_labels(timeline, looks)
            unit = _fair_unit(timeline, longest)
    scale, axis = _scale(timeline, unit, longest), Axis.of(timeline)
    end = axis.label(axis.span)
    made = chart.chart(
        looks,
        [timed.operation for timed in chain(*timeline.lanes)],
        scale,
        heading=plain(timeline.header.title),
        summary=summary(timeline),
        rows=(
            scale.lane_row(track_name(track), scale.y(row), 0, timeline.span)
            for row, track in enumerate(timeline.tracks)
        ),
        families=_families(timeline, looks, scale, longest),
        ticks=scale.ticks(axis, max(9 * len(end), 28), timeline.tick, ends=True),
        signs={"bubble": "bubble"} | ({"event": event_name(timeline)} if timeline.events else {}),
        span=timeline.span,
        end=max((scale.x(track.timed[-1].end) for track in timeline.tracks if track.timed), default=None),
        margin=14 + 4 * len(end),
        below=0 if window is None else 22,
        patterns={hatch: BUBBLE},
    )
    marks = tuple(_mark(event, timeline, scale) for event in timeline.events)
    return Picture(made, marks, () if window is None else (_bracket(window, scale, made),))


def fair_unit(timeline: Timeline) -> Fraction:
    """Pixels for a unit of time: as many as `WIDTH` allows, within limits for the shortest operation's box.

    The upper limit is large enough for every label, so labels are missing only in pictures of the largest width.
    """
    timeline = timeline.visible
    return _fair_unit(timeline, _longest_labels(timeline, Looks(timeline.header)))


def _fair_unit(timeline: Timeline, longest: Mapping[int, str]) -> Fraction:
    shortest, span = min(longest, default=1), max(timeline.span, 1)
    least, most = FAIR
    labelled = max((room(text, FONT) / length for length, text in longest.items()), default=Fraction(0)) * shortest
    box = Fraction(min(max(WIDTH * shortest // span, least), max(most, ceil(labelled))))
    return min(box / shortest, Fraction(WIDEST, span)) / timeline.tick


def _scale(timeline: Timeline, unit: Fraction, longest: Mapping[int, str]) -> Scale:
    """The scale with ``unit`` pixels for a unit of time, and the largest font in which all labels fit, else font 9."""
    pixel = unit * timeline.tick
    many = len(timeline.lanes) > 16
    row, gap = (14, 2) if many else (26, 4)
    scales = (Scale(pixel, row, gap, size) for size in range(10 if many else FONT, 8, -1))
    return next((scale for scale in scales if _all_fit(longest, scale)), Scale(pixel, row, gap, 9))


def _all_fit(longest: Mapping[int, str], scale: Scale) -> bool:
    return all(room(text, scale.font) <= length * scale.pixel for length, text in longest.items())


def _families(timeline: Timeline, looks: Looks, scale: Scale, longest: Mapping[int, str]) -> Iterator[Family]:
    """The operations by colour; those of equal length have labels if the longest of their labels fits."""

    def with_room(operations: Sequence[PlacedOperation], font: int) -> Iterator[PlacedOperation]:
        lengths = [int(placed.end - placed.start) for placed in operations]
        fits = {length: room(longest[length], font) <= length * scale.pixel for length in set(lengths)}
        return (placed for placed, length in zip(operations, lengths, strict=True) if fits[length])

    one_by_one = sum(map(len, timeline.lanes)) <= MOST_BOXES
    show = cache(lambda ticks: timeline.costs.unit.show(ticks * timeline.tick))
    operations = (
        PlacedOperation(y, timed.start, timed.end, part, row, _title(timeline, timed, part, show) if one_by_one else "")
        for y, track in zip(map(scale.y, count()), timeline.tracks, strict=False)
        for timed in track.timed
        for row, part in rows_of(timed.operation)
    )
    return families(operations, looks, scale, with_room)


def _longest_labels(timeline: Timeline, looks: Looks) -> dict[int, str]:
    """The longest label among the operations of each length."""
    longest: dict[int, str] = {}
    for timed in chain.from_iterable(timeline.lanes):
        length = timed.end - timed.start
        longest[length] = max(longest.get(length, ""), *map(looks.label, timed.operation.parts), key=len)
    return longest


def _title(timeline: Timeline, timed: Timed, operation: Compute, show: Callable[[int], str]) -> str:
    pipe, stage = timeline.header.pipe_of[operation.micros[0]].name, timeline.header.stage_name(operation.stage)
    micros = ("micro-batch " if len(operation.micros) == 1 else "micro-batches ") + label(
        operation, timeline.header.slices
    )
    when = f"{show(timed.start)} to {show(timed.end)}"
    read = "" if operation.version is None else f", reads version {operation.version}"
    return plain(f"{operation.kind.noun} of {micros} on stage {stage}, pipe {pipe}: {when}{read}")


def _mark(event: Event, timeline: Timeline, scale: Scale) -> EventMark:
    x = pixels(LEFT + event.at / timeline.tick * scale.pixel)
    side = max(2, min(_MARK, scale.row // 4))
    title = _event_title(event, timeline)
    return EventMark(f"M{x} {scale.y(event.worker) + side}l{-side} {-2 * side}h{2 * side}z", title)


def _event_title(event: Event, timeline: Timeline) -> str:
    unit, header = timeline.costs.unit, timeline.header
    match event:
        case Launched():
            return (
                f"sum of the gradients of {group_name(event.group, header)}, launched at {unit.show(event.at)}; "
                f"{unit.show(event.free)} free before the last operation, {unit.show(event.flush)} after it"
            )
        case Stepped():
            when = unit.show(event.at)
            return f"the weights of {group_name(event.group, header)} become version {event.version} at {when}"
        case _:
            assert_never(event)


def _bracket(window: Window, scale: Scale, chart: Chart) -> Bracket:
    """The bracket of the steady state; its text is on the right or, if the chart has no room there, on the left."""
    start, end, text = scale.x(window.start), scale.x(window.end), bracket(window)
    left, right, y = pixels(start), pixels(end), chart.bottom + 30
    behind = end + 8 + 7 * len(text) <= chart.width
    return Bracket(
        path=f"M{left} {y}v6H{right}v-6",
        lines=f"M{left} {TOP - 6}V{chart.bottom + 6}M{right} {TOP - 6}V{chart.bottom + 6}",
        x=pixels(end + 8 if behind else start - 8),
        y=y + 8,
        anchor="start" if behind else "end",
        text=text,
    )
