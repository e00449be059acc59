"""A timeline as text: a line per worker, a run of characters per operation.

An operation begins with the number of its micro-batch. ``─`` continues a forward, ``═`` a backward or an input
gradient, ``╌`` a weight gradient, ``≡`` a pair, which has two numbers; ``·`` is a bubble. Where a pipe has several
stages on a worker, a letter behind the number names the stage. So the picture can be read without colour. With colour,
each strand (the micro-batches of a pipe or, without a flush, of its even or odd updates) has a hue, and each of a
worker's stages a shade of it. ``▾`` ends an operation after which an event happens, unless the picture is drawn small.
"""

from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, pairwise
from typing import NamedTuple

from rich.text import Text

from chimera_ir.cost.simulate import Timed, Timeline, Window, beginning, steady_window
from chimera_ir.ir.kinds import Kind
from chimera_ir.ir.ops import Micro, Pair
from chimera_ir.ir.text.printer import runs
from chimera_ir.picture.looks import (
    Axis,
    Looks,
    Shade,
    Strand,
    bracket,
    event_name,
    ink,
    kinds_of,
    strands,
    summary,
    track_name,
)
from chimera_ir.plural import counted

LINES, RUNS = 60, 4
"""The most lines of a picture that is not drawn small, and the most runs of micro-batches that a legend shows."""

_ROOM = 2
"""The most columns that the shortest operation gets in addition to those that it needs."""

_FEW = 16
"""A picture that is too long for a line by at most this fraction of the line (1/16) is squeezed into it."""

_GAP = "   "

_FORWARD, _BACKWARD, _WEIGHTS, _PAIR, _BUBBLE, _EVENT = "─", "═", "╌", "≡", "·", "▾"

_STROKES = {Shade.LIGHT: _FORWARD, Shade.DARK: _BACKWARD, Shade.MIDDLE: _WEIGHTS}


@dataclass(frozen=True, slots=True)
class _ColumnScale:
    """Columns per tick, and the most columns of a line; each tick in ``narrow`` is drawn with one column less."""

    column: Fraction
    width: int
    narrow: tuple[int, ...] = ()

    def at(self, ticks: Fraction | int) -> int:
        return ticks * self.column.numerator // self.column.denominator - bisect_left(self.narrow, ticks)


class _Labelled(NamedTuple):
    """An operation with its times, its label, and whether it ends with a sign: of a launched sum, or of new weights."""

    timed: Timed
    name: str
    sign: bool


def draw(timeline: Timeline, width: int) -> Text:
    """The timeline as `picture` draws it, below its title and a line with its costs and figures."""
    return Text("\n").join(
        [Text(timeline.header.title, "bold"), Text(summary(_shown(timeline.visible, width))), picture(timeline, width)]
    )


def picture(timeline: Timeline, width: int) -> Text:
    """The timeline, no wider than ``width`` columns if that is possible.

    A timeline that is too long for a line is continued below, like a score. If it would take too many lines, only the
    part up to the end of the steady state is drawn. Without a steady state all of it is drawn small, with a note on
    what is missing; if most would be missing, nothing is drawn. Colours are styles of the `Text`; nothing is lost
    without them.
    """
    names, window = _names(timeline), steady_window(timeline)
    timeline = _shown(timeline.visible, width)
    scale, panels = _layout(timeline, _room(timeline, width))
    lengths = _lengths(timeline, scale)
    if 2 * lengths.count(0) > len(lengths):
        missing = f"{lengths.count(0):,} of {counted(len(lengths), 'operation')} would not be seen;"
        where = "a window of them" if timeline.left_out else "all of them"
        return Text(f"not drawn: in {width} columns {missing}\ntimeline.svg in the output directory shows {where}")
    looks = Looks(timeline.header)
    rows = [_row(lane, looks, scale, scale.at(timeline.span)) for lane in _lanes(timeline)]
    # Each panel has an axis, a row for each worker and, where the steady state is, a bracket below.
    parts = []
    for start, end in panels:
        parts.append(Text(" " * len(names[0]) + _axis(timeline, scale, start, end), "dim"))
        parts += [Text.assemble(name, row[start:end]) for name, row in zip(names, rows, strict=True)]
        parts += [Text(" " * len(names[0]) + line, "dim") for line in _bracket(window, scale, start, end)]
    left_out = [Text(timeline.left_out)] if timeline.left_out else []
    return Text("\n").join([*parts, *left_out, *_legend(timeline, window, width), *_notes(timeline, scale)])


def _names(timeline: Timeline) -> list[str]:
    names = list(map(track_name, timeline.tracks))
    return [name.ljust(max(map(len, names))) + " " for name in names]


def _room(timeline: Timeline, width: int) -> int:
    return max(width - len(_names(timeline)[0]), 10)


def _shown(timeline: Timeline, width: int) -> Timeline:
    """The part of a timeline that is drawn: up to the end of the steady state if all of it takes too many lines."""
    window = steady_window(timeline)
    if window and _lines(timeline, _legible(timeline, _room(timeline, width))) > LINES:
        return beginning(timeline, window)
    return timeline


def _lanes(timeline: Timeline) -> list[list[_Labelled]]:
    ends: set[tuple[int, Fraction | int]] = {(event.worker, event.at / timeline.tick) for event in timeline.events}
    looks = Looks(timeline.header)
    return [
        [_Labelled(timed, looks.name(timed.operation), timed.in_lane and (worker, timed.end) in ends) for timed in lane]
        for worker, _, lane in timeline.tracks
    ]


def _layout(timeline: Timeline, width: int) -> tuple[_ColumnScale, list[tuple[int, int]]]:
    """Returns the scale, and for each part of the cut picture its first column and the one after its last."""
    scale, span = _legible(timeline, width), max(timeline.span, 1)
    if _lines(timeline, scale) <= LINES:
        scale = _squeezed(timeline, scale)
        return scale, _panels(chain(*_lanes(timeline)), scale, scale.at(span))
    return _ColumnScale(min(Fraction(width, span), scale.column), width), [(0, width)]


def _legible(timeline: Timeline, width: int) -> _ColumnScale:
    """The smallest scale at which every operation shows its label and sign, or a slightly larger one."""
    operations, span = list(chain(*_lanes(timeline))), max(timeline.span, 1)
    shortest = min((shown.timed.end - shown.timed.start for shown in operations), default=span)
    # The columns of the shortest operation when each has room for its label, a stroke and its sign.
    lengths = ((len(shown.name) + 1 + shown.sign, shown.timed.end - shown.timed.start) for shown in operations)
    needed = max((-(-columns * shortest // ticks) for columns, ticks in lengths), default=1)
    wide = min(max(width * shortest // span, needed), needed + _ROOM)
    return _ColumnScale(Fraction(wide, shortest), width)


def _squeezed(timeline: Timeline, scale: _ColumnScale) -> _ColumnScale:
    """Returns a scale at which a picture a few columns too long fits on a line; the same one if a label would be lost.

    Only columns are removed in which every lane shows a bubble, or an operation that is longer than its label needs.
    """
    excess = scale.at(timeline.span) - scale.width
    if not 0 < excess <= scale.width // _FEW:
        return scale
    # Between two bounds, each lane shows one operation or one bubble, which can spare so many columns in all.
    lanes = _lanes(timeline)
    bounds = sorted({0, timeline.span, *(at for shown in chain(*lanes) for at in shown.timed[1:])})
    spare = [_spare(lane, scale, bounds) for lane in lanes]
    # From the right, remove as many columns between two bounds as every lane can spare there.
    narrow: list[int] = []
    for place, (start, end) in reversed([*enumerate(pairwise(bounds))]):
        parts = [lane[place] for lane in spare]
        columns = min(excess - len(narrow), scale.at(end) - scale.at(start), *(part[0] for part in parts))
        if columns > 0:
            narrow += [start] * columns
            for part in parts:
                part[0] -= columns
    return replace(scale, narrow=tuple(sorted(narrow))) if len(narrow) == excess else scale


def _spare(lane: Sequence[_Labelled], scale: _ColumnScale, bounds: Sequence[int]) -> list[list[int]]:
    """Counts the columns that a lane can spare between each of ``bounds`` and the next bound.

    Each count stands in a list of its own. Intervals in which the lane shows the same operation or bubble share one
    list object, because a column taken from one of them is taken from all.
    """
    parts: list[list[int]] = []
    place_of = {bound: place for place, bound in enumerate(bounds)}
    for shown in lane:
        start, end = shown.timed.start, shown.timed.end
        parts += [[scale.at(start) - scale.at(bounds[len(parts)]) - 1]] * (place_of[start] - len(parts))
        parts += [[scale.at(end) - scale.at(start) - len(shown.name) - 1 - shown.sign]] * (place_of[end] - len(parts))
    return parts + [[scale.at(bounds[-1]) - scale.at(bounds[len(parts)]) - 1]] * (len(bounds) - 1 - len(parts))


def _lines(timeline: Timeline, scale: _ColumnScale) -> int:
    return -(-scale.at(timeline.span) // scale.width) * (len(timeline.tracks) + 1)


def _panels(operations: Iterable[_Labelled], scale: _ColumnScale, columns: int) -> list[tuple[int, int]]:
    """Cuts a picture, as `_cut` does, into as few and as equal parts as possible, none of which ends within a label."""
    within = {scale.at(shown.timed.start) + offset for shown in operations for offset in range(1, len(shown.name) + 1)}
    fewest = len(_cut(columns, scale.width, within))
    widths = range(-(-columns // fewest), scale.width + 1)
    return next(parts for parts in (_cut(columns, width, within) for width in widths) if len(parts) == fewest)


def _cut(columns: int, width: int, within: Container[int]) -> list[tuple[int, int]]:
    """Cuts ``columns`` columns into parts; returns for each part its first column and the one after its last.

    A part is as long as ``width`` allows. It does not end at a column in ``within``, unless there is no other column to
    end at.
    """
    panels = []
    start = 0
    while columns - start > width:
        end = next((at for at in range(start + width, start, -1) if at not in within), start + width)
        panels.append((start, end))
        start = end
    return [*panels, (start, columns)]


def _row(lane: Sequence[_Labelled], looks: Looks, scale: _ColumnScale, columns: int) -> Text:
    row = Text()
    for shown in lane:
        start, end = scale.at(shown.timed.start), min(scale.at(shown.timed.end), columns)
        row.append(_BUBBLE * (start - len(row)), "dim")
        operation = shown.timed.operation.parts[-1]
        row.append(_strokes(shown, end - start), f"{ink(operation.kind)} on {looks.fill(looks.group(operation))}")
    return row.append(_BUBBLE * (columns - len(row)), "dim")


def _strokes(shown: _Labelled, length: int) -> str:
    operation = shown.timed.operation
    stroke = _PAIR if isinstance(operation, Pair) else _STROKES[Shade.of(operation.kind)]
    name = shown.name if len(shown.name) < length else ""
    sign = _EVENT if shown.sign and len(name) + 1 < length else ""
    return name.ljust(length - len(sign), stroke) + sign


def _bracket(window: Window | None, scale: _ColumnScale, start: int, end: int) -> Iterator[str]:
    """Yields the line that marks the steady state below columns ``start`` to ``end``, if they show it."""
    if window is None:
        return
    first, last = scale.at(window.start), scale.at(window.end) - 1
    line = f"└{_FORWARD * (last - first - 1)}┘" if first < last else ""
    shown = line.rjust(last + 1)[start:end] if start <= last and first < end else ""
    if shown:
        yield shown


def _axis(timeline: Timeline, scale: _ColumnScale, start: int, end: int) -> str:
    per_unit = scale.column / timeline.tick
    axis = Axis.of(timeline)
    apart = axis.distance((len(axis.label(axis.span)) + 3) / per_unit)
    line = ""
    number = -(-start // (apart * per_unit))
    while (place := scale.at(number * apart / timeline.tick)) < end:
        column = place - start
        time = axis.label(number * apart)
        if column >= len(line) and column + len(time) <= end - start:
            line = line.ljust(column) + time + " "
        number += 1
    return line.rstrip()


def _legend(timeline: Timeline, window: Window | None, width: int) -> Iterator[Text]:
    """Yields the lines of the legend: the strands with their colours and micro-batches, then the signs."""
    line, looks = Text(), Looks(timeline.header)
    kinds = kinds_of(timed.operation for timed in chain(*timeline.lanes))
    entries = [_entry(looks, kinds, number, strand) for number, strand in enumerate(strands(timeline.header))]
    for entry in [*entries, *map(Text, looks.signs(kinds)), *_signs(timeline, window)]:
        if line and len(line) + len(_GAP) + len(entry) > width:
            yield line
            line = Text()
        line.append(_GAP if line else "").append_text(entry)
    yield line


def _entry(looks: Looks, kinds: Sequence[Kind], number: int, strand: Strand) -> Text:
    entry = Text()
    for sample in looks.samples(kinds, number):
        entry.append(sample.text + _STROKES[sample.shade] * 2, f"{sample.ink} on {sample.fill}")
    return entry.append(f" {strand.name}: {_ranges(strand.micros[:: looks.header.slices], looks.header.slices)}")


def _signs(timeline: Timeline, window: Window | None) -> Iterator[Text]:
    """Yields legend entries for the signs that the picture uses in addition to operations."""
    if any(isinstance(timed.operation, Pair) for lane in timeline.lanes for timed in lane):
        yield Text(f"{_PAIR * 2} pair")
    yield Text.assemble((_BUBBLE * 3, "dim"), " bubble")
    if timeline.events:
        yield Text(f"{_EVENT} {event_name(timeline)}")
    if window:
        yield Text(f"└{_FORWARD}┘ {bracket(window)}")


def _ranges(micros: Sequence[Micro], slices: int) -> str:
    """Text with the first few runs of consecutive micro-batches, such as ``0-3, 8-11``; ``micros`` count slices."""
    whole = runs(micro // slices for micro in micros)
    ranges = [f"{start}" if end == start + 1 else f"{start}-{end - 1}" for start, end in whole]
    return ", ".join(ranges[:RUNS] + ([".."] if len(ranges) > RUNS else [])) or "none"


def _lengths(timeline: Timeline, scale: _ColumnScale) -> list[int]:
    return [scale.at(timed.end) - scale.at(timed.start) for timed in chain.from_iterable(timeline.lanes)]


def _notes(timeline: Timeline, scale: _ColumnScale) -> Iterator[Text]:
    operations, lengths = list(chain.from_iterable(timeline.lanes)), _lengths(timeline, scale)
    looks = Looks(timeline.header)
    unnumbered = sum(
        length <= len(looks.name(timed.operation)) for length, timed in zip(lengths, operations, strict=True)
    )
    if unnumbered:
        per_column = timeline.costs.unit.show(timeline.tick / scale.column)
        yield Text(
            f"drawn small, {per_column} of time to a column: {unnumbered} of {counted(len(operations), 'operation')}"
        )
        yield Text(f"have no room for their number, and {lengths.count(0)} of them are not seen at all")
