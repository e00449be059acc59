"""Colours and labels of boxes in a picture.

Each `Strand`, the micro-batches of a pipe or of its even or odd updates, has a hue. Where a worker has several stages
of a pipe, each of them has a shade of the hue, and a letter.
"""

from collections import defaultdict
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple, assert_never

from chimera_ir.ir.ids import Micro, Stage
from chimera_ir.ir.kinds import Kind
from chimera_ir.ir.levels import Header, Pipe
from chimera_ir.ir.ops import Compute, Operation, Pair
from chimera_ir.picture.words import BLACK, PAPER, Hue, hue, label, mixed, shown_micro, strands

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
    """The parts of an operation, each with the part of the lane's height that it takes.

    A pair has two, the forward above the backward; any other operation has one, itself.
    """
    rows = [Row.UPPER, Row.LOWER] if isinstance(operation, Pair) else [Row.WHOLE]
    return list(zip(rows, operation.parts, strict=True))


class ColourGroup(NamedTuple):
    """Key of operations of one colour: the number of their strand, their chunk, and light, dark or middle.

    ``chunk`` is 0 for the first stage of a pipe on a worker, 1 for the second.
    """

    strand: int
    chunk: int
    shade: Shade


@dataclass(frozen=True)
class Looks:
    """The colours and labels of the operations of a schedule.

    Where a worker has several stages of a pipe, each of them is a *chunk*, numbered by ascending stage. Each chunk has
    its own shade of the pipe's hue and, for pictures without colour, a letter that follows the numbers of the
    micro-batches. If no worker has several stages of a pipe, there are neither shades nor letters.
    """

    header: Header

    @cached_property
    def chunks(self) -> int:
        """The largest number of stages that a pipe has on a worker."""
        return 1 + max((max(places) for places in self._places.values()), default=0)

    @cached_property
    def hues(self) -> dict[tuple[int, int], Hue]:
        """The colours of operations, by the number of their strand and by their chunk."""
        numbers = range(len(strands(self.header)))
        return {(number, chunk): self._shade(number, chunk) for number in numbers for chunk in range(self.chunks)}

    def chunk(self, micro: Micro, stage: Stage) -> int:
        """The number of a stage among the stages of the micro-batch's pipe on the same worker, counted from 0."""
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

    def letter(self, chunk: int) -> str:
        """The letter of a chunk: ``a``, ``b``, .. ``z``, ``aa``; empty if no worker has two stages of a pipe."""
        return _letter(chunk) if self.chunks > 1 else ""

    @property
    def sign(self) -> str:
        """The meaning of the letters, for a legend; empty if there are none."""
        if self.chunks == 1:
            return ""
        joint = ", " if self.chunks == 2 else "-"
        return f"{_letter(0)}{joint}{_letter(self.chunks - 1)}: the pipe's stages on a worker, in order"

    @cached_property
    def _strands(self) -> dict[Micro, int]:
        return {micro: number for number, strand in enumerate(strands(self.header)) for micro in strand.micros}

    @cached_property
    def _places(self) -> dict[str, tuple[int, ...]]:
        return {pipe.name: _places(pipe) for pipe in self.header.pipes}

    def _shade(self, strand: int, chunk: int) -> Hue:
        """The colours of a chunk: the higher its number, the lighter its forwards and the darker its backwards."""
        base, share = hue(strand), chunk * FARTHEST / max(self.chunks - 1, 1)
        return Hue(mixed(base.light, PAPER, share), mixed(base.dark, BLACK, share))


def _places(pipe: Pipe) -> tuple[int, ...]:
    """Counts, for each stage, the earlier stages that the pipe has on the same worker."""
    earlier: defaultdict[int, int] = defaultdict(int)
    places = []
    for worker in pipe.workers:
        places.append(earlier[worker])
        earlier[worker] += 1
    return tuple(places)


def _letter(number: int) -> str:
    """The letter with this number, counted from 0: a, b, .. z, aa, ab, .."""
    rounds, place = divmod(number, 26)
    return (_letter(rounds - 1) if rounds else "") + chr(ord("a") + place)
