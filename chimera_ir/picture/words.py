"""What every picture of a timeline says in words, numbers and colours."""

from dataclasses import dataclass
from fractions import Fraction

from chimera_ir.cost.numbers import decimal, percent
from chimera_ir.cost.simulate import Timeline
from chimera_ir.ir.ids import Micro
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Backward, Compute


@dataclass(frozen=True, slots=True)
class Hue:
    """The colours of one pipe: light under dark ink for forwards, dark under white ink for backwards."""

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
"""Distinct in lightness or hue under each of the three kinds of colour blindness; more pipes go round again."""

INK = "#1a1a1a"
PAPER = "#ffffff"


def hue(pipe: int) -> Hue:
    """The colours of a pipe, by its place in the header."""
    return HUES[pipe % len(HUES)]


def pipe_numbers(header: Header) -> dict[Micro, int]:
    """For each micro-batch, the place of its pipe in the header."""
    return {micro: number for number, pipe in enumerate(header.pipes) for micro in pipe.micros}


def label(operation: Compute) -> str:
    """The micro-batches of an operation, as its box shows them: ``3``, ``4-5`` or ``0,2``."""
    first, last = operation.micros[0], operation.micros[-1]
    if len(operation.micros) == 1:
        return str(first)
    if operation.micros == tuple(range(first, last + 1)):
        return f"{first}-{last}"
    return ",".join(map(str, operation.micros))


def colour(operation: Compute, pipe: int) -> str:
    """The ground on which an operation's label stands."""
    return hue(pipe).dark if isinstance(operation, Backward) else hue(pipe).light


def ink(operation: Compute) -> str:
    """The colour of an operation's label, legible on its ground."""
    return PAPER if isinstance(operation, Backward) else INK


def heading(timeline: Timeline) -> str:
    """The scheme and its parameters."""
    header = timeline.header
    return "  ".join([header.scheme, *(f"{name}={value}" for name, value in header.parameters)])


def summary(timeline: Timeline) -> str:
    """The costs and what they lead to."""
    costs, counted = timeline.costs.summary(timeline.header), "; numbers count halves" if timeline.header.halves else ""
    return f"{costs}; makespan {decimal(timeline.makespan)}, bubble ratio {percent(timeline.bubble_ratio)}{counted}"


def step(least: Fraction) -> Fraction:
    """The smallest of 1, 2 and 5 times a power of ten that is at least as large as a positive number."""
    power = Fraction(1)
    while power > least:
        power /= 10
    while power * 10 <= least:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
