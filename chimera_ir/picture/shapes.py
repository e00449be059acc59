"""The shapes of a drawing: the values that ``templates/timeline.svg.j2`` writes, in pixels."""

from dataclasses import dataclass


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
    """The operations of a `looks.ColourGroup`, which have the same colours: as boxes, or as a single outline.

    The operations of pairs, which have half the height, are families of their own.
    """

    fill: str
    ink: str
    font: int
    boxes: tuple[Box, ...]
    outline: str
    labels: tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """The row of a worker: its name, and the stripe of bubbles behind its boxes."""

    name: str
    y: int
    baseline: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on the time axis."""

    x: str
    text: str


@dataclass(frozen=True, slots=True)
class Swatch:
    """The two colours of a chunk of a strand, forward and backward, with the chunk's letter."""

    x: int
    light: str
    dark: str
    letter: str


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the legend: the colours of a strand, or another sign, and its name, which begins at ``text``."""

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
    """A stretch of time, drawn below the time axis and as two lines through the lanes, with its name.

    The text starts or ends at ``x``, depending on ``anchor``.
    """

    path: str
    lines: str
    x: str
    y: int
    anchor: str
    text: str


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
    rows: tuple[WorkerRow, ...]
    ticks: tuple[Tick, ...]
    families: tuple[Family, ...]
    legend: tuple[Entry, ...]
    bubble: Entry
    hatch: str
    marks: tuple[EventMark, ...]
    event: tuple[Entry, ...]
    steady: tuple[Bracket, ...]
