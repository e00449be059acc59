"""Picture of one update: for each worker the predicted lane above the measured one, on one scale of time."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain
from typing import NamedTuple

from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute, Pair
from chimera_ir.picture.chart import (
    BUBBLE,
    MESSAGE,
    POST,
    SEND,
    SUM,
    Box,
    Family,
    PlacedOperation,
    Scale,
    chart,
    families,
    filled,
    room,
)
from chimera_ir.picture.looks import INK, STEP, Axis, Looks, plain, rows_of
from chimera_ir.trace.compare import TraceComparison
from chimera_ir.trace.trace_files import Activity, Lane, LaneSpan, UpdateWindow, activity, cause, words

WIDTH, THIN = 1500, 0.15
"""The width of the chart, and the least width of a rectangle that is drawn, in pixels."""

FILLS: dict[str, tuple[str, str]] = {
    Activity.RECV: ("url(#wait-message)", "waits for a message"),
    Activity.SUM: ("url(#wait-sum)", "waits for a sum"),
    Activity.SEND: ("url(#wait-send)", "waits for a send"),
    Activity.MOVE: ("url(#wait-send)", ""),
    Activity.STEP: (STEP, "step"),
    Activity.POST: ("url(#post)", "posts or loads"),
    Activity.LOAD: ("url(#post)", ""),
}
"""The fill of each activity that computes nothing, and its name for the legend, empty if the legend has it already."""

_PATTERNS = {"idle": BUBBLE, "wait-message": MESSAGE, "wait-sum": SUM, "wait-send": SEND, "post": POST}


class _DrawnLane(NamedTuple):
    y: int
    lane: Lane
    window: UpdateWindow

    def wide(self, pixel: Fraction) -> Iterator[tuple[LaneSpan, int, int]]:
        """Yields the spans that are not too thin to draw, each with its start and its end within the window."""
        for span in self.lane:
            start, end = max(span.start, self.window.start), min(span.end, self.window.end)
            if (end - start) * pixel >= THIN:
                yield span, start, end


def draw(comparison: TraceComparison) -> str:
    """The picture as a self-contained SVG document."""
    looks, workers = Looks(comparison.header), range(comparison.header.workers)
    sides = {"predicted": comparison.predicted, "measured": comparison.measured}
    length = max(window.end for side in sides.values() for window in side.windows) or 1
    # The measured lane of a worker is in the strip below the predicted one.
    row, font = (20, 12) if len(workers) <= 16 else (12, 9)
    scale = Scale(Fraction(WIDTH, length), row, gap=12, font=font, strip=row + 2, left=112)
    lanes = {
        f"P{worker} {name}": _DrawnLane(scale.y(worker) + place * scale.strip, side.lanes[worker], side.windows[worker])
        for worker in workers
        for place, (name, side) in enumerate(sides.items())
    }
    # The predicted side has every kind of operation, so it decides what the legend explains.
    predicted = chain.from_iterable(comparison.predicted.lanes)
    operations = [span.operation for span in predicted if isinstance(span.operation, Compute | Pair)]
    return filled(
        "compare.svg.j2",
        chart=chart(
            looks,
            operations,
            scale,
            heading=plain(comparison.about.scheme),
            summary=summary(comparison),
            rows=(scale.lane_row(name, lane.y, *lane.window) for name, lane in lanes.items()),
            families=_families(looks, lanes.values(), scale),
            ticks=scale.ticks(Axis(Fraction(length), Fraction(1, 10**6), "ms"), 80),
            signs=_signs(any(operation.kind.moves for operation in operations)),
            span=length,
            stroke="0",
            patterns=_PATTERNS,
        ),
    )


def _signs(moves: bool) -> dict[str, str]:
    """Meanings of colours and patterns that are no computing; a wait for a move looks like a wait for a send."""
    signs = {fill: name for fill, name in FILLS.values() if name}
    signs |= {FILLS[Activity.MOVE][0]: "waits for a send or for the host"} if moves else {}
    return signs | {"url(#idle)": "idle, or between operations"}


def summary(comparison: TraceComparison) -> str:
    """The time of an update and the bubble ratio, predicted and measured, in one line."""
    predicted, measured = comparison.steps
    predicted_bubble, measured_bubble = comparison.bubbles
    return (
        f"an update takes {milliseconds(predicted)} ms predicted, {milliseconds(measured)} ms measured; "
        f"bubble ratio {100 * predicted_bubble:.1f}% predicted, {100 * measured_bubble:.1f}% measured"
    )


def milliseconds(seconds: float) -> str:
    """A time, given in seconds, as text in milliseconds with three decimals."""
    return f"{seconds * 1e3:.3f}"


def _families(looks: Looks, lanes: Iterable[_DrawnLane], scale: Scale) -> Iterator[Family]:
    """Yields operations by colour, with labels where there is room, then other activities by colour or pattern."""
    placed: list[PlacedOperation] = []
    others: dict[str, list[Box]] = defaultdict(list)
    for lane in lanes:
        for span, start, end in lane.wide(scale.pixel):
            title = _title(looks.header, span)
            if isinstance(span.operation, Compute | Pair):
                parts = rows_of(span.operation)
                placed += [PlacedOperation(lane.y, start, end, part, row, title) for row, part in parts]
            else:
                others[FILLS[activity(span.operation)][0]].append(scale.box(start, end, lane.y, scale.row, title))

    def with_room(several: Sequence[PlacedOperation], font: int) -> Iterator[PlacedOperation]:
        return (p for p in several if room(looks.label(p.operation), font) <= (p.end - p.start) * scale.pixel)

    yield from families(placed, looks, scale, with_room)
    yield from (Family(fill, INK, scale.font, tuple(boxes), "", ()) for fill, boxes in others.items())


def _title(header: Header, span: LaneSpan) -> str:
    waited = cause(header, span.operation)
    times = f"{span.start / 1e6:.3f} to {span.end / 1e6:.3f} ms ({(span.end - span.start) / 1e6:.3f} ms)"
    return f"{words(span.operation, header)}: {times}{f', {waited}' if waited else ''}"
