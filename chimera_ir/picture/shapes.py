"""The shapes of a drawing, in pixels: the values that the templates of pictures write."""

from collections.abc import Mapping
from dataclasses import dataclass

from chimera_ir.picture.patterns import Pattern


@dataclass(frozen=True, slots=True)
class Box:
    """The rectangle of an operation, and the text that is shown when one points at it."""

    x: str
    y: int
    width: str
    height: int
    title: str


@dataclass(frozen=True, slots=True)
class Label:
    """The micro-batches of an operation, written in the middle of its box."""

    x: str
    y: str
    text: str


@dataclass(frozen=True, slots=True)
class Family:
    """Operations of one colour (a `looks.ColourGroup`), pairs apart from others, as boxes or as one outline."""

    fill: str
    ink: str
    font: int
    boxes: tuple[Box, ...]
    outline: str
    labels: tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class LaneRow:
    """The row of a lane: its name, written on ``baseline``, and the stripe of idle time behind its boxes."""

    name: str
    baseline: str
    x: str
    y: int
    width: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on the time axis."""

    x: str
    text: str


@dataclass(frozen=True, slots=True)
class Swatch:
    """A sample of the colour that a kind has in a strand and a chunk, with the letters of the kind and the chunk."""

    x: int
    fill: str
    ink: str
    text: str


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the legend: swatches or another sign, and the name, which begins at ``text``."""

    x: int
    y: int
    swatches: tuple[Swatch, ...]
    text: int
    name: str


@dataclass(frozen=True, slots=True)
class EventMark:
    """A triangle on the upper edge of a lane: an event between two operations."""

    path: str
    title: str


@dataclass(frozen=True, slots=True)
class Bracket:
    """A stretch of time below the time axis, with lines through the lanes; its name starts or ends at ``x``."""

    path: str
    lines: str
    x: str
    y: int
    anchor: str
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """The values for ``templates/chart.svg.j2``, in pixels, which all pictures of lanes have in common.

    ``row`` is the height of a lane. ``patterns`` are the picture's patterns by name; ``hatch`` is the name of the
    pattern for bubbles. ``legend`` has the entries with swatches or with words alone. ``signs`` has all other entries,
    by the name of the sign, which the template of the picture draws.
    """

    width: int
    height: int
    left: int
    right: str
    bottom: int
    row: int
    stroke: str
    hatch: str
    patterns: Mapping[str, Pattern]
    heading: str
    summary: str
    rows: tuple[LaneRow, ...]
    ticks: tuple[Tick, ...]
    families: tuple[Family, ...]
    legend: tuple[Entry, ...]
    signs: Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class Picture:
    """The values for ``templates/timeline.svg.j2``, in pixels.

    ``marks`` are events such as launches of sums; ``steady`` has the bracket of the steady state, if there is one.
    """

    chart: Chart
    marks: tuple[EventMark, ...]
    steady: tuple[Bracket, ...]
