"""What every picture of a timeline says in words, numbers and colours."""

from dataclasses import dataclass
from fractions import Fraction
from itertools import chain

from chimera_ir.cost.numbers import decimal, percent
from chimera_ir.cost.simulate import Timeline
from chimera_ir.cost.window import Window
from chimera_ir.ir.ids import Micro
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute
from chimera_ir.plural import counted


@dataclass(frozen=True, slots=True)
class Hue:
    """The colours of one strand: light under dark ink for forwards, dark under white ink for backwards."""

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
)
"""Distinct in lightness or hue under each of the three kinds of colour blindness; more strands go round again."""

INK = "#1a1a1a"
PAPER = "#ffffff"
BLACK = "#000000"
STEP = "#4d4d4d"
"""The optimizer's steps."""


def hue(strand: int) -> Hue:
    """The colours of a strand, by its place."""
    return HUES[strand % len(HUES)]


@dataclass(frozen=True, slots=True)
class Strand:
    """Micro-batches that share their colours: a pipe's, in an asynchronous schedule those of every other update."""

    name: str
    micros: tuple[Micro, ...]


def strands(header: Header) -> tuple[Strand, ...]:
    """What pictures tell apart by colour; the place of a strand is the number of its hue."""
    if not header.asynchronous:
        return tuple(Strand(pipe.name, pipe.micros) for pipe in header.pipes)
    return tuple(
        Strand(f"{pipe.name}, {name} updates", tuple(m for m in pipe.micros if m // header.per_update % 2 == parity))
        for parity, name in enumerate(("even", "odd"))
        for pipe in header.pipes
    )


def strand_numbers(header: Header) -> dict[Micro, int]:
    """For each micro-batch, the place of its strand."""
    return {micro: number for number, strand in enumerate(strands(header)) for micro in strand.micros}


def label(operation: Compute) -> str:
    """The micro-batches of an operation, as its box shows them: ``3``, ``4-5`` or ``0,2``."""
    first, last = operation.micros[0], operation.micros[-1]
    if len(operation.micros) == 1:
        return str(first)
    if operation.micros == tuple(range(first, last + 1)):
        return f"{first}-{last}"
    return ",".join(map(str, operation.micros))


def ink(operation: Compute) -> str:
    """The colour of an operation's label, legible on its ground."""
    return INK if operation.kind.opens else PAPER


def heading(timeline: Timeline) -> str:
    """The scheme and its parameters."""
    return named(timeline.header)


def named(header: Header) -> str:
    """The scheme and its parameters, of any level."""
    return "  ".join([header.scheme, *(f"{name}={value}" for name, value in header.parameters)])


def summary(timeline: Timeline) -> str:
    """The costs and what they lead to."""
    header = timeline.header
    figures = f"makespan {timeline.costs.unit.show(timeline.makespan)}, bubble ratio {percent(timeline.bubble_ratio)}"
    if header.asynchronous:
        figures = f"one update in the steady state: {figures}; {_shown(timeline)}"
    counted = "; numbers count halves" if header.halves else ""
    return f"{timeline.costs.summary(header)}; {figures}{counted}"


def _shown(timeline: Timeline) -> str:
    """How much of an asynchronous schedule a timeline shows."""
    last = timeline.header.micro_batches - 1
    whole = any(last in timed.operation.micros for timed in chain(*timeline.lanes))
    if whole:
        return f"the first {counted(timeline.header.updates, 'update')}"
    return f"the first {timeline.costs.unit.show(timeline.shown)} of time"


def bracket(window: Window) -> str:
    """What a stretch of the steady state is called."""
    updates = "one update" if window.updates == 1 else counted(window.updates, "update")
    return f"{updates} in the steady state"


def happening(timeline: Timeline) -> str:
    """What the marks of a timeline mean."""
    return "new weights" if timeline.header.asynchronous else "gradient sum launched"


def mark(timeline: Timeline, time: Fraction) -> str:
    """The label of a time along a picture: a number, and at 0 the unit as well, if it has a name."""
    number, unit = timeline.costs.unit.axis(timeline.shown)
    return decimal(time * number) if time or not unit else f"0 {unit}"


def distance(timeline: Timeline, least: Fraction) -> Fraction:
    """The time between two labels along a picture: round, and at least so much."""
    number, _ = timeline.costs.unit.axis(timeline.shown)
    return step(least * number) / number


def step(least: Fraction) -> Fraction:
    """The smallest of 1, 2 and 5 times a power of ten that is at least as large as a positive number."""
    power = Fraction(1)
    while power > least:
        power /= 10
    while power * 10 <= least:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def plain(words: str) -> str:
    """Words without the characters that XML has no way to write."""
    return "".join(
        character if character >= " " and not "\ud800" <= character <= "\udfff" else "\ufffd" for character in words
    )
