"""A gallery as a page that needs no other file: a table, and for each exhibit its picture, all on one scale."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from chimera_ir.cost.simulate import Timeline
from chimera_ir.picture import svg
from chimera_ir.picture.chart import filled
from chimera_ir.picture.inlined import Inlined, policy_source
from chimera_ir.resources import templates
from chimera_ir.sweeps.gallery import Gallery, Shown
from chimera_ir.sweeps.gallery_printing import heading, words
from chimera_ir.sweeps.sweep import Refused

WIDTH = 2400
"""The largest width in pixels of half of the pictures; what is longer, such as a scheme that mostly idles, is wider."""

_STYLES = re.compile(r"<style>.*?</style>\n", re.DOTALL)


@dataclass(frozen=True, slots=True)
class GallerySection:
    """An exhibit on a page; ``drawings`` has its picture, or nothing if it is refused for the ``reason``."""

    anchor: str
    name: str
    size: str
    summary: str
    use: str
    reason: str
    drawings: tuple[Inlined, ...]


@dataclass(frozen=True, slots=True)
class PageRow:
    """A row of the table: the name of an exhibit, the anchor of its section further down, and the other cells."""

    anchor: str
    name: str
    cells: tuple[str, ...]


def page(gallery: Gallery) -> str:
    """The gallery as a page, of which the content security policy admits the style sheet alone."""
    rows = [words(exhibit) for exhibit in gallery.exhibits]
    heads = list(dict.fromkeys(head for row in rows for head in row))
    unit = _unit(gallery.shown)
    panels = []
    for number, (exhibit, row) in enumerate(zip(gallery.exhibits, rows, strict=True)):
        drawings: tuple[Inlined, ...] = ()
        reason = ""
        match exhibit.outcome:
            case Refused(code, why):
                reason = f"{code}: {why}"
            case Shown(timeline=timeline):
                drawings = (_drawing(timeline, unit, number),)
        panels.append(
            GallerySection(
                f"scheme-{number}", exhibit.name, row["size"], exhibit.summary, exhibit.use, reason, drawings
            )
        )
    table = [
        PageRow(panel.anchor, panel.name, tuple(row.get(head, "") for head in heads[1:]))
        for panel, row in zip(panels, rows, strict=True)
    ]
    style = (templates() / "gallery.css").read_text(encoding="utf-8")
    return filled(
        "gallery.html.j2",
        style=Inlined(style),
        source=policy_source(style),
        heading=heading(gallery),
        heads=heads,
        rows=table,
        panels=panels,
    )


def _drawing(timeline: Timeline, unit: Fraction, number: int) -> Inlined:
    """The picture of an exhibit, without the style sheet of a document of its own."""
    return Inlined(_STYLES.sub("", svg.filled(svg.picture(timeline, unit, f"bubble-{number}"))))


def _unit(shown: Sequence[Shown]) -> Fraction:
    """Pixels for a unit of time: enough for the labels of most pictures, unless most are then too wide."""
    fair = _middle(svg.fair_unit(schedule.timeline) for schedule in shown)
    time = _middle(schedule.timeline.shown for schedule in shown)
    return min(fair, WIDTH / time) if time else Fraction(1)


def _middle(values: Iterable[Fraction]) -> Fraction:
    """The median, of an even number of values the upper one of the two in the middle; 0 if there are none."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else Fraction(0)
