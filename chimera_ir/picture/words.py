"""Words, numbers and colours that all pictures of a timeline have in common."""

from dataclasses import dataclass
from fractions import Fraction
from itertools import chain

from chimera_ir.cost.durations import weighing
from chimera_ir.cost.number_text import decimal, percent
from chimera_ir.cost.simulate import Timeline, Track
from chimera_ir.cost.window import Window
from chimera_ir.ir.ids import Micro
from chimera_ir.ir.kinds import Kind, Resource
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute, singles
from chimera_ir.plural import counted


@dataclass(frozen=True, slots=True)
class Hue:
    """The colours of one strand: light for forwards, with dark ink; dark for backwards, with white ink."""

    light: str
    dark: str


HUES = (
    Hue("#a9d3f7", "#1f5fa8"),
    Hue("#fbc48a", "#b5520a"),
    Hue("#c3ecd0", "#144d33"),
    Hue("#f5e0fd", "#4b1a7a"),
    Hue("#c4b66c", "#66541a"),
    Hue("#e8a8bc", "#b5197c"),
    Hue("#dcf08f", "#64801a"),
    Hue("#94dcd4", "#0e7a89"),
    Hue("#ab90fc", "#6300e1"),
    Hue("#fc9000", "#510900"),
    Hue("#f35abd", "#3f1236"),
    Hue("#999987", "#000090"),
    Hue("#00abcf", "#3f4851"),
    Hue("#fc6c36", "#87092d"),
    Hue("#f3ea00", "#756c5a"),
    Hue("#abb4fc", "#7e36cf"),
)
"""Hues that differ under each of the three kinds of colour blindness; further strands have mixtures of them."""

_NEXT, _SHARE = 5, Fraction(1, 3)
"""The rule for colours after the last of the 16 `HUES`.

Strand 16 n + i has the colours of hue i, of which a third is replaced by those of hue i + 5 n.
"""

INK = "#1a1a1a"
PAPER = "#ffffff"
BLACK = "#000000"
STEP = "#4d4d4d"
"""The colour of the optimizer's steps."""


_ROWS = {Resource.LANE: "P", Resource.HOST_LINK: "host "}
"""The beginnings of the names of rows."""


def hue(strand: int) -> Hue:
    """The colours of the strand with this number; the first 256 strands have different ones."""
    turn, number = divmod(strand, len(HUES))
    base, other = HUES[number], HUES[(number + _NEXT * turn) % len(HUES)]
    return Hue(mixed(base.light, other.light, _SHARE), mixed(base.dark, other.dark, _SHARE))


def mixed(colour: str, other: str, share: Fraction) -> str:
    """Mixes a share of the ``other`` colour into ``colour``."""
    pairs = ((int(colour[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(start + (end - start) * share):02x}" for start, end in pairs)


@dataclass(frozen=True, slots=True)
class Strand:
    """Micro-batches with the same hue: those of a pipe or, without a flush, of its even or odd updates."""

    name: str
    micros: tuple[Micro, ...]


def strands(header: Header) -> tuple[Strand, ...]:
    """The strands of a schedule; the index of a strand is its number, which decides its hue."""
    if not header.asynchronous:
        return tuple(Strand(pipe.name, pipe.micros) for pipe in header.pipes)
    return tuple(
        Strand(f"{pipe.name}, {name} updates", tuple(m for m in pipe.micros if m // header.per_update % 2 == parity))
        for parity, name in enumerate(("even", "odd"))
        for pipe in header.pipes
    )


def shown_micro(header: Header, micro: int) -> Micro:
    """Maps a micro-batch of a stream to one of the first two turns that has the same workers and colours.

    With a flush it returns ``micro`` itself.
    """
    return Micro(micro % (2 * header.period) if header.period else micro)


def label(operation: Compute, slices: int = 1) -> str:
    """The micro-batches of an operation, as its box shows them: ``3``, ``4-5`` or ``0,2``, and ``3.1`` of a slice."""
    first, last = operation.micros[0], operation.micros[-1]
    if slices > 1:
        return f"{first // slices}.{first % slices}"
    if len(operation.micros) == 1:
        return str(first)
    if operation.micros == tuple(range(first, last + 1)):
        return f"{first}-{last}"
    return ",".join(map(str, operation.micros))


def track_name(track: Track) -> str:
    """The name of a row: ``P0`` for the lane of worker 0, ``host 0`` for its link to the host."""
    return f"{_ROWS[track.resource]}{track.worker}"


def ink(kind: Kind) -> str:
    """The colour of the labels of operations of a kind, legible in their boxes."""
    return PAPER if kind.hands_on and not kind.opens else INK


def summary(timeline: Timeline) -> str:
    """The line below a picture's title, with the costs, the makespan and the bubble ratio."""
    header = timeline.header
    figures = f"makespan {timeline.costs.unit.show(timeline.makespan)}, bubble ratio {percent(timeline.bubble_ratio)}"
    if header.asynchronous:
        figures = f"one update in the steady state: {figures}; {_shown(timeline)}"
    costs = timeline.costs.summary(header, timeline.critical_path.counts) + weighing(header)
    return f"{costs}; {figures}{_counting(header)}"


def _counting(header: Header) -> str:
    """Words on the numbers in boxes, where they count slices or halves; empty where they count whole micro-batches."""
    if header.slices > 1:
        return f"; {header.slices} slices of a micro-batch, of which 0.1 is the second of the first"
    return "; numbers count halves" if header.halves else ""


def _shown(timeline: Timeline) -> str:
    """Says how much of a stream a timeline shows: so many updates or, if the last is cut off, so much time."""
    last = timeline.header.micro_batches - 1
    whole = any(last in single.micros for single in singles(timed.operation for timed in chain(*timeline.lanes)))
    if whole:
        return f"the first {counted(timeline.header.updates, 'update')}"
    return f"the first {timeline.costs.unit.show(timeline.shown)} of time"


def bracket(window: Window) -> str:
    """The words at the bracket that marks the steady state: how many updates it spans."""
    updates = "one update" if window.updates == 1 else counted(window.updates, "update")
    return f"{updates} in the steady state"


def event_name(timeline: Timeline) -> str:
    """The words of a legend for the marks of events: new weights, or launched sums."""
    return "new weights" if timeline.header.steps_inside else "gradient sum launched"


def mark(timeline: Timeline, time: Fraction) -> str:
    """The label of a time on the axis: a number, and at 0 also the unit, if it has a name."""
    number, unit = timeline.costs.unit.axis(timeline.shown)
    return decimal(time * number) if time or not unit else f"0 {unit}"


def distance(timeline: Timeline, least: Fraction) -> Fraction:
    """The round time between two labels on the axis, at least ``least``."""
    number, _ = timeline.costs.unit.axis(timeline.shown)
    return step(least * number) / number


def step(least: Fraction) -> Fraction:
    """The smallest of 1, 2 and 5 times a power of ten that is at least ``least``, a positive number."""
    power = Fraction(1)
    while power > least:
        power /= 10
    while power * 10 <= least:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def plain(words: str) -> str:
    """Words without the characters that XML cannot represent."""
    return "".join(
        character if character >= " " and not "\ud800" <= character <= "\udfff" else "\ufffd" for character in words
    )
