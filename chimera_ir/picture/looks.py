"""Colours and labels of boxes in a picture.

Each `Strand`, the micro-batches of a pipe or of its even or odd updates, has a hue. Where a worker has several stages
of a pipe, each of them has a shade of the hue, and a letter.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from functools import cache, cached_property
from itertools import chain, pairwise, product
from typing import NamedTuple, assert_never

from chimera_ir.cost.durations import decimal, percent, weighing
from chimera_ir.cost.simulate import Timeline, Track, Window
from chimera_ir.ir.graph import NamedStages
from chimera_ir.ir.kinds import KINDS, Kind, Resource
from chimera_ir.ir.levels import Header
from chimera_ir.ir.ops import Compute, Micro, Operation, Pair, Stage, singles
from chimera_ir.plural import counted


class Hue(NamedTuple):
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

_ROWS = {Resource.LANE: "P", Resource.HOST_LINK: "host "}


def hue(strand: int) -> Hue:
    """The colours of the strand with this number; the first 256 strands have different ones."""
    turn, number = divmod(strand, len(HUES))
    base, other = HUES[number], HUES[(number + _NEXT * turn) % len(HUES)]
    return Hue(mixed(base.light, other.light, _SHARE), mixed(base.dark, other.dark, _SHARE))


def mixed(colour: str, other: str, share: Fraction) -> str:
    """Mixes a share of the ``other`` colour into ``colour``."""
    pairs = ((int(colour[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(start + (end - start) * share):02x}" for start, end in pairs)


class Strand(NamedTuple):
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
    """Maps a micro-batch of a stream to one of the first two turns with the same workers and colours."""
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
    left_out = f"; {timeline.left_out}" if timeline.left_out else ""
    return f"{costs}; {figures}{_counting(header)}{left_out}"


def _counting(header: Header) -> str:
    if header.slices > 1:
        return f"; {header.slices} slices of a micro-batch, of which 0.1 is the second of the first"
    return "; numbers count halves" if header.halves else ""


def _shown(timeline: Timeline) -> str:
    last = timeline.header.micro_batches - 1
    # Updates if the last one is whole, else time.
    if any(last in single.micros for single in singles(timed.operation for timed in chain(*timeline.lanes))):
        return f"the first {counted(timeline.header.updates, 'update')}"
    return f"the first {timeline.costs.unit.show(timeline.shown)} of time"


def bracket(window: Window) -> str:
    """The words at the bracket that marks the steady state: how many updates it spans."""
    updates = "one update" if window.updates == 1 else counted(window.updates, "update")
    return f"{updates} in the steady state"


def event_name(timeline: Timeline) -> str:
    """The words of a legend for the marks of events: new weights, or launched sums."""
    return "new weights" if timeline.header.steps_inside else "gradient sum launched"


class Axis(NamedTuple):
    """A time axis up to ``span``: ``factor`` units with the name ``unit`` make one unit of the picture's times."""

    span: Fraction
    factor: Fraction | int
    unit: str

    @staticmethod
    def of(timeline: Timeline) -> "Axis":
        """The axis of a timeline."""
        return Axis(timeline.shown, *timeline.costs.unit.axis(timeline.shown))

    def label(self, time: Fraction) -> str:
        """The label of a time: a number, and at 0 also the unit, if it has a name."""
        return decimal(time * self.factor) if time or not self.unit else f"0 {self.unit}"

    def distance(self, least: Fraction) -> Fraction:
        """The round time between two labels, at least ``least``."""
        return step(least * self.factor) / self.factor


def step(least: Fraction) -> Fraction:
    """The smallest of 1, 2 and 5 times a power of ten that is at least ``least``, a positive number."""
    power = Fraction(1)
    while power > least:
        power /= 10
    while power * 10 <= least:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


_UNWRITABLE = re.compile("[\0-\x1f\ud800-\udfff]")


def plain(words: str) -> str:
    """Words without the characters that XML cannot represent."""
    return _UNWRITABLE.sub("\ufffd", words)


FARTHEST = Fraction(3, 5)
"""The share of white or black that is mixed into the colours of a worker's last stage."""

MIDDLE = Fraction(2, 5)
"""The share of the dark colour in the middle shade; dark ink is legible on it."""


class Shade(IntEnum):
    """The shade of an operation: light for forwards, dark for backwards that send gradients, middle for others."""

    LIGHT = 0
    DARK = 1
    MIDDLE = 2

    @staticmethod
    def of(kind: Kind) -> "Shade":
        """The shade of the operations of a kind."""
        if kind.opens:
            return Shade.LIGHT
        return Shade.DARK if kind.hands_on else Shade.MIDDLE


class Row(IntEnum):
    """The part of a lane's height that an operation takes: all of it, or a half if it is one of a pair."""

    WHOLE = 0
    UPPER = 1
    LOWER = 2

    def within(self, top: int, height: int) -> tuple[int, int]:
        """The top and the height of this part of a lane, from those of the lane."""
        if self is Row.WHOLE:
            return top, height
        half = height // 2
        return (top, half) if self is Row.UPPER else (top + half, height - half)

    def font(self, largest: int, height: int) -> int:
        """The font size of labels in this part of a lane of some height, at most ``largest``."""
        return largest if self is Row.WHOLE else min(largest, height // 2 - 3)


def rows_of(operation: Operation) -> list[tuple[Row, Compute]]:
    """The parts of an operation, each with its part of the lane's height: of a pair the forward is above."""
    rows = [Row.UPPER, Row.LOWER] if isinstance(operation, Pair) else [Row.WHOLE]
    return list(zip(rows, operation.parts, strict=True))


class ColourGroup(NamedTuple):
    """Key of operations of one colour: strand, chunk (0 for the first stage of a pipe on a worker), and shade."""

    strand: int
    chunk: int
    shade: Shade


class ColourSample(NamedTuple):
    """A colour in a legend, with the letters of the kind and the chunk that have it."""

    shade: Shade
    fill: str
    ink: str
    text: str


SWATCHES = 4
"""The most chunks (stages of a pipe on one worker) that a legend shows: the first ones and the last one."""


def kinds_of(operations: Iterable[Operation]) -> list[Kind]:
    """The kinds of operations that a legend has samples for, in the order of the table."""
    present = {operation.kind.letter for operation in singles(operations)}
    return [kind for letter, kind in KINDS.items() if letter in present]


@dataclass(frozen=True)
class Looks:
    """The colours and labels of the operations of a schedule.

    Where a worker has several stages of a pipe, each of them is a *chunk*, numbered by ascending stage; a group of
    stages with a name has chunks of its own, the same on all workers. Each chunk has its own shade of the pipe's hue
    and, for pictures without colour, a letter that follows the numbers of the micro-batches. If no worker has several
    stages of a pipe, there are neither shades nor letters.
    """

    header: Header

    @cached_property
    def chunks(self) -> int:
        """The largest number of stages that a pipe has on a worker; with groups, the sum of these numbers."""
        return 1 + max((max(places) for places in self._places.values()), default=0)

    @cached_property
    def hues(self) -> dict[tuple[int, int], Hue]:
        """The colours of operations, by the number of their strand and by their chunk."""
        numbers = range(len(strands(self.header)))
        return {(number, chunk): self._shade(number, chunk) for number in numbers for chunk in range(self.chunks)}

    def chunk(self, micro: Micro, stage: Stage) -> int:
        """The number of a stage among the stages of the micro-batch's pipe on the same worker, counted from 0.

        With groups it is counted among those of its group, and begins behind the chunks of the groups before.
        """
        return self._places[self.header.pipe_of[shown_micro(self.header, micro)].name][stage] if self.chunks > 1 else 0

    def group(self, operation: Compute) -> ColourGroup:
        """The group of operations with the same colours as this one."""
        micro = operation.micros[0]
        strand = self._strands[shown_micro(self.header, micro)]
        return ColourGroup(strand, self.chunk(micro, operation.stage), Shade.of(operation.kind))

    def fill(self, group: ColourGroup) -> str:
        """The colour of the boxes of a group."""
        colours = self.hues[group.strand, group.chunk]
        match group.shade:
            case Shade.LIGHT:
                return colours.light
            case Shade.DARK:
                return colours.dark
            case Shade.MIDDLE:
                return mixed(colours.light, colours.dark, MIDDLE)
            case _:
                assert_never(group.shade)

    def label(self, operation: Compute) -> str:
        """The text in the box of an operation: its micro-batches and the letter of its chunk, if it has one."""
        return label(operation, self.header.slices) + self.letter(self.chunk(operation.micros[0], operation.stage))

    def name(self, operation: Operation) -> str:
        """The label of an operation; for a pair, the labels of both: ``4&1``."""
        return "&".join(map(self.label, operation.parts))

    def samples(self, kinds: Iterable[Kind], strand: int) -> Iterator[ColourSample]:
        """Yields a sample of each colour of a strand that a legend shows: for its chunks, one for each kind."""
        for chunk, kind in product(self.chunks_shown, kinds):
            shade = Shade.of(kind)
            fill = self.fill(ColourGroup(strand, chunk, shade))
            yield ColourSample(shade, fill, ink(kind), kind.letter[0] + self.letter(chunk))

    @property
    def chunks_shown(self) -> tuple[int, ...]:
        """The chunks of a strand that a legend shows."""
        return tuple(range(self.chunks)) if self.chunks <= SWATCHES else (*range(SWATCHES - 1), self.chunks - 1)

    def signs(self, kinds: Sequence[Kind]) -> list[str]:
        """Explains the letters of chunks, if there are any, and those of kinds, if there are more than two kinds."""
        names = ", ".join(f"{kind.letter[0]} {kind.noun}" for kind in kinds) if len(kinds) > 2 else ""
        return [sign for sign in (self.sign, names) if sign]

    def letter(self, chunk: int) -> str:
        """The letter of a chunk: ``a``, ``b``, .. ``z``, ``aa``; empty if no worker has two stages of a pipe."""
        return _letter(chunk) if self.chunks > 1 else ""

    @property
    def sign(self) -> str:
        """The meaning of the letters, for a legend; empty if there are none."""
        if self.chunks == 1:
            return ""
        if any(name for name, _ in self._groups):
            return ", ".join(f"{_letters(chunks)} {name}" for name, chunks in self._groups)
        return f"{_letters(range(self.chunks))}: the pipe's stages on a worker, in order"

    def chunk_name(self, chunk: int) -> str:
        """A chunk in the words of a legend: its letter, and its group if it has one; empty if there are no letters."""
        group = next(name for name, chunks in self._groups if chunk in chunks)
        return f"{self.letter(chunk)} {group}".strip() if self.chunks > 1 else ""

    @cached_property
    def _strands(self) -> dict[Micro, int]:
        return {micro: number for number, strand in enumerate(strands(self.header)) for micro in strand.micros}

    @cached_property
    def _runs(self) -> Sequence[NamedStages]:
        """The groups of stages whose chunks are counted apart: all stages are one if workers need no letters."""
        header = self.header
        if header.named and any(len({*pipe.workers}) < header.stages for pipe in header.pipes):
            return header.named
        return (NamedStages("", Stage(0), Stage(header.stages)),)

    @cached_property
    def _groups(self) -> list[tuple[str, range]]:
        """The chunks of each group of stages, with its name."""
        ends = [
            (name, max(places[stage] for places in self._places.values() for stage in range(start, stop)) + 1)
            for name, start, stop in self._runs
        ]
        return [(name, range(start, end)) for (_, start), (name, end) in pairwise([("", 0), *ends])]

    @cached_property
    def _places(self) -> dict[str, tuple[int, ...]]:
        places: dict[str, tuple[int, ...]] = dict.fromkeys((pipe.name for pipe in self.header.pipes), ())
        first = 0
        for _, start, stop in self._runs:
            for pipe in self.header.pipes:
                workers = pipe.workers[start:stop]
                places[pipe.name] += tuple(first + workers[:at].count(worker) for at, worker in enumerate(workers))
            first = 1 + max(map(max, places.values()), default=0)
        return places

    def _shade(self, strand: int, chunk: int) -> Hue:
        base, share = hue(strand), chunk * FARTHEST / max(self.chunks - 1, 1)
        return Hue(mixed(base.light, PAPER, share), mixed(base.dark, BLACK, share))


def _letters(chunks: range) -> str:
    """The letters of some chunks, as ``a``, ``a, b`` or ``a-d``."""
    joint = ", " if len(chunks) == 2 else "-"
    return joint.join(dict.fromkeys((_letter(chunks[0]), _letter(chunks[-1]))))


@cache
def _letter(number: int) -> str:
    rounds, place = divmod(number, 26)
    return (_letter(rounds - 1) if rounds else "") + chr(ord("a") + place)
